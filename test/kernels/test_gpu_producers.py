"""The producers on a device: outputs equal to stock's, real graph replays, poisoned buffers."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.options.observation_options import SignalOptions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

POISON = 6e4
HAS_FLASHINFER = importlib.util.find_spec("flashinfer") is not None
SOURCES = [
    "qk_probe",
    "triton",
    pytest.param("flashinfer", marks=pytest.mark.skipif(not HAS_FLASHINFER, reason="no flashinfer")),
]


@pytest.fixture(scope="module", autouse=True)
def _runtime_context() -> Iterator[None]:
    from support.drivers.triton_driver import runtime_context

    override = runtime_context()
    yield
    override.restore()


def captured_driver(source: str, **changes: Any) -> Any:
    from support.drivers.captured_decode import CapturedDecode
    from support.drivers.flashinfer_driver import FlashInferDriver
    from support.drivers.triton_driver import ProbedTritonDriver, TritonDriver

    observed = {"interval": 2, "window": 4, "sink_tokens": 2, "local_tokens": 3, **changes}
    chosen = ImportanceOptions(policy="importance", signal=SignalOptions(**observed))
    if source == "flashinfer":
        driver = type("Driver", (CapturedDecode, FlashInferDriver), {"atol": 2e-2})(
            chosen, page_size=4, logit_dtype=torch.float16, device="cuda"
        )
    else:
        base = ProbedTritonDriver if source == "qk_probe" else TritonDriver
        driver = type("Driver", (CapturedDecode, base), {"atol": 1e-3})(
            chosen, page_size=4, dtype=torch.bfloat16, device="cuda"
        )
    emitted(driver, source).fill_(POISON)
    return driver


def emitted(driver: Any, source: str) -> torch.Tensor:
    """The buffer that attention emits into."""
    if source == "qk_probe":
        return driver.emission.log_sums.values
    emission = driver.backend.emission
    return emission.log_sums.values if source == "triton" else emission.step.logits


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("source", SOURCES)
def test_rows_are_those_of_the_definition_and_outputs_stock_s(source: str, captured: bool) -> None:
    from sglang_importance.attention.rows import Phase

    from support.drivers.attention_driver import Sequence

    driver = captured_driver(source, layers=(0, 2))
    if captured:
        driver.capture()
    first, second = Sequence("a", 3), Sequence("b", 1)
    driver.extend((first, 40), (second, 6))
    driver.decode(first, second)
    driver.decode(second)
    driver.decode(second, first)
    driver.check_row(first, Phase.PREFILL, [36, 37, 38, 39], layers=(0, 2))
    driver.check_row(first, Phase.DECODE, [40], layers=(0, 2))
    driver.check_row(second, Phase.DECODE, [6, 8], layers=(0, 2))


@pytest.mark.parametrize("source", SOURCES)
def test_steps_that_observe_nobody_leave_nothing_behind(source: str) -> None:
    from support.drivers.attention_driver import Sequence

    driver = captured_driver(source, interval=100)
    driver.capture()
    sequence = Sequence("a", 1)
    driver.extend((sequence, 20))
    driver.decode(sequence)
    before = emitted(driver, source).clone()
    for _ in range(3):
        driver.decode(sequence)
    assert torch.equal(emitted(driver, source), before)
