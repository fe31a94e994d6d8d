"""A Llama decoder in plain torch for training; its parameter names and arithmetic are LlamaForCausalLM's."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sgl_importance_lab.probe.model_config import ModelConfig


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [batch, heads, tokens, head_size]; cos, sin: [batch, 1, tokens, head_size]."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        self.head_size = shape.head_size
        self.q_proj = nn.Linear(shape.width, shape.heads * shape.head_size, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.kv_heads * shape.head_size, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.kv_heads * shape.head_size, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_size, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        groups = q.shape[1] // k.shape[1]
        k = _rotate(k, cos, sin).repeat_interleave(groups, dim=1)
        v = v.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(
            _rotate(q, cos, sin), k, v, attn_mask=mask, is_causal=mask is None
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down_proj = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = nn.RMSNorm(shape.width, shape.norm_epsilon)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, shape.norm_epsilon)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Trunk(nn.Module):
    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, shape.norm_epsilon)


INITIAL_DEVIATION = 0.02


class Decoder(nn.Module):
    """Causal decoder whose state dict loads into LlamaForCausalLM."""

    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        self.shape = shape
        self.model = _Trunk(shape)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalised hidden states [batch, tokens, width]; ids and positions are int64 [batch, tokens].

        `mask`, bool [batch, 1, tokens, tokens], says which keys each query sees; all up to its own if None.
        """
        shape = self.shape
        half = torch.arange(0, shape.head_size, 2, dtype=torch.float32) / shape.head_size
        angles = positions[:, None, :, None].float() * shape.rope_theta**-half
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos(), angles.sin()
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask)
        return self.model.norm(x)


def build_decoder(config: ModelConfig, seed: int) -> Decoder:
    """A decoder with weights from N(0, 0.02): in larger ones the copy circuit forms much later."""
    torch.manual_seed(seed)
    decoder = Decoder(config)
    for parameter in decoder.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=INITIAL_DEVIATION)
    return decoder
