"""The producer around an unmodified backend of sglang, against the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

import sglang_importance.attention.prefill_probe as producer
from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance_kernels.triton.log_sums import LogSums, bytes_per_query
from sglang_importance.attention.prefill_probe import QkProbe
from sglang_importance.attention.probe_emission import ProbeEmission
from sglang_importance.attention.rows import Phase

from support.drivers.attention_driver import AttentionDriver, Layers, Sequence, model_runner, options
from support.nightly_cases import rest_nightly

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the driver's pools are on the CPU"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
]


class ProbedDriver(AttentionDriver):
    """The driver of the eager producer's tests, over upstream's own backend with the probe attached."""

    def __init__(self, chosen: ImportanceOptions, **kwargs: Any) -> None:
        super().__init__(chosen, **kwargs)
        self.backend = TorchNativeAttnBackend(self.runner)
        probe = QkProbe(self.backend, self.runner, chosen)
        self.emission = ProbeEmission(probe, self.backend, self.runner, chosen)
        self.rows = probe.rows


def test_prefill_and_decode_of_a_ragged_batch() -> None:
    driver = ProbedDriver(options(interval=2), page_size=4)
    short, long = Sequence("a", 1), Sequence("b", 3)
    driver.extend((short, 3), (long, 41))
    for _ in range(3):
        driver.decode(short, long)
    driver.check_row(short, Phase.PREFILL, [0, 1, 2])
    driver.check_row(long, Phase.PREFILL, [37, 38, 39, 40])
    driver.check_row(short, Phase.DECODE, [3, 5])
    driver.check_row(long, Phase.DECODE, [41, 43])


@pytest.mark.parametrize("page_size", rest_nightly([16, 1]))
def test_cached_prefix_and_bfloat16(page_size: int) -> None:
    driver = ProbedDriver(options(layers=(0, 2)), page_size=page_size, dtype=torch.bfloat16)
    first, second = Sequence("a", 1), Sequence("b", 2)
    driver.extend((first, 32))
    driver.adopt_prefix(second, first, 16)
    driver.extend((second, 5))
    driver.check_row(second, Phase.PREFILL, [17, 18, 19, 20], layers=(0, 2))


def test_soft_cap_and_dummy_batches() -> None:
    driver = ProbedDriver(options(), logit_cap=1.5)
    sequence = Sequence("a", 1)
    driver.extend((sequence, 9))
    driver.decode(sequence, dummy=True)
    driver.check_row(sequence, Phase.PREFILL, [5, 6, 7, 8])
    assert driver.rows.consume(1, Phase.DECODE) is None


@pytest.mark.nightly  # test_emitting_backend.py has it of the rows that all producers write.
def test_slot_reuse_after_an_abort_that_nobody_consumed() -> None:
    driver = ProbedDriver(options())
    aborted, successor = Sequence("a", 1), Sequence("b", 1)
    driver.extend((aborted, 30))
    driver.decode(aborted)
    driver.extend((successor, 5))
    driver.decode(successor)
    driver.check_row(successor, Phase.PREFILL, [1, 2, 3, 4])
    driver.check_row(successor, Phase.DECODE, [5])


def test_a_window_that_does_not_fit_shrinks_to_its_last_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = ProbedDriver(options(window=8))
    sequence = Sequence("a", 1)
    per_query = 4 * 3 * 4 * 1 * (5 + 8)
    monkeypatch.setattr(producer, "MAX_LOG_SUMS_BYTES", 2 * per_query + 1)
    driver.extend((sequence, 20))
    driver.check_row(sequence, Phase.PREFILL, [18, 19])


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[LogSums]:
    """The log-sums of the passes so far."""
    made: list[LogSums] = []

    def noted(**sizes: Any) -> LogSums:
        made.append(LogSums(**sizes))
        return made[-1]

    monkeypatch.setattr(producer, "LogSums", noted)
    return made


def test_requests_that_do_not_fit_at_one_query_each_are_left_out(
    allocated: list[LogSums], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 3 * bytes_per_query(3, 4, 11) - 1
    monkeypatch.setattr(producer, "MAX_LOG_SUMS_BYTES", limit)
    driver = ProbedDriver(options(window=2), page_size=4)
    long, short, middle = Sequence("a", 1), Sequence("b", 2), Sequence("c", 3)
    driver.extend((long, 41), (short, 3), (middle, 5))
    driver.check_row(short, Phase.PREFILL, [1, 2])
    driver.check_row(middle, Phase.PREFILL, [3, 4])
    assert driver.rows.consume(1, Phase.PREFILL) is None
    driver.extend((long, 3))
    driver.check_row(long, Phase.PREFILL, [42, 43])
    assert [log_sums.max_requests for log_sums in allocated] == [2, 1]
    assert all(log_sums.num_bytes <= limit for log_sums in allocated)


def test_a_context_that_never_fits_is_not_observed(
    allocated: list[LogSums], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer, "MAX_LOG_SUMS_BYTES", bytes_per_query(3, 4, 11) - 1)
    driver = ProbedDriver(options(), page_size=4)
    long, short = Sequence("a", 1), Sequence("b", 2)
    driver.extend((long, 41))
    assert driver.rows.consume(1, Phase.PREFILL) is None
    assert not allocated
    driver.extend((short, 3))
    driver.check_row(short, Phase.PREFILL, [0, 1, 2])


@pytest.mark.parametrize(
    ("runner", "words"),
    [
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"model": Layers(temperature_len=1024)}, "temperature by length"),
        ({"model": Layers(v_head_dim=4)}, "cannot score layer 0"),
    ],
)
def test_what_cannot_be_probed_is_refused(runner: dict[str, Any], words: str) -> None:
    refused = model_runner(**runner)
    with pytest.raises(ValueError, match=words):
        QkProbe(TorchNativeAttnBackend(refused), refused, options())


def test_keys_that_do_not_fit_a_program_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer, "shared_memory", lambda device: 8192)
    with pytest.raises(ValueError, match=r"torch.float32 keys of 8 dimensions does not fit the 8192 bytes"):
        ProbedDriver(options(), page_size=4)
