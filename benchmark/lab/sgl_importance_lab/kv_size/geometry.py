"""What one layer keeps: K and V per head, a latent, or a recurrent state; and a GPU's share of it.

The formulas are those of sglang 0.5.21 (``srt/mem_cache/memory_pool.py``, ``srt/configs/mamba_utils.py``);
``benchmark/lab/test/kv_size`` compares them with its pools byte for byte.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from sgl_importance_lab.kv_size.cache_dtype import CacheDtype, Scales
from sgl_importance_lab.kv_size.fields import SizeError

Parts = Counter[str]
"""Bytes by kind of tensor: k, v, k_scale, v_scale, latent, latent_scale, index, conv, ssm."""

INDEX_HEAD_DIM = 128
_INDEX_BYTES = INDEX_HEAD_DIM + 4
"""An indexer's key: fp8 elements, and one float32 scale for each 128 of them."""
_LATENT_BLOCK = 128
_ROPE_BYTES = 2
_MODEL_BYTES = 2
"""Of an element that has the model's own dtype."""


@dataclass(frozen=True, slots=True)
class HeadGeometry:
    """K and V per KV head (MHA, GQA, MQA).

    Attributes:
        kv_heads: over all GPUs.
        head_dim: elements of a key.
        v_head_dim: elements of a value.
        index_dim: elements of a further key, by which sparse attention chooses blocks and which every GPU
            keeps whole; 0 for none.
        index_values: it has a value of as many elements beside it.
        index_fp8: kernels that keep it in fp8 where K and V are (sglang's trtllm_mha on sm_100).
    """

    kv_heads: int
    head_dim: int
    v_head_dim: int
    index_dim: int = 0
    index_values: bool = False
    index_fp8: bool = False

    def local_heads(self, tp: int) -> int:
        """KV heads on each of ``tp`` GPUs; one, held by several, where there are fewer heads than GPUs.

        Raises:
            SizeError: the heads cannot be shared evenly.
        """
        if self.kv_heads % tp and tp % self.kv_heads:
            raise SizeError(
                f"{self.kv_heads} KV heads cannot be shared by {tp} GPUs: choose --tp (or --dp-attention) so "
                "that one divides the other"
            )
        return max(1, self.kv_heads // tp)

    def copies(self, tp: int) -> int:
        """How often each head lies on ``tp`` GPUs together."""
        return self.local_heads(tp) * tp // self.kv_heads

    def token_bytes(self, dtype: CacheDtype, tp: int) -> Parts:
        """Of one token on one GPU.

        Raises:
            SizeError: the dtype has no pool for these heads.
        """
        dtype.check_width(self.head_dim, "head_dim")
        dtype.check_width(self.v_head_dim, "v_head_dim")
        if dtype.scales is Scales.FP4 and self.head_dim != self.v_head_dim:
            raise SizeError(f"--dtype {dtype.name} has pools for K and V of one width only: take fp8_e4m3")
        if self.index_dim and dtype.scales is not Scales.NONE:
            raise SizeError(f"--dtype {dtype.name} has no pool for this sparse attention: take fp8_e4m3")
        heads = self.local_heads(tp)
        return Parts(
            index=self.index_dim * (1 + self.index_values) * (1 if self.index_fp8 else _MODEL_BYTES),
            k=heads * dtype.row_bytes(self.head_dim),
            v=heads * dtype.row_bytes(self.v_head_dim),
            k_scale=heads * dtype.scale_bytes(self.head_dim),
            v_scale=heads * dtype.scale_bytes(self.v_head_dim),
        )


@dataclass(frozen=True, slots=True)
class LatentGeometry:
    """One compressed row for all heads (MLA), which every GPU keeps whole.

    Attributes:
        rank: elements of the latent.
        rope_dim: elements of the key's rotary part.
        indexer: sparse attention (DSA) chooses what to read: its pool has a layout of its own in fp8, and
            pages of 64 tokens.
        index_keys: this layer keeps keys of its own for choosing, which layers that take over another
            layer's choice do not.
        raw_fp8: kernels that read fp8 latents without scales (sglang's trtllm backends).
    """

    rank: int
    rope_dim: int
    indexer: bool = False
    index_keys: bool = False
    raw_fp8: bool = False

    def copies(self, tp: int) -> int:
        """How often the row lies on ``tp`` GPUs together."""
        return tp

    def token_bytes(self, dtype: CacheDtype, tp: int) -> Parts:
        """Of one token on one GPU.

        Raises:
            SizeError: the dtype has no pool for latents.
        """
        if dtype.scales is Scales.MXFP8:
            raise SizeError("--dtype mxfp8 has no pool for latents (MLA): take fp8_e4m3")
        if not self.indexer:
            # The pool of latents in FP4 is the same for both recipes, with one scale for 16 elements.
            width = self.rank + self.rope_dim
            if dtype.scales is Scales.FP4 and width % 16:
                raise SizeError(f"--dtype {dtype.name} needs a multiple of 16 and the latent has {width}")
            return Parts(latent=dtype.row_bytes(width), latent_scale=dtype.scale_bytes(width))
        if dtype.name not in ("bfloat16", "fp8_e4m3"):
            raise SizeError(
                f"--dtype {dtype.name} has no pool for sparse attention: take bfloat16 or fp8_e4m3"
            )
        index = _INDEX_BYTES if self.index_keys else 0
        if dtype.name == "fp8_e4m3" and not self.raw_fp8:
            if self.rank % _LATENT_BLOCK:
                raise SizeError(
                    f"kv_lora_rank {self.rank} is no multiple of {_LATENT_BLOCK}: take --dtype bfloat16"
                )
            # The row holds its scales, one float32 a block, and the rotary part in 16 bits.
            scales = self.rank // _LATENT_BLOCK * 4
            return Parts(latent=self.rank + scales + self.rope_dim * _ROPE_BYTES, index=index)
        return Parts(latent=(self.rank + self.rope_dim) * dtype.itemsize, index=index)


@dataclass(frozen=True, slots=True)
class StateGeometry:
    """The state of a recurrent layer: one per request, however long it is.

    It has a window of the convolution's inputs and a matrix per head, as in Mamba 2, gated delta nets, Kimi
    delta attention (three convolutions that are counted together), Mamba 1 (every channel is a head of width
    1) and short convolutions (no heads).

    Attributes:
        heads: over all GPUs.
        head_dim: rows of a head's matrix.
        state_size: its columns.
        conv_channels: of the convolution, without those of ``groups``.
        groups: whose B and C of ``state_size`` pass the convolution too; 0 for none.
        groups_are_heads: they are key heads, of which every GPU needs its own; else several GPUs may have
            the same group.
        conv_window: inputs that the convolution keeps: its kernel's width less one.
        conv_itemsize: bytes of an element of the window.
        ssm_itemsize: bytes of an element of the matrices.
    """

    heads: int
    head_dim: int
    state_size: int
    conv_channels: int
    groups: int
    conv_window: int
    conv_itemsize: int
    ssm_itemsize: int
    groups_are_heads: bool = False

    def copies(self, tp: int) -> int:
        """Shares do not overlap, but for B and C, which all GPUs of a group have."""
        return 1

    def slot_bytes(self, tp: int) -> Parts:
        """Of one request's state on one GPU.

        Raises:
            SizeError: heads or channels cannot be shared evenly.
        """
        groups = self.groups
        if groups % tp:
            if groups > tp or self.groups_are_heads:
                raise SizeError(
                    f"{groups} groups of states cannot be shared by {tp} GPUs: choose another --tp"
                )
            groups = tp  # Each GPU has the group that its heads read.
        if self.heads % tp or self.conv_channels % tp:
            raise SizeError(
                f"a state of {self.heads} heads and {self.conv_channels} channels cannot be shared by {tp} "
                "GPUs: choose a --tp that divides both"
            )
        channels = (self.conv_channels + 2 * groups * self.state_size) // tp
        return Parts(
            conv=channels * self.conv_window * self.conv_itemsize,
            ssm=self.heads // tp * self.head_dim * self.state_size * self.ssm_itemsize,
        )


Geometry = HeadGeometry | LatentGeometry | StateGeometry
