"""What a server can do, as far as what a request may ask for depends on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_ATTRIBUTE = "kv_importance_facts"


@dataclass(frozen=True)
class ServerFacts:
    """Read from the flags and the model of a server; the defaults are those of a plain one.

    Attributes:
        vocabulary: number of token ids that the model has.
        context_length: tokens of a prompt with its answer, at most.
        hidden_size: numbers in an embedding of a token.
        chunk_tokens: of a prompt, in one step; None where prompts are not cut.
        data_ranks: data-parallel ranks.
        hidden_states: what may be asked for: ``""``, ``"last"`` or ``"full"``.
        metric_labels: that requests may bring.
    """

    vocabulary: int
    context_length: int = 1 << 31
    hidden_size: int = 0
    chunk_tokens: int | None = None
    data_ranks: int = 1
    hidden_states: str = ""
    metric_labels: frozenset[str] = frozenset()
    has_tokenizer: bool = True
    has_media: bool = False
    has_lora: bool = False
    has_custom_processors: bool = False
    has_radix_cache: bool = True
    has_watermark: bool = False
    trusts_templates: bool = False
    has_strict_thinking: bool = False
    has_multi_item_scoring: bool = False
    is_disaggregated: bool = False
    is_traced: bool = False
    returns_experts: bool = False
    records_experts: bool = False
    returns_indexer: bool = False
    has_accelerator: bool = False


def facts_of(manager: Any) -> ServerFacts:
    """Those of the server behind a ``TokenizerManager``; read once."""
    facts: ServerFacts | None = getattr(manager, _ATTRIBUTE, None)
    if facts is None:
        facts = _read(manager)
        setattr(manager, _ATTRIBUTE, facts)
    return facts


def _read(manager: Any) -> ServerFacts:
    model, arguments = manager.model_config, manager.server_args

    def flag(name: str, otherwise: Any = False) -> Any:
        value = getattr(arguments, name, otherwise)
        return otherwise if value is None else value

    hidden_states = flag("return_hidden_states_mode", "")
    if flag("enable_return_hidden_states"):
        hidden_states = "full"
    chunk = flag("chunked_prefill_size", -1)
    return ServerFacts(
        vocabulary=model.vocab_size,
        context_length=getattr(model, "context_len", None) or 1 << 31,
        hidden_size=getattr(model, "hidden_size", 0),
        chunk_tokens=chunk if chunk > 0 else None,
        data_ranks=flag("dp_size", 1),
        hidden_states=hidden_states if hidden_states in ("last", "full") else "",
        metric_labels=frozenset(flag("tokenizer_metrics_allowed_custom_labels", ())),
        has_tokenizer=getattr(manager, "tokenizer", True) is not None,
        has_media=getattr(manager, "mm_processor", None) is not None,
        has_lora=bool(flag("enable_lora")),
        has_custom_processors=bool(flag("enable_custom_logit_processor")),
        has_radix_cache=not flag("disable_radix_cache"),
        has_watermark=bool(flag("enable_watermark")),
        trusts_templates=bool(flag("trust_request_chat_template")),
        has_strict_thinking=bool(flag("enable_strict_thinking")),
        has_multi_item_scoring=bool(flag("enable_mis")),
        is_disaggregated=flag("disaggregation_mode", "null") != "null",
        is_traced=bool(flag("enable_trace")),
        returns_experts=bool(flag("enable_return_routed_experts")),
        records_experts=bool(flag("expert_distribution_recorder_mode", "")),
        returns_indexer=bool(flag("enable_return_indexer_topk")),
        has_accelerator=flag("device", "") in ("cuda", "npu"),
    )
