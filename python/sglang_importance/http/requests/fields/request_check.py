"""One check of everything that a request says, before it leaves the process that took it.

What sglang's request classes accept, its scheduler believes (``managers/scheduler.py``): a value that it
cannot decode, or that its tensors cannot hold, ends it and with it the server.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_importance.http.requests.fields.bad_field import BadField, shown
from sglang_importance.http.requests.fields.combinations import DEFAULT_NEW_TOKENS, check_combinations
from sglang_importance.http.requests.fields.embedding_table import EMBEDDING
from sglang_importance.http.requests.fields.generate_table import GENERATE
from sglang_importance.http.requests.fields.request_ids import check_ids
from sglang_importance.http.requests.fields.sampling_table import SAMPLING
from sglang_importance.http.requests.fields.server_facts import ServerFacts
from sglang_importance.http.requests.fields.table_check import check_values, defaults_of
from sglang_importance.http.requests.fields.token_rules import unknown_token

MAX_SAMPLES_IN_ALL = 65_536
PARAMS = "sampling_params"


def check_request(
    obj: GenerateReqInput | EmbeddingReqInput, server: ServerFacts, in_flight: Container[str] = ()
) -> None:
    """Looks at a request as sglang's tokenizer manager gets it, from any route or engine.

    Args:
        obj: not normalized yet.
        server: what it can do.
        in_flight: ids of requests that are not answered yet.

    Raises:
        BadField: this server cannot take it.
    """
    prompts = _num_prompts(obj)
    kind: type = type(obj)
    table = GENERATE if isinstance(obj, GenerateReqInput) else EMBEDDING
    check_values(vars(obj).items(), table, defaults_of(kind), server, prompts=prompts)
    samples = _check_sampling(obj.sampling_params, prompts, server)
    if samples > 1 and samples * (prompts or 1) > MAX_SAMPLES_IN_ALL:
        raise BadField(
            f"{PARAMS}.n", f"asks for more than {MAX_SAMPLES_IN_ALL} answers in all: send several requests"
        )
    check_combinations(obj, prompts, samples, server)
    check_ids(obj.rid, prompts, samples, in_flight, server)


def _num_prompts(obj: Any) -> int | None:
    """The number of prompts in a batch; None where there is a single prompt, or none.

    Raises:
        BadField: a batch is empty.
    """
    for name in ("text", "input_ids", "input_embeds"):
        value = getattr(obj, name)
        if value is None:
            continue
        if not isinstance(value, list):
            return None
        if not value:
            if name == "input_ids" and getattr(obj, "session_params", None):
                return None  # the session has the rest
            raise BadField(name, "is empty: give at least one prompt")
        is_batch = name == "text" or isinstance(value[0], list | tuple)
        if name == "input_embeds":
            is_batch = isinstance(value[0], list) and bool(value[0]) and isinstance(value[0][0], list)
        return len(value) if is_batch else None
    return None


def _check_sampling(params: Any, prompts: int | None, server: ServerFacts) -> int:
    """Number of samples of each prompt."""
    if params is None:
        return 1
    if not isinstance(params, list):
        return _check_params(PARAMS, params, server)
    if prompts is None:
        raise BadField(PARAMS, "is a list beside a single prompt: give one object")
    if len(params) != prompts:
        raise BadField(
            PARAMS, f"is a list of {len(params)} for {prompts} prompts: give one for each, or one for all"
        )
    counts = [_check_params(f"{PARAMS}.{index}", each, server) for index, each in enumerate(params)]
    return max(counts)


def _check_params(place: str, params: Any, server: ServerFacts) -> int:
    if not isinstance(params, dict):
        raise BadField(place, f"must be an object, not {shown(params)}")
    defaults = defaults_of(SamplingParams)
    if unknown := params.keys() - defaults.keys():
        name = shown(next(iter(unknown))).strip("'")
        raise BadField(f"{place}.{name}", "is no sampling parameter of sglang's: leave it out")
    samples: int | None = params.get("n", 1)
    if samples is None:
        raise BadField(f"{place}.n", "must not be null: leave it out")
    check_values(params.items(), SAMPLING, defaults, server, place=f"{place}.")
    # Masked in the logits until so many are generated; else only compared.
    if params.get("min_new_tokens") and (stops := params.get("stop_token_ids")):
        ids = [token for token in stops if token is not None]
        if ids and (problem := unknown_token(ids, server.vocabulary)):
            raise BadField(f"{place}.stop_token_ids", problem)
    _check_together(place, params)
    return 1 if (params.get("beam_width") or 1) > 1 else samples


_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")


def _check_together(place: str, params: dict[str, Any]) -> None:
    most = params.get("max_new_tokens", DEFAULT_NEW_TOKENS)
    if (least := params.get("min_new_tokens")) and most is not None and least > most:
        raise BadField(f"{place}.min_new_tokens", f"is {least}, above max_new_tokens of {most}")
    given = [name for name in _GRAMMARS if params.get(name)]
    if len(given) > 1:
        raise BadField(
            f"{place}.{given[1]}", f"does not go with {given[0]}: give one of {', '.join(_GRAMMARS)}"
        )
