"""Which config means which caches: a reader for each model type that sglang 0.5.21 serves and a test checks.

A type is the ``model_type`` of config.json; its ``architectures`` decide which pools sglang builds
(``srt/configs/model_config.py``), so a config with another is refused. So is a type that is not here: many
differ in one detail that changes the size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sgl_importance_lab.kv_size.attention_families import (
    derived_heads,
    double_latent_layers,
    equal_layers,
    gemma_4,
    gpt_oss,
    hunyuan,
    internvl,
    latent_layers,
    llama_4,
    llama_heads,
    masked_windows,
    mimo_v2,
    minimax_m3,
    shared_layers,
    sparse_latent_layers,
    stated_heads,
    step_3,
)
from sgl_importance_lab.kv_size.class_defaults import class_defaults
from sgl_importance_lab.kv_size.fields import Fields, SizeError
from sgl_importance_lab.kv_size.geometry import HeadGeometry
from sgl_importance_lab.kv_size.model_shape import LayerCache, QueryHeads
from sgl_importance_lab.kv_size.other_names import chatglm, dbrx, gpt_2, gpt_bigcode
from sgl_importance_lab.kv_size.state_families import (
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
        architecture: that sglang serves with these caches.
        read: the layers of a config.
        nested: the name of the object with the text model, in configs that have more than text.
        texts: model types that this object may have; the first where it says none.
        flat: older configs have the text model's values outside, and no such object.
        within: the object in which ``nested`` lies, in configs of models that speak as well.
        text_class: whose defaults the object has in sglang, whatever type it says.
    """

    architecture: str
    read: Callable[[Fields], Layers]
    nested: str | None = None
    texts: tuple[str, ...] = ()
    flat: bool = False
    within: str | None = None
    text_class: str | None = None

    def text_part(self, outer: Fields) -> Fields:
        """The values of the text model, with those that its class has where a nested config leaves them out.

        Raises:
            SizeError: there is no such object, or one of another type.
        """
        if self.nested is None:
            return outer
        if self.flat and self.nested not in outer:
            if "head_dim" in outer:
                raise SizeError(f"sglang reads no head_dim outside {self.nested}: remove it")
            return outer
        inner = (outer if self.within is None else outer.inner(self.within)).inner(self.nested)
        model_type = inner.word("model_type") if "model_type" in inner else self.texts[0]
        if model_type not in self.texts:
            raise SizeError(
                f"{self.nested} has model_type {model_type!a}, which is not checked there, and is not "
                f"guessed: {', '.join(self.texts)}"
            )
        return inner.completed({"model_type": model_type} | class_defaults(self.text_class or model_type))


_PATTERN = "sliding_window_pattern"
_GEMMA_3 = masked_windows(stated_heads, every=6, pattern=_PATTERN)
_COHERE_2 = masked_windows(llama_heads, every=4, pattern=_PATTERN, present=0)
_QWEN_3_5 = ("qwen3_5_text",)
_QWEN_3_5_MOE = ("qwen3_5_moe_text",)
_TEXT = "text_config"


def _dense(*models: tuple[str, str], heads: Callable[[Fields], HeadGeometry]) -> dict[str, Family]:
    """Of models whose layers all keep K and V of every token."""
    return {model_type: Family(architecture, equal_layers(heads)) for model_type, architecture in models}


FAMILIES: dict[str, Family] = {
    # ---- K and V per head, for every token ----
    # Without num_key_value_heads every head has its own.
    **_dense(
        ("llama", "LlamaForCausalLM"),
        ("olmo", "OlmoForCausalLM"),
        ("olmo2", "Olmo2ForCausalLM"),
        ("olmoe", "OlmoeForCausalLM"),
        ("granite", "GraniteForCausalLM"),
        ("granitemoe", "GraniteMoeForCausalLM"),
        ("granitemoeshared", "GraniteMoeSharedForCausalLM"),
        ("cohere", "CohereForCausalLM"),
        ("apertus", "ApertusForCausalLM"),
        ("arcee", "ArceeForCausalLM"),
        ("exaone", "ExaoneForCausalLM"),
        ("phi", "PhiForCausalLM"),
        ("phi3", "Phi3ForCausalLM"),
        ("persimmon", "PersimmonForCausalLM"),
        ("opt", "OPTForCausalLM"),
        ("baichuan", "BaichuanForCausalLM"),
        ("internlm2", "InternLM2ForCausalLM"),
        ("deepseek", "DeepseekForCausalLM"),
        heads=llama_heads,
    ),
    **_dense(
        ("mistral", "MistralForCausalLM"),
        ("mixtral", "MixtralForCausalLM"),
        ("qwen2", "Qwen2ForCausalLM"),
        ("qwen2_moe", "Qwen2MoeForCausalLM"),
        ("qwen3_moe", "Qwen3MoeForCausalLM"),
        ("starcoder2", "Starcoder2ForCausalLM"),
        ("stablelm", "StableLmForCausalLM"),
        ("phimoe", "PhiMoEForCausalLM"),
        ("glm4_moe", "Glm4MoeForCausalLM"),
        ("ernie4_5_moe", "Ernie4_5_MoeForCausalLM"),
        ("mimo", "MiMoForCausalLM"),
        heads=derived_heads,
    ),
    **_dense(
        ("qwen3", "Qwen3ForCausalLM"),
        ("gemma", "GemmaForCausalLM"),
        ("glm4", "Glm4ForCausalLM"),
        ("minimax_m2", "MiniMaxM2ForCausalLM"),
        ("ministral3", "Ministral3ForCausalLM"),
        ("ernie4_5", "Ernie4_5_ForCausalLM"),
        ("hy_v3", "HYV3ForCausalLM"),
        heads=stated_heads,
    ),
    "gpt2": Family("GPT2LMHeadModel", gpt_2),
    "gptj": Family("GPTJForCausalLM", gpt_2),
    "gpt_bigcode": Family("GPTBigCodeForCausalLM", gpt_bigcode),
    "chatglm": Family("ChatGLMModel", chatglm),
    "dbrx": Family("DbrxForCausalLM", dbrx),
    # ---- the same below images and sound ----
    "llava": Family(
        "LlavaForConditionalGeneration", equal_layers(llama_heads), _TEXT, ("llama", "mistral", "qwen2")
    ),
    "mistral3": Family(
        "Mistral3ForConditionalGeneration", equal_layers(derived_heads), _TEXT, ("mistral", "ministral3")
    ),
    "qwen2_vl": Family(
        "Qwen2VLForConditionalGeneration", equal_layers(derived_heads), _TEXT, ("qwen2_vl_text",), flat=True
    ),
    "qwen2_5_vl": Family(
        "Qwen2_5_VLForConditionalGeneration",
        equal_layers(derived_heads),
        _TEXT,
        ("qwen2_5_vl_text",),
        flat=True,
    ),
    "qwen3_vl": Family(
        "Qwen3VLForConditionalGeneration", equal_layers(stated_heads), _TEXT, ("qwen3_vl_text",)
    ),
    "qwen3_vl_moe": Family(
        "Qwen3VLMoeForConditionalGeneration", equal_layers(derived_heads), _TEXT, ("qwen3_vl_moe_text",)
    ),
    "qwen3_omni_moe": Family(
        "Qwen3OmniMoeForConditionalGeneration",
        equal_layers(derived_heads),
        _TEXT,
        ("qwen3_omni_moe_text",),
        within="thinker_config",
    ),
    "internvl_chat": Family(
        "InternVLChatModel", internvl, "llm_config", ("internlm2", "llama", "qwen2", "qwen3", "qwen3_moe")
    ),
    "glm4v": Family("Glm4vForConditionalGeneration", equal_layers(derived_heads), _TEXT, ("glm4v_text",)),
    "glm4v_moe": Family(
        "Glm4vMoeForConditionalGeneration", equal_layers(derived_heads), _TEXT, ("glm4v_moe_text",)
    ),
    # ---- windows that are only masked: every token keeps its K and V ----
    "gemma2": Family("Gemma2ForCausalLM", masked_windows(stated_heads, every=2)),
    "gemma3_text": Family("Gemma3ForCausalLM", _GEMMA_3),
    "gemma3": Family("Gemma3ForConditionalGeneration", _GEMMA_3, _TEXT, ("gemma3_text",)),
    "olmo3": Family("Olmo3ForCausalLM", masked_windows(llama_heads, every=4)),
    "exaone4": Family("Exaone4ForCausalLM", masked_windows(derived_heads)),
    "exaone_moe": Family("ExaoneMoEForCausalLM", masked_windows(derived_heads, present=0)),
    "afmoe": Family("AfmoeForCausalLM", masked_windows(stated_heads)),
    "cohere2": Family("Cohere2ForCausalLM", _COHERE_2),
    "cohere2_vision": Family("Cohere2VisionForConditionalGeneration", _COHERE_2, _TEXT, ("cohere2",)),
    # ---- layers that read the K and V of others ----
    "gemma3n_text": Family("Gemma3nForCausalLM", shared_layers),
    "gemma3n": Family("Gemma3nForConditionalGeneration", shared_layers, _TEXT, ("gemma3n_text",)),
    "hunyuan_v1_dense": Family("HunYuanDenseV1ForCausalLM", hunyuan),
    "hunyuan_v1_moe": Family("HunYuanMoEV1ForCausalLM", hunyuan),
    # ---- windows with a pool of their own ----
    "gpt_oss": Family("GptOssForCausalLM", gpt_oss),
    "mellum": Family("MellumForCausalLM", gpt_oss),
    "step3p5": Family("Step3p5ForCausalLM", step_3),
    "llama4": Family("Llama4ForConditionalGeneration", llama_4, _TEXT, ("llama4_text",)),
    "gemma4": Family("Gemma4ForConditionalGeneration", gemma_4, _TEXT, ("gemma4_text",)),
    "gemma4_unified": Family(
        "Gemma4UnifiedForConditionalGeneration", gemma_4, _TEXT, ("gemma4_unified_text",)
    ),
    "mimo_v2_flash": Family("MiMoV2FlashForCausalLM", mimo_v2),
    # ---- sparse attention over K and V per head ----
    "minimax_m3_vl": Family(
        "MiniMaxM3SparseForConditionalGeneration",
        minimax_m3,
        _TEXT,
        ("minimax_m2",),
        text_class="sglang's MiniMaxM3VLConfig",
    ),
    # ---- latents ----
    "deepseek_v2": Family("DeepseekV2ForCausalLM", latent_layers),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", latent_layers),
    "kimi_k2": Family("DeepseekV3ForCausalLM", latent_layers),
    "kimi_k25": Family("KimiK25ForConditionalGeneration", latent_layers, _TEXT, ("deepseek_v3", "kimi_k2")),
    "kimi_vl": Family(
        "KimiVLForConditionalGeneration",
        latent_layers,
        _TEXT,
        ("deepseek_v3", "deepseek_v2"),
        text_class="sglang's DeepseekV2Config",
    ),
    "glm4_moe_lite": Family("Glm4MoeLiteForCausalLM", latent_layers),
    "longcat_flash": Family("LongcatFlashForCausalLM", double_latent_layers),
    "deepseek_v32": Family("DeepseekV32ForCausalLM", sparse_latent_layers),
    "glm_moe_dsa": Family("GlmMoeDsaForCausalLM", sparse_latent_layers),
    # ---- states ----
    "qwen3_next": Family("Qwen3NextForCausalLM", qwen_gated_delta),
    "qwen3_5": Family("Qwen3_5ForConditionalGeneration", qwen_gated_delta, _TEXT, _QWEN_3_5),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", qwen_gated_delta),
    "qwen3_5_moe": Family("Qwen3_5MoeForConditionalGeneration", qwen_gated_delta, _TEXT, _QWEN_3_5_MOE),
    "qwen3_5_moe_text": Family("Qwen3_5MoeForCausalLM", qwen_gated_delta),
    "kimi_linear": Family("KimiLinearForCausalLM", kimi_linear),
    "falcon_h1": Family("FalconH1ForCausalLM", falcon_h1),
    "nemotron_h": Family("NemotronHForCausalLM", nemotron_h),
    "granitemoehybrid": Family("GraniteMoeHybridForCausalLM", granite_hybrid),
    "lfm2": Family("Lfm2ForCausalLM", short_convolutions),
    "lfm2_moe": Family("Lfm2MoeForCausalLM", short_convolutions),
    "mamba2": Family("Mamba2ForCausalLM", mamba_2),
    "mamba": Family("MambaForCausalLM", mamba_1),
    "falcon_mamba": Family("FalconMambaForCausalLM", mamba_1),
}


_ENCODER = "tokens of its encoder take slots of the same pool, as many as the {} has, which no config says"
REFUSED = {
    "deepseek_v4": "its rings and compressed caches depend on the attention backend, on the environment and "
    "on the most running requests, which no config says",
    "whisper": _ENCODER.format("sound"),
    "mllama": _ENCODER.format("image"),
}
"""Well-known types that sglang serves and no size is said of, and why."""


def family_of(model_type: str) -> Family:
    """
    Raises:
        SizeError: nobody has checked this type.
    """
    if reason := REFUSED.get(model_type):
        raise SizeError(
            f"model_type {model_type} is not sized, and is not guessed: {reason}; sglang's log has the size "
            "of its pools"
        )
    if model_type not in FAMILIES:
        raise SizeError(
            f"model_type {model_type!a} is not among those whose sizes are checked, and is not guessed: "
            f"{', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]
