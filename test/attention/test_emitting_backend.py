"""The emitting torch-native backend: same outputs as upstream's, and rows that equal the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

import sglang_importance.attention.sampling as observed
import sglang_importance.attention.torch_native as torch_native
from sglang_importance.attention import install
from sglang_importance.attention.rows import Phase, ScoreRows
from sglang_importance.attention.sampling import StepSampler
from sglang_importance.attention.torch_native import EmittingTorchNativeBackend

from support.drivers.attention_driver import AttentionDriver, Layers, Sequence, model_runner, options


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ragged_batches_equal_the_reference(page_size: int, dtype: torch.dtype) -> None:
    driver = AttentionDriver(options(), page_size=page_size, dtype=dtype)
    short, middle, long = (Sequence(f"r{slot}", slot) for slot in (1, 2, 3))
    driver.extend((short, 2), (middle, 17), (long, 40))
    for sequence, prompt in ((short, 2), (middle, 17), (long, 40)):
        driver.check_row(sequence, Phase.PREFILL, list(range(max(0, prompt - 4), prompt)))
    driver.decode(long, short)
    driver.decode(middle, short, long)
    driver.check_row(short, Phase.DECODE, [2, 3])
    driver.check_row(middle, Phase.DECODE, [17])
    driver.check_row(long, Phase.DECODE, [40, 41])


def test_a_row_is_read_once() -> None:
    driver = AttentionDriver(options())
    sequence = Sequence("a", 1)
    driver.extend((sequence, 9))
    driver.check_row(sequence, Phase.PREFILL, [5, 6, 7, 8])
    assert driver.rows.consume(1, Phase.PREFILL) is None
    assert driver.rows.consume(1, Phase.DECODE) is None


def test_cached_prefix_is_seen_by_the_window() -> None:
    driver = AttentionDriver(options())
    first, second = Sequence("a", 1), Sequence("b", 2)
    driver.extend((first, 24))
    driver.adopt_prefix(second, first, 20)
    driver.extend((second, 3))
    row = driver.check_row(second, Phase.PREFILL, [20, 21, 22])
    assert len(row.body) == 6


def test_chunked_prefill_keeps_the_window_of_the_last_chunk_only() -> None:
    driver = AttentionDriver(options(window=8))
    sequence = Sequence("a", 1)
    driver.extend((sequence, 16))
    driver.extend((sequence, 16))
    driver.extend((sequence, 3))
    driver.check_row(sequence, Phase.PREFILL, [32, 33, 34])


def test_prefill_row_survives_the_decode_step_that_overlaps_its_fold() -> None:
    driver = AttentionDriver(options())
    sequence = Sequence("a", 1)
    driver.extend((sequence, 9))
    driver.decode(sequence)
    driver.check_row(sequence, Phase.PREFILL, [5, 6, 7, 8])
    driver.check_row(sequence, Phase.DECODE, [9])


def test_interval_counts_each_requests_own_steps_from_its_first() -> None:
    driver = AttentionDriver(options(interval=3))
    early, late = Sequence("a", 1), Sequence("b", 2)
    driver.extend((early, 10))
    driver.decode(early)
    driver.decode(early)
    driver.extend((late, 20))
    for _ in range(5):
        driver.decode(early, late)
    driver.check_row(early, Phase.DECODE, [10, 13, 16])
    driver.check_row(late, Phase.DECODE, [20, 23])


def test_mixed_chunks_are_observed_like_batches_of_their_own() -> None:
    driver = AttentionDriver(options(interval=3))
    early, late = Sequence("a", 1), Sequence("b", 2)
    driver.extend((early, 10))
    driver.mixed([(late, 16)], early)  # due: its first step
    driver.mixed([(late, 4)], early)
    driver.decode(early, late)
    driver.mixed([(Sequence("c", 3), 5)], early, late)  # due: the fourth step of the one
    driver.decode(early, late)
    driver.check_row(early, Phase.PREFILL, [6, 7, 8, 9])
    driver.check_row(early, Phase.DECODE, [10, 13])
    driver.check_row(late, Phase.PREFILL, [16, 17, 18, 19])
    driver.check_row(late, Phase.DECODE, [20])


def test_only_sampled_layers_are_scored() -> None:
    driver = AttentionDriver(options(layers=(2, 0)))
    sequence = Sequence("a", 1)
    driver.extend((sequence, 9))
    driver.check_row(sequence, Phase.PREFILL, [5, 6, 7, 8], layers=(0, 2))


def test_logit_soft_cap_of_the_model_is_applied() -> None:
    driver = AttentionDriver(options(), logit_cap=1.5)
    sequence = Sequence("a", 1)
    driver.extend((sequence, 9))
    driver.check_row(sequence, Phase.PREFILL, [5, 6, 7, 8])


def test_slot_reuse_after_a_finish_that_was_processed_one_step_late() -> None:
    driver = AttentionDriver(options())
    finished = Sequence("a", 1)
    driver.extend((finished, 9))
    driver.decode(finished)
    driver.decode(finished)  # Launched before the scheduler saw that the step before was the last.
    driver.check_row(finished, Phase.DECODE, [9, 10])
    successor = Sequence("b", 1)
    driver.extend((successor, 5))
    driver.decode(successor)
    driver.check_row(successor, Phase.PREFILL, [1, 2, 3, 4])
    driver.check_row(successor, Phase.DECODE, [5])


def test_slot_reuse_after_an_abort_that_nobody_consumed() -> None:
    driver = AttentionDriver(options(interval=4))
    aborted = Sequence("a", 1)
    driver.extend((aborted, 30))
    driver.decode(aborted)
    driver.decode(aborted)
    successor = Sequence("b", 1)
    driver.extend((successor, 5))
    driver.decode(successor)
    driver.check_row(successor, Phase.PREFILL, [1, 2, 3, 4])
    driver.check_row(successor, Phase.DECODE, [5])


def test_a_late_reader_neither_gets_nor_harms_the_row_of_the_next_request() -> None:
    driver = AttentionDriver(options())
    driver.extend((Sequence("a", 1), 30))
    successor = Sequence("b", 1)
    driver.extend((successor, 5))
    assert driver.rows.consume(1, Phase.PREFILL, owner="a") is None
    driver.check_row(successor, Phase.PREFILL, [1, 2, 3, 4])


def test_slot_change_without_an_extend_never_mixes_two_requests() -> None:
    driver = AttentionDriver(options(interval=4))
    first = Sequence("a", 1)
    driver.extend((first, 9))
    driver.decode(first)
    impostor = Sequence("b", 1)
    impostor.locations, impostor.k = first.locations[:9], {i: k[:9] for i, k in first.k.items()}
    driver.decode(impostor)
    assert driver.rows.consume(1, Phase.PREFILL) is None
    driver.check_row(impostor, Phase.DECODE, [9])


def test_retracted_request_starts_again_in_another_slot() -> None:
    driver = AttentionDriver(options(interval=4))
    sequence = Sequence("a", 1)
    driver.extend((sequence, 9))
    driver.decode(sequence)
    driver.rows.discard(1)
    again = Sequence("a", 3)
    driver.extend((again, 10))
    driver.decode(again)
    assert driver.rows.consume(1, Phase.DECODE) is None
    driver.check_row(again, Phase.PREFILL, [6, 7, 8, 9])
    driver.check_row(again, Phase.DECODE, [10])


def test_padded_and_dummy_requests_leave_no_trace() -> None:
    driver = AttentionDriver(options())
    sequence, padding = Sequence("a", 1), Sequence("pad", 0)
    driver.extend((sequence, 9), (padding, 1))
    driver.decode(sequence, padding)
    driver.decode(sequence, dummy=True)
    driver.check_row(sequence, Phase.DECODE, [9])
    assert driver.rows.consume(0, Phase.PREFILL) is None
    assert driver.rows.consume(0, Phase.DECODE) is None


def test_a_pass_that_skips_a_sampled_layer_leaves_no_scores(caplog: pytest.LogCaptureFixture) -> None:
    driver = AttentionDriver(options())
    sequence = Sequence("a", 1)
    skipped = driver.layers.pop()
    driver.extend((sequence, 9))
    assert driver.rows.consume(1, Phase.PREFILL) is None
    driver.layers.append(skipped)
    driver.extend((Sequence("b", 2), 9))
    assert "layers [2] did not run" in caplog.text


def test_the_comparison_notices_broken_producers(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = torch_native.PageScoreAccumulator

    class OnePageOff(stock):
        def add_layer(
            self, q: torch.Tensor, keys: torch.Tensor, locations: torch.Tensor, **kwargs: float
        ) -> None:
            super().add_layer(q, keys, locations.roll(self.page_size), **kwargs)

    class HeadsSwapped(stock):
        def add_layer(self, q: torch.Tensor, *args: torch.Tensor, **kwargs: float) -> None:
            super().add_layer(q[:, [0, 2, 1, 3]], *args, **kwargs)

    class OneTokenLate(stock):
        def add_layer(
            self, q: torch.Tensor, keys: torch.Tensor, locations: torch.Tensor, **kwargs: float
        ) -> None:
            super().add_layer(q, keys, locations.roll(1), **kwargs)

    for broken in (OnePageOff, HeadsSwapped, OneTokenLate):
        monkeypatch.setattr(torch_native, "PageScoreAccumulator", broken)
        driver = AttentionDriver(options())
        sequence = Sequence("a", 1)
        driver.extend((sequence, 22))
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            driver.check_row(sequence, Phase.PREFILL, [18, 19, 20, 21])


def test_mass_of_a_row_counts_query_tokens() -> None:
    driver = AttentionDriver(options(window=6))
    sequence = Sequence("a", 1)
    driver.extend((sequence, 50))
    driver.rows.check_integrity()
    np.testing.assert_allclose(driver.rows.of_phase(Phase.PREFILL).mass[1], 6, rtol=1e-5)
    row = driver.rows.consume(1, Phase.PREFILL)
    assert row is not None
    np.testing.assert_allclose(row.body.sum(), 6, rtol=1e-5)


def test_install_registers_the_emitting_backend_and_publishes_its_rows() -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    stock = ATTENTION_BACKENDS["torch_native"]
    try:
        install(options(window=7))
        runner = model_runner(page_size=16)
        backend = ATTENTION_BACKENDS["torch_native"](runner)
        assert isinstance(backend, EmittingTorchNativeBackend)
        assert backend.options.signal.window == 7
        assert backend.rows.page_size == 16
        runner.is_draft_worker = True
        assert not isinstance(ATTENTION_BACKENDS["torch_native"](runner), EmittingTorchNativeBackend)
    finally:
        ATTENTION_BACKENDS["torch_native"] = stock


@pytest.mark.parametrize(
    ("runner", "message"),
    [
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"dtype": torch.float8_e5m2}, "--kv-cache-dtype auto"),
        ({"model": Layers(sliding_window_size=16)}, "--kv-importance-source none"),
        ({"model": Layers(use_irope=True)}, "--kv-importance-source none"),
        (
            {"model": Layers(temperature_len=1024)},
            "temperature by length are not supported: start with --kv-importance-source none",
        ),
    ],
)
def test_unsupported_models_are_refused_with_the_cure(runner: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EmittingTorchNativeBackend(model_runner(**runner), options())


def test_unknown_layer_is_refused_with_the_choice() -> None:
    with pytest.raises(ValueError, match=r"7 not among the full-attention layers .*, which are 0-2$"):
        EmittingTorchNativeBackend(model_runner(), options(layers=(1, 7)))


def test_decode_steps_do_not_read_slots_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream keeps them on the host for extends only; a read in every step would undo the overlap."""
    driver = AttentionDriver(options())
    first, second = Sequence("a", 1), Sequence("b", 2)
    driver.extend((first, 5), (second, 3))
    read, on_host = [], observed.on_host
    monkeypatch.setattr(observed, "on_host", lambda batch, name: (read.append(name), on_host(batch, name))[1])
    driver.decode(second, first)
    driver.rows.check_integrity()
    assert read == ["seq_lens"]
    successor = Sequence("c", 1)
    driver.extend((successor, 4))
    driver.decode(successor, second)
    driver.check_row(successor, Phase.DECODE, [4])
    driver.check_row(second, Phase.DECODE, [3, 4])
    assert driver.backend._sampler._slot_of == {"b": 2, "c": 1}


class CountingSampler:
    """Whom decode steps observe, counted one request and one step at a time."""

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.steps: dict[str, int] = {}

    def extend(self, rid: str) -> None:
        self.steps[rid] = 0

    def decode(self, rids: list[str]) -> list[str]:
        due = [rid for rid in rids if self.steps[rid] % self.interval == 0]
        for rid in rids:
            self.steps[rid] += 1
        return due


@given(
    interval=st.integers(1, 4),
    steps=st.lists(
        st.sampled_from(("arrive", "leave", "shuffle", "decode", "decode", "postpone")), max_size=40
    ),
    random=st.randoms(use_true_random=False),
)
def test_the_sampler_observes_what_counting_one_by_one_does(interval, steps, random) -> None:
    rows = ScoreRows(page_size=4, num_slots=6, max_context_tokens=64)
    sampler, counted = StepSampler(rows, options(interval=interval)), CountingSampler(interval)
    running: dict[str, int] = {}  # slot by request
    arrived = 0
    for step in steps:
        free = sorted(set(range(1, 6)) - set(running.values()))
        if step == "arrive" and free:
            rid, slot = str(arrived), random.choice(free)
            arrived += 1
            running[rid] = slot
            batch = ForwardBatch(
                forward_mode=ForwardMode.EXTEND,
                batch_size=1,
                input_ids=torch.zeros(3),
                rids=[rid],
                req_pool_indices=torch.tensor([slot]),
                seq_lens=torch.tensor([9]),
                seq_lens_sum=9,
                out_cache_loc=torch.zeros(3),
                extend_seq_lens=torch.tensor([3]),
            )
            (queries,) = sampler.observed(batch)
            assert (queries.owner, queries.slot, queries.rows) == (rid, slot, slice(0, 3))
            counted.extend(rid)
        elif step == "leave" and running:
            running.pop(random.choice(list(running)))
        elif step == "shuffle":
            running = dict(random.sample(list(running.items()), len(running)))
        elif step in ("decode", "postpone") and running:
            rids, slots = list(running), list(running.values())
            batch = ForwardBatch(
                forward_mode=ForwardMode.DECODE,
                batch_size=len(rids),
                input_ids=torch.zeros(len(rids)),
                rids=rids,
                req_pool_indices=torch.tensor(slots),
                seq_lens=torch.arange(len(rids)) + 10,
                seq_lens_sum=0,
                out_cache_loc=torch.zeros(len(rids)),
            )
            observed = list(sampler.observed(batch))
            assert [each.owner for each in observed] == counted.decode(rids)
            assert [each.slot for each in observed] == [running[each.owner] for each in observed]
            assert [each.seq_len for each in observed] == [each.rows.start + 10 for each in observed]
            if step == "postpone":
                for each in observed:
                    sampler.postpone(each.slot)
                    counted.steps[each.owner] -= 1


def test_a_request_that_was_never_extended_here_is_looked_up() -> None:
    driver = AttentionDriver(options())
    sequence = Sequence("a", 1)
    driver.extend((sequence, 5))
    driver.backend._sampler._slot_of.clear()
    driver.decode(sequence)
    driver.check_row(sequence, Phase.DECODE, [5])
