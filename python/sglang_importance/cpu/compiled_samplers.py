"""Parts of sampling that sglang compiles at their first use."""

from __future__ import annotations

from typing import Any

from sglang_importance.cpu.shim import Shim


class CompiledSamplers(Shim):
    """The penalty as sglang wrote it, and not compiled: three operations on a row of logits."""

    defect = (
        "the first request with repetition_penalty stalls all for half a minute of g++ "
        "(sampling/penaltylib/repetition_penalty.py:10)"
    )

    def needed(self) -> bool:
        return bool(_compiled())

    def apply(self) -> None:
        for module, name in _compiled():
            setattr(module, name, _original(getattr(module, name)))


def _compiled() -> list[tuple[Any, str]]:
    from sglang.srt.sampling import sampling_batch_info
    from sglang.srt.sampling.penaltylib import repetition_penalty

    functions = (
        (repetition_penalty, "apply_scaling_penalties"),
        (sampling_batch_info, "apply_scaling_penalties"),  # the same, imported by name
    )
    return [
        (module, name) for module, name in functions if _original(getattr(module, name, None)) is not None
    ]


def _original(function: Any) -> Any:
    """What ``torch.compile`` was given; None where it was not."""
    return getattr(function, "_torchdynamo_orig_callable", None)
