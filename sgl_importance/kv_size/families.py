"""Which config means which caches: a reader for each model type that sglang 0.5.21 serves and a test checks.

A type is the ``model_type`` of config.json; its ``architectures`` decide which pools sglang builds
(``srt/configs/model_config.py``), so a config with others is refused. So is a type that is not here: many
differ in one detail that changes the size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sgl_importance.kv_size.attention_families import (
    derived_heads,
    equal_layers,
    gemma_4,
    gpt_bigcode,
    gpt_oss,
    latent_layers,
    llama_4,
    masked_windows,
    mimo_v2,
    shared_layers,
    sparse_latent_layers,
    stated_heads,
)
from sgl_importance.kv_size.fields import Fields, SizeError
from sgl_importance.kv_size.model_shape import LayerCache, QueryHeads
from sgl_importance.kv_size.state_families import (
    falcon_h1,
    granite_hybrid,
    kimi_linear,
    mamba_1,
    mamba_2,
    nemotron_h,
    qwen_gated_delta,
    short_convolutions,
)

Layers = tuple[int, list[LayerCache], QueryHeads | None]
"""Number of layers, what they keep, and the heads that read it."""


@dataclass(frozen=True, slots=True)
class Family:
    """
    Attributes:
        architectures: that sglang serves with these caches.
        read: the layers of a config.
        nested: the name of the object with the text model, in configs that have more than text.
    """

    architectures: tuple[str, ...]
    read: Callable[[Fields], Layers]
    nested: str | None = None


_PATTERN = "sliding_window_pattern"
_GEMMA_3 = masked_windows(stated_heads, every=6, pattern=_PATTERN)
_COHERE_2 = masked_windows(derived_heads, every=4, pattern=_PATTERN, present=0)

FAMILIES: dict[str, Family] = {
    # ---- K and V per head, for every token ----
    "llama": Family(("LlamaForCausalLM",), equal_layers(derived_heads)),
    "mistral": Family(("MistralForCausalLM",), equal_layers(derived_heads)),
    "mixtral": Family(("MixtralForCausalLM",), equal_layers(derived_heads)),
    "qwen2": Family(("Qwen2ForCausalLM",), equal_layers(derived_heads)),
    "qwen2_moe": Family(("Qwen2MoeForCausalLM",), equal_layers(derived_heads)),
    "qwen3": Family(("Qwen3ForCausalLM",), equal_layers(stated_heads)),
    "qwen3_moe": Family(("Qwen3MoeForCausalLM",), equal_layers(derived_heads)),
    "gemma": Family(("GemmaForCausalLM",), equal_layers(stated_heads)),
    "phi3": Family(("Phi3ForCausalLM",), equal_layers(derived_heads)),
    "olmo2": Family(("Olmo2ForCausalLM",), equal_layers(derived_heads)),
    "granite": Family(("GraniteForCausalLM",), equal_layers(derived_heads)),
    "starcoder2": Family(("Starcoder2ForCausalLM",), equal_layers(derived_heads)),
    "cohere": Family(("CohereForCausalLM",), equal_layers(derived_heads)),
    "glm4": Family(("Glm4ForCausalLM",), equal_layers(stated_heads)),
    "glm4_moe": Family(("Glm4MoeForCausalLM",), equal_layers(derived_heads)),
    "apertus": Family(("ApertusForCausalLM",), equal_layers(derived_heads)),
    "minimax_m2": Family(("MiniMaxM2ForCausalLM",), equal_layers(stated_heads)),
    "gpt_bigcode": Family(("GPTBigCodeForCausalLM",), gpt_bigcode),
    # ---- windows that are only masked: every token keeps its K and V ----
    "gemma2": Family(("Gemma2ForCausalLM",), masked_windows(stated_heads, every=2)),
    "gemma3_text": Family(("Gemma3ForCausalLM",), _GEMMA_3),
    "gemma3": Family(("Gemma3ForConditionalGeneration",), _GEMMA_3, nested="text_config"),
    "olmo3": Family(("Olmo3ForCausalLM",), masked_windows(derived_heads, every=4)),
    "exaone4": Family(("Exaone4ForCausalLM",), masked_windows(derived_heads)),
    "cohere2": Family(("Cohere2ForCausalLM",), _COHERE_2),
    # ---- layers that read the K and V of others ----
    "gemma3n_text": Family(("Gemma3nForCausalLM",), shared_layers),
    "gemma3n": Family(("Gemma3nForConditionalGeneration",), shared_layers, nested="text_config"),
    # ---- windows with a pool of their own ----
    "gpt_oss": Family(("GptOssForCausalLM",), gpt_oss),
    "llama4": Family(("Llama4ForConditionalGeneration",), llama_4, nested="text_config"),
    "gemma4": Family(("Gemma4ForConditionalGeneration",), gemma_4, nested="text_config"),
    "mimo_v2_flash": Family(("MiMoV2FlashForCausalLM",), mimo_v2),
    # ---- latents ----
    "deepseek_v2": Family(("DeepseekV2ForCausalLM",), latent_layers),
    "deepseek_v3": Family(("DeepseekV3ForCausalLM",), latent_layers),
    "kimi_k2": Family(("DeepseekV3ForCausalLM",), latent_layers),
    "glm4_moe_lite": Family(("Glm4MoeLiteForCausalLM",), latent_layers),
    "deepseek_v32": Family(("DeepseekV32ForCausalLM",), sparse_latent_layers),
    "glm_moe_dsa": Family(("GlmMoeDsaForCausalLM",), sparse_latent_layers),
    # ---- states ----
    "qwen3_next": Family(("Qwen3NextForCausalLM",), qwen_gated_delta),
    "qwen3_5": Family(("Qwen3_5ForConditionalGeneration",), qwen_gated_delta, nested="text_config"),
    "qwen3_5_moe": Family(("Qwen3_5MoeForConditionalGeneration",), qwen_gated_delta, nested="text_config"),
    "kimi_linear": Family(("KimiLinearForCausalLM",), kimi_linear),
    "falcon_h1": Family(("FalconH1ForCausalLM",), falcon_h1),
    "nemotron_h": Family(("NemotronHForCausalLM",), nemotron_h),
    "granitemoehybrid": Family(("GraniteMoeHybridForCausalLM",), granite_hybrid),
    "lfm2": Family(("Lfm2ForCausalLM",), short_convolutions),
    "mamba2": Family(("Mamba2ForCausalLM",), mamba_2),
    "mamba": Family(("MambaForCausalLM",), mamba_1),
    "falcon_mamba": Family(("FalconMambaForCausalLM",), mamba_1),
}


def family_of(model_type: str) -> Family:
    """
    Raises:
        SizeError: nobody has checked this type.
    """
    if model_type not in FAMILIES:
        raise SizeError(
            f"model_type {model_type!a} is not among those whose sizes are checked, and is not guessed: "
            f"{', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]
