"""``importance_engine``: sglang.Engine with a KV policy, checked as a server is."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from sgl_importance.options import ImportanceOptions
from sglang_importance.engine import KvImportance, OperationRefused, importance_engine, take_options
from sglang_importance.upstream.refusal import LaunchRefused

from support.launches import run_to_end


def test_our_arguments_are_taken_out() -> None:
    arguments: dict[str, Any] = {"model_path": "m", "kv_importance_window": 5, "kv_importance_layers": [1, 0]}
    assert take_options(arguments) == ImportanceOptions(policy="importance", window=5, layers=(1, 0))
    assert arguments == {"model_path": "m"}


def test_a_bad_option_is_named() -> None:
    with pytest.raises(ValueError, match="kv_importance_interval must be a whole number of at least 1"):
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
    page = (Path(__file__).parents[2] / "docs/operating.md").read_text()
    (block, *_) = (b for b in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "importance_engine" in b)
    exec(compile(block, "operating.md", "exec"), {"__name__": "imported"})
    (call,) = (node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call))
    arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    assert take_options(arguments) == ImportanceOptions(policy="observe")
    assert arguments == {"model_path": "<model>"}


def test_empty_names_of_a_pin_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(KvImportance, "_ask", lambda _, __, arguments: [asked.append(arguments) or {}])
    KvImportance(None).pin([1, 2], extra_key="", cache_salt="")  # type: ignore[arg-type]
    assert (asked[0]["extra_key"], asked[0]["cache_salt"]) == (None, None)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf")])
def test_a_pin_of_no_such_time_is_refused(seconds: float) -> None:
    with pytest.raises(OperationRefused, match="ttl_seconds must be above 0"):
        KvImportance(None).pin([1, 2], ttl_seconds=seconds)  # type: ignore[arg-type]


PROGRAM = """
import json, multiprocessing, sys
from sglang_importance.engine import KvImportance, OperationRefused, importance_engine
from sglang_importance.upstream.refusal import LaunchRefused

if __name__ == "__main__":
    arguments = dict(
        model_path=sys.argv[1], device="cpu", load_format="dummy", skip_tokenizer_init=True, dtype="float32",
        attention_backend="torch_native", max_total_tokens=512, kv_importance_interval=2,
    )
    try:
        importance_engine(**arguments, kv_importance_layers=[7])
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
    assert "--kv-importance-layers: 7 not among" in ended.refusals[0]
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
