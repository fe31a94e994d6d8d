"""The emitting Triton backend of sglang in the interpreter: outputs of stock, rows of the definition."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

import sglang_importance.attention.decode_emission as decode_emission
import sglang_importance.attention.log_sum_emission as producer
from sglang_importance.attention import install
from sglang_importance.attention.rows import Phase
from sglang_importance.attention.triton import EmittingTritonBackend, TritonEmission

from support.doubles.twins import Mutation, broken_twin
from support.drivers.attention_driver import options
from support.drivers.captured_decode import CapturedDecode
from support.drivers.triton_driver import Sequence, TritonDriver, complete, model_runner, runtime_context

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the driver's pools are on the CPU"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def _runtime_context() -> Iterator[None]:
    override = runtime_context()
    yield
    override.restore()


def test_prefill_and_decode_of_a_ragged_batch() -> None:
    driver = TritonDriver(options(interval=2), page_size=4)
    short, long = Sequence("a", 1), Sequence("b", 3)
    driver.extend((short, 3), (long, 41))
    for _ in range(3):
        driver.decode(short, long)
    driver.check_row(short, Phase.PREFILL, [0, 1, 2])
    driver.check_row(long, Phase.PREFILL, [37, 38, 39, 40])
    driver.check_row(short, Phase.DECODE, [3, 5])
    driver.check_row(long, Phase.DECODE, [41, 43])


class GraphDriver(CapturedDecode, TritonDriver):
    """The stand-in for a graph over the real backend."""


@pytest.mark.nightly
def test_replays_of_one_graph_observe_and_do_not() -> None:
    driver = GraphDriver(options(interval=2, layers=(0, 2)), page_size=4)
    driver.capture()
    first, second = Sequence("a", 3), Sequence("b", 1)
    driver.extend((first, 9), (second, 6))
    driver.decode(first, second)
    driver.decode(second)
    driver.decode(second, first)
    driver.check_row(first, Phase.DECODE, [9], layers=(0, 2))
    driver.check_row(second, Phase.DECODE, [6, 8], layers=(0, 2))


TWINS = [
    Mutation("order_for_batch", "numbers.order[batch_rows]", "numbers.order[:count]"),
    Mutation("stale_length", "numbers.seq_lens[:count] = seq_lens", "numbers.seq_lens[:count] = 5"),
    Mutation(
        "slot_by_order",
        "numbers.slots[:count] = [queries.slot for queries in observed]",
        "numbers.slots[:count] = range(1, count + 1)",
    ),
    Mutation("never_named", "        self._staged.send(self._to_send)\n        self.opened()\n", ""),
]


@pytest.mark.nightly
@pytest.mark.parametrize("mutation", TWINS, ids=str)
def test_broken_twins_are_told_apart(
    mutation: Mutation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = broken_twin(decode_emission, mutation, tmp_path)
    monkeypatch.setattr(TritonEmission, "_name", twin.DecodeEmission._name)
    driver = TritonDriver(options(interval=2, layers=(1,)), page_size=4)
    # The first observed of the second step is the second of the batch.
    first, second = Sequence("a", 1), Sequence("b", 3)
    driver.extend((first, 5), (second, 9))
    driver.decode(first)
    driver.decode(first, second)
    with pytest.raises(AssertionError):
        driver.check_row(second, Phase.DECODE, [9], layers=(1,))


@pytest.mark.nightly
def test_requests_beyond_the_budget_are_observed_one_step_later(monkeypatch: pytest.MonkeyPatch) -> None:
    one_request = 4 * 1 * 4 * (24 + 4)
    monkeypatch.setattr(producer, "MAX_EMITTED_BYTES", one_request + 1)
    driver = TritonDriver(options(interval=2, layers=(1,)), page_size=4)
    first, second = Sequence("a", 1), Sequence("b", 3)
    driver.extend((first, 5), (second, 9))
    for _ in range(3):
        driver.decode(first, second)
    driver.check_row(first, Phase.DECODE, [5, 7], layers=(1,))
    driver.check_row(second, Phase.DECODE, [10], layers=(1,))


@pytest.mark.nightly
def test_soft_cap_and_dummy_batches() -> None:
    driver = TritonDriver(options(), page_size=1, logit_cap=1.5)
    sequence = Sequence("a", 1)
    driver.extend((sequence, 9))
    driver.decode(sequence, dummy=True)
    assert driver.rows.consume(1, Phase.DECODE) is None
    driver.decode(sequence)
    driver.check_row(sequence, Phase.DECODE, [10])


def test_a_step_without_a_sampled_layer_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    driver = TritonDriver(options(layers=(0, 1)), page_size=4)
    sequence = Sequence("a", 1)
    driver.extend((sequence, 3))
    del driver.layers[1:]
    driver.decode(sequence)
    assert driver.rows.consume(1, Phase.DECODE) is None
    assert "layers [1] did not emit" in caplog.text


def test_a_layer_with_a_score_mod_of_its_own_is_refused() -> None:
    driver = TritonDriver(options(), page_size=4)
    with pytest.raises(ValueError, match=r"layer 1 changes its logits .* signal\.layers"):
        driver.backend.forward_decode(None, None, None, driver.layers[1], None, score_mod=object())


@pytest.mark.parametrize(
    ("runner", "words"),
    [
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"page_size": 64}, "need a page size of 1, 2, 4, 8, 16, 32, not 64: use --page-size 16"),
    ],
)
def test_what_cannot_emit_is_refused(runner: dict[str, Any], words: str) -> None:
    refused = complete(model_runner(**runner))
    refused.forward = None
    with pytest.raises(ValueError, match=words):
        EmittingTritonBackend(refused, options())


def test_the_source_replaces_the_backend_but_not_of_draft_models(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.attention import attention_registry

    monkeypatch.setattr(attention_registry, "ATTENTION_BACKENDS", dict(attention_registry.ATTENTION_BACKENDS))
    install(options(source="triton"))
    create = attention_registry.ATTENTION_BACKENDS["triton"]
    runner = complete(model_runner(page_size=16))
    runner.forward = None
    assert isinstance(create(runner), EmittingTritonBackend)
    runner.is_draft_worker = True
    assert type(create(runner)) is TritonAttnBackend
