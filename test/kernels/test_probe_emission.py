"""The qk-probe behind decode steps that are replays: numbers exact, steps that observe nobody untouched."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

import sglang_importance.attention.decode_emission as decode_emission
import sglang_importance.attention.probe_emission as producer
from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.options.observation_options import SignalOptions
from sgl_importance_kernels.triton.paged_queries import observed_at_once
from sglang_importance.attention.decode_emission import DecodeEmission
from sglang_importance.attention.prefill_probe import QkProbe
from sglang_importance.attention.probe_emission import ProbeEmission
from sglang_importance.attention.rows import Phase

from support.doubles.twins import Mutation, broken_twin
from support.drivers.attention_driver import Sequence
from support.drivers.captured_decode import CapturedDecode

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the driver's pools are on the CPU"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]

POISON = 1e30


@pytest.fixture(autouse=True)
def _few_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter takes as long for the others.
    monkeypatch.setattr(DecodeEmission, "observable", lambda self, batch_size: min(batch_size, 2))


class CapturedTorchBackend(TorchNativeAttnBackend):
    """Upstream's, with one kernel per layer as a captured backend has it: into an output of fixed address."""

    def init_cuda_graph_state(self, *_: Any) -> None:
        """Nothing to prepare."""

    def init_forward_metadata_out_graph(self, *_: Any, **__: Any) -> None:
        """Nothing to prepare."""

    def forward_decode(self, q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        output = torch.empty_like(q)
        self.decode_attention_fwd(output, q, *args, **kwargs)
        return output

    def decode_attention_fwd(self, output: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        output.copy_(super().forward_decode(*args, **kwargs))


class GraphDriver(CapturedDecode):
    """The stand-in for a graph over upstream's eager backend and the real probe."""

    LAUNCHERS = ((producer, "probe_layer"),)

    def __init__(self, chosen: ImportanceOptions, **kwargs: Any) -> None:
        super().__init__(chosen, **kwargs)
        self.stock = CapturedTorchBackend(self.runner)
        self.backend = CapturedTorchBackend(self.runner)
        probe = QkProbe(self.backend, self.runner, chosen)
        self.emission = ProbeEmission(probe, self.backend, self.runner, chosen)
        self.rows = probe.rows


def driver(**changes: Any) -> GraphDriver:
    defaults = {"interval": 2, "window": 1, "sink_tokens": 2, "local_tokens": 3, "layers": (0, 2)}
    chosen = ImportanceOptions(policy="importance", signal=SignalOptions(**{**defaults, **changes}))
    made = GraphDriver(chosen, page_size=4)
    made.emission.log_sums.values.fill_(POISON)
    made.capture()
    return made


def test_the_request_table_waits_for_the_end_of_a_graph() -> None:
    """In which the probe reads it layer by layer."""
    assert driver().backend.shared_read_ends(ForwardMode.DECODE) is SharedReadEnds.POST_REPLAY


def two_requests_in_turns(made: GraphDriver) -> None:
    first, second = Sequence("a", 3), Sequence("b", 1)
    made.extend((first, 9), (second, 6))
    made.decode(second)
    made.decode(second, first)
    made.decode(second, first)
    made.check_row(first, Phase.DECODE, [9], layers=(0, 2))
    made.check_row(second, Phase.DECODE, [6, 8], layers=(0, 2))


def test_replays_of_one_graph_observe_and_do_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="sglang_importance"):
        made = driver()
    buffers = made.emission.log_sums
    allocated = 4 * (buffers.storage.numel() + buffers.totals.numel())
    assert f"Log-sums of decode steps: 2 requests at once, {allocated / 2**20:.1f} MiB" in caplog.text
    addresses = buffers.values.data_ptr(), buffers.totals.data_ptr()
    two_requests_in_turns(made)
    assert (buffers.values.data_ptr(), buffers.totals.data_ptr()) == addresses


LAYER = "            index,\n            gate="
TWINS = [
    (producer, Mutation("first_slot_s_keys", ".mul_(self._table.stride(0))", ".mul_(1)")),
    (
        producer,
        Mutation("other_layer", "            index,\n            gate=", "            0,\n            gate="),
    ),
    (
        decode_emission,
        Mutation(
            "row_by_order",
            "numbers.batch_rows[:count] = batch_rows",
            "numbers.batch_rows[:count] = range(count)",
        ),
    ),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("module", "mutation"), TWINS, ids=[str(mutation) for _, mutation in TWINS])
def test_broken_twins_are_told_apart(
    module: Any, mutation: Mutation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = broken_twin(module, mutation, tmp_path)
    if module is producer:
        monkeypatch.setattr(ProbeEmission, "opened", twin.ProbeEmission.opened)
        monkeypatch.setattr(ProbeEmission, "_probe", twin.ProbeEmission._probe)
        monkeypatch.setattr(GraphDriver, "LAUNCHERS", ((twin, "probe_layer"),))
    else:
        monkeypatch.setattr(ProbeEmission, "_name", twin.DecodeEmission._name)
    made = driver()
    with pytest.raises(AssertionError):
        two_requests_in_turns(made)


def leave_nothing_behind(made: GraphDriver) -> None:
    sequence = Sequence("a", 1)
    made.extend((sequence, 20))
    made.decode(sequence)
    written = made.emission.log_sums.values.clone()
    assert not torch.equal(written, torch.full_like(written, POISON))
    made.decode(sequence)
    assert torch.equal(made.emission.log_sums.values, written)


def test_steps_that_observe_nobody_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_nothing_behind(driver(interval=100))
    stale = Mutation("still_observed", "        self._on_host.num_queries[:] = 0\n", "")
    twin = broken_twin(decode_emission, stale, tmp_path)
    monkeypatch.setattr(ProbeEmission, "_clear_numbers", twin.DecodeEmission._clear_numbers)
    with pytest.raises(AssertionError):
        leave_nothing_behind(driver(interval=100))


def test_steps_after_the_end_of_learning_leave_nothing_behind() -> None:
    made = driver(interval=1)
    sequence = Sequence("a", 1)
    made.extend((sequence, 20))
    made.decode(sequence)
    made.rows.close()
    written = made.emission.log_sums.values.clone()
    made.decode(sequence)
    assert torch.equal(made.emission.log_sums.values, written)
    assert not made.emission.numbers.num_queries.any()


def test_nobody_waits_for_ever_where_more_are_due_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecodeEmission, "observable", lambda self, batch_size: 1)
    made = driver(interval=1, layers=(1,))
    requests = [Sequence("a", 1), Sequence("b", 2), Sequence("c", 3)]
    made.extend(*((sequence, 3) for sequence in requests))
    for _ in range(4):
        made.decode(*requests)
    made.check_row(requests[0], Phase.DECODE, [3, 6], layers=(1,))
    made.check_row(requests[1], Phase.DECODE, [4], layers=(1,))
    made.check_row(requests[2], Phase.DECODE, [5], layers=(1,))


@pytest.mark.parametrize("interval", [1, 3, 8, 100])
def test_every_request_of_a_batch_is_observed_once_an_interval(interval: int) -> None:
    for batch in (1, 15, 16, 17, 64, 256, 2049):
        at_once = observed_at_once(batch, interval)
        assert at_once * interval >= min(batch, 16 * interval)
        assert at_once <= batch
        if batch <= 16:
            assert at_once == batch, "a small batch is observed as a whole"


def test_a_captured_launch_has_programs_for_what_its_batch_can_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        DecodeEmission, "observable", lambda self, batch_size: min(batch_size, max(1, batch_size // 2))
    )
    launched = []
    monkeypatch.setattr(producer, "probe_layer", lambda q, k, queries, *_, **__: launched.append(queries))
    made = driver(layers=(0,))
    (captured,) = launched
    assert captured.num_requests == 1, "three rows, of which half can be due"
    assert made.emission.admitted([None] * 3, 3) == 1
    assert made.emission.admitted([None] * 3, 2) == 1


def test_an_eager_step_that_observes_nobody_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    real = producer.probe_layer
    monkeypatch.setattr(
        producer, "probe_layer", lambda *args, **named: (launched.append(args), real(*args, **named))
    )
    made = GraphDriver(
        ImportanceOptions(policy="importance", signal=SignalOptions(interval=2, window=1)), page_size=4
    )
    sequence = Sequence("a", 1)
    made.extend((sequence, 5))
    made.decode(sequence)
    observed = len(launched)
    assert observed == len(made.layers)
    made.decode(sequence)
    assert len(launched) == observed
    made.decode(sequence)
    assert len(launched) == 2 * observed
