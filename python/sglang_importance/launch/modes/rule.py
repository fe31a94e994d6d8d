"""A mode of sglang that is refused, and the line that says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sgl_importance.options.importance_options import KvPolicy, name_of

ENFORCED: tuple[KvPolicy, ...] = ("observe", "importance")

Test = Callable[[Any], bool]


def above(limit: int) -> Test:
    return lambda value: value is not None and value > limit


def outside(*allowed: object) -> Test:
    return lambda value: value not in allowed


@dataclass(frozen=True, slots=True)
class Rule:
    """One mode that has not been tested with ours.

    Attributes:
        field: of sglang's ServerArgs.
        mode: the mode's name in a sentence.
        refuses: whether a value of the field switches the mode on.
        cure: what to do; dropping the flag where None.
        policies: the values of ``--kv-policy`` that the rule is for.
    """

    field: str
    mode: str
    refuses: Test = bool
    cure: str | None = None
    policies: tuple[KvPolicy, ...] = ENFORCED

    @property
    def flag(self) -> str:
        return "--" + self.field.strip("_").removesuffix("_explicitly_set").replace("_", "-")

    def refusal(self, value: object, policy: KvPolicy) -> str:
        shown = self.flag if value is True else f"{self.flag} {value}"
        return refused(policy, f"{self.mode} ({shown})", self.cure or f"drop {self.flag}")


def refused(policy: KvPolicy, mode: str, cure: str) -> str:
    """The line of a mode that has not been tested under a policy."""
    return f"{name_of('policy')} {policy} does not support {mode}: {cure}, or use {name_of('policy')} default"


PAIRED_KEYS = ("EAGLE", "EAGLE3", "NEXTN")
"""Algorithms of speculative decoding whose radix tree looks each token up with the one behind it."""
SPECULATION = ("NGRAM", "STANDALONE", *PAIRED_KEYS)
"""Algorithms that a policy runs beside."""
FP8 = ("fp8_e4m3", "fp8_e5m2")


def unscored_modes(args: Any) -> Iterator[str]:
    """The modes that are on, each with its flag, as in a sentence.

    A step that verifies drafts asks several queries for each request, most of them of tokens that are thrown
    away. A quantized key is a key only with its scale, which no producer reads.

    Args:
        args: sglang's arguments as typed or as resolved; a field that is absent counts as off.
    """
    algorithm = getattr(args, "speculative_algorithm", None)
    if algorithm is not None:
        yield f"speculative decoding (--speculative-algorithm {algorithm})"
    dtype = getattr(args, "kv_cache_dtype", None)
    if dtype in FP8:
        yield f"a quantized KV cache (--kv-cache-dtype {dtype})"
