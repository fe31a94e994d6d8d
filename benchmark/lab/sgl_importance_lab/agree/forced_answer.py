"""A logit processor that makes sglang decode a given answer, and leaves readable what the model wanted."""

from __future__ import annotations

import json
from typing import Any

import dill

LEAD = 100.0
"""Nats that a forced token gains: more than any model's logits lie apart, and float32 still tells 1e-5."""


def processor_text() -> str:
    """What a request's ``custom_logit_processor`` holds; its ``custom_params`` are ``forced``, the token ids,
    and ``lead``.

    A class of a module travels by its name, which only a server with this laboratory knows. This one travels
    as code: the server must run the same minor version of Python.
    """

    class ForcedAnswer:
        def __call__(self, logits: Any, custom_param_list: list[dict[str, Any]] | None = None) -> Any:
            for row, params in enumerate(custom_param_list or ()):
                done, forced = len(params["__req__"].output_ids), params["forced"]
                if done < len(forced):
                    logits[row, forced[done]] += params["lead"]
            return logits

    ForcedAnswer.__module__ = "__main__"
    return json.dumps({"callable": dill.dumps(ForcedAnswer, recurse=True).hex()})


def without_lead(logprobs: dict[str, float], forced: str) -> dict[str, float]:
    """Logprobs of one step, up to a constant, as they were before the forced token was given its lead."""
    return {token: value - LEAD if token == forced else value for token, value in logprobs.items()}
