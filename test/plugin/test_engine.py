"""``importance_engine``: sglang.Engine with a KV policy, checked as a server is."""

from __future__ import annotations

import ast
import asyncio
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.options.observation_options import SignalOptions
from sglang_importance.engine import KvImportance, OperationRefused, importance_engine, take_options
from sglang_importance.http.pins_route import MAX_TTL_SECONDS
from sglang_importance.operations import messages
from sglang_importance.operations.messages import KvImportanceReqOutput
from sglang_importance.upstream.refusal import LaunchRefused

from support.launches import run_to_end


def test_our_arguments_are_taken_out() -> None:
    arguments: dict[str, Any] = {
        "model_path": "m",
        "kv_importance_config": {"signal": {"window": 5, "layers": [1, 0]}},
    }
    assert take_options(arguments) == ImportanceOptions(
        policy="importance", signal=SignalOptions(window=5, layers=(0, 1))
    )
    assert arguments == {"model_path": "m"}


@pytest.mark.parametrize(("given", "taken"), [([1, 0], (0, 1)), ((1,), (1,)), (1, (1,)), ("auto", ())])
def test_layers_are_a_list_or_the_word_auto(given: Any, taken: tuple[int, ...]) -> None:
    options = take_options({"kv_importance_config": {"signal": {"layers": given}}, "kv_residency": "tiered"})
    assert options.signal.layers == taken


def test_an_option_that_is_gone_is_refused_by_its_flag() -> None:
    with pytest.raises(ValueError, match="kv_sparse_dense_layers is gone: leave it out"):
        take_options({"kv_sparse_dense_layers": [1]})


@pytest.mark.parametrize("layers", [None, "1,2", [1.5], [True]])
def test_layers_that_are_none_are_refused_by_name(layers: object) -> None:
    with pytest.raises(
        ValueError, match=r"signal\.layers of --kv-importance-config must be a whole number of at least 0"
    ):
        take_options({"kv_importance_config": {"signal": {"layers": layers}}})


def test_no_configuration_is_the_default_one() -> None:
    assert take_options({"kv_importance_config": None}) == ImportanceOptions(policy="importance")


def test_an_engine_without_a_model_is_refused() -> None:
    with pytest.raises(TypeError, match="model_path is missing"):
        importance_engine(kv_policy="observe")


def test_an_option_that_moved_is_named() -> None:
    with pytest.raises(ValueError, match=r"kv_importance_interval moved: write interval = N under"):
        importance_engine(model_path="dummy", kv_importance_interval=0)


def test_an_untested_mode_is_refused_before_anything_starts() -> None:
    with pytest.raises(LaunchRefused, match="pipeline parallelism"):
        importance_engine(model_path="dummy", pp_size=2)


def test_a_port_that_no_engine_listens_on_is_not_looked_at(tmp_path: Path) -> None:
    # sglang takes one beside an engine's arguments: it counts other ports from there.
    with pytest.raises(LaunchRefused) as refused:
        importance_engine(model_path=str(tmp_path), port=30000)
    (line,) = refused.value.reasons
    assert "has no config.json" in line


def test_an_eviction_policy_is_refused() -> None:
    with pytest.raises(LaunchRefused, match="drop --radix-eviction-policy"):
        importance_engine(model_path="dummy", radix_eviction_policy="lru")


def test_the_documented_call_is_understood() -> None:
    page = (Path(__file__).parents[2] / "docs/operate.md").read_text()
    (block, *_) = (b for b in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "importance_engine" in b)
    exec(compile(block, "operate.md", "exec"), {"__name__": "imported"})
    (call,) = (node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call))
    arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    assert take_options(arguments) == ImportanceOptions(policy="observe")
    assert arguments == {"model_path": "<model>"}


PROGRAM = """
import json, multiprocessing, sys
from sglang_importance.engine import KvImportance, OperationRefused, importance_engine
from sglang_importance.upstream.refusal import LaunchRefused

if __name__ == "__main__":
    arguments = dict(
        model_path=sys.argv[1], device="cpu", load_format="dummy", skip_tokenizer_init=True, dtype="float32",
        attention_backend="torch_native", max_total_tokens=512,
    )
    try:
        importance_engine(**arguments, kv_importance_config={"signal": {"layers": [7]}})
        refused = None
    except LaunchRefused as error:
        refused = str(error)
    left = len(multiprocessing.active_children())
    engine = importance_engine(**arguments)
    prompt, sampling = list(range(5, 60)), {"max_new_tokens": 8, "temperature": 0}
    try:
        engine.generate(input_ids=[[5, 6], [7, 512]], sampling_params=sampling)
        unknown = None
    except ValueError as error:
        unknown = str(error)
    answers = [engine.generate(input_ids=prompt, sampling_params=sampling) for _ in range(2)]
    cache = KvImportance(engine)
    pin = cache.pin(prompt, ttl_seconds=600)
    pinned, snapshot = cache.pins(), cache.snapshot()
    cache.unpin(pin["pin_id"])
    try:
        cache.unpin(pin["pin_id"])
        gone = None
    except OperationRefused as error:
        gone = str(error)
    info = engine.get_server_info()
    with open(sys.argv[2], "w") as file:
        results = {"refused": refused, "unknown": unknown, "left": left, "answers": answers, "info": info}
        results |= {"pin": pin, "pinned": pinned, "snapshot": snapshot, "gone": gone}
        json.dump(results, file, default=str)
    engine.shutdown()
"""


@pytest.mark.server
def test_an_engine_serves_after_a_refused_one(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    result_path = tmp_path / "result.json"
    ended = run_to_end([sys.executable, str(tmp_path / "program.py"), str(tiny_model), str(result_path)])
    assert ended.returncode == 0, ended.stderr
    assert ended.survivors == []
    result = json.loads(result_path.read_text())
    assert result["refused"] == "a scheduler refused to start, for the reason above"
    assert "signal.layers of --kv-importance-config: 7 not among" in ended.refusals[0]
    assert result["left"] == 0
    assert result["unknown"] == "input_ids.1: token id 512 is beyond the model's vocabulary of 512"
    first, second = result["answers"]
    assert len(first["output_ids"]) == 8
    assert second["output_ids"] == first["output_ids"]
    assert second["meta_info"]["cached_tokens"] == 48
    assert result["info"]["page_size"] == 16
    assert result["pin"]["tokens"] == 48
    (pin,) = result["pinned"]["pins"]
    assert (pin["pin_id"], pin["resident_tokens"]) == (result["pin"]["pin_id"], 48)
    (node, *_) = (node for node in result["snapshot"]["nodes"] if node["pinned"])
    assert node["queries"] > 0
    assert "there is no pin" in result["gone"]
    assert all(result["info"]["sgl_importance"].values())
    assert "attention scores" in result["info"]["sgl_importance"]


class AskedEngine:
    """In place of an engine: answers what was asked for, for two replicas."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=512))
        monkeypatch.setattr(messages, "ask_schedulers", self._answers)

    async def _answers(
        self, manager: object, operation: str, arguments: dict[str, Any]
    ) -> list[KvImportanceReqOutput]:
        document = json.dumps({"asked": operation, **arguments})
        return [KvImportanceReqOutput(document=document, dp_rank=rank) for rank in range(2)]


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[KvImportance]:
    engine = AskedEngine(monkeypatch)
    yield KvImportance(engine)  # type: ignore[arg-type]
    engine.loop.close()


TTL = f"ttl_seconds must be above 0 and at most {MAX_TTL_SECONDS:.0f}, not "


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda cache: cache.snapshot(limit=0), "limit must be from 1 to 1000, not 0"),
        (lambda cache: cache.snapshot(limit=1001), "limit must be from 1 to 1000, not 1001"),
        (lambda cache: cache.snapshot(dp_rank=2), "dp_rank: there is no rank 2, the last one is 1"),
        (lambda cache: cache.pins(dp_rank=-1), "dp_rank: there is no rank -1, the last one is 1"),
        (
            lambda cache: cache.pin([5, 512]),
            "input_ids: token id 512 is beyond the model's vocabulary of 512",
        ),
        (
            lambda cache: cache.pin([5], cache_salt="\ud800"),
            "cache_salt: holds half a surrogate pair, which is no character: send proper UTF-8",
        ),
        (lambda cache: cache.pin([5], ttl_seconds=0), TTL + "0"),
        (lambda cache: cache.pin([5], ttl_seconds=-1.0), TTL + "-1.0"),
        (lambda cache: cache.pin([5], ttl_seconds=math.nan), TTL + "nan"),
        (lambda cache: cache.pin([5], ttl_seconds=math.inf), TTL + "inf"),
    ],
)
def test_arguments_that_a_route_would_refuse_are_refused(
    cache: KvImportance, call: Callable[[KvImportance], object], message: str
) -> None:
    with pytest.raises(OperationRefused, match=f"^{re.escape(message)}$"):
        call(cache)


def test_empty_names_of_a_pin_are_none(cache: KvImportance) -> None:
    pin = cache.pin([1, 2], extra_key="", cache_salt="")
    assert (pin["extra_key"], pin["cache_salt"]) == (None, None)


def test_a_prefix_may_be_an_array(cache: KvImportance) -> None:
    assert cache.pin(np.arange(3))["tokens"] == [0, 1, 2]
    assert cache.pin(torch.arange(3))["tokens"] == [0, 1, 2]
    with pytest.raises(TypeError, match="float"):
        cache.pin([1.5])  # type: ignore[list-item]
