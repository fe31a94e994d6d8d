"""What a CUDA graph demands of a decode step over tiered pages: captured and replayed, by a stand-in in the
interpreter and by CUDA where there is a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("sglang")

from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_importance.sparse.selection_rule import SINK_TOKENS, WINDOW_TOKENS
from sgl_importance_kernels.sparse.page_choice import ChoiceRule, Contexts
from sglang_importance.sparse.captured_backend import CapturedTieredBackend
from sglang_importance.sparse.captured_steps import CapturedSteps

from support.device_counts import DeviceCounts
from support.drivers.captured_step import CapturedStep, CudaGraph, HostRead, NoSyncs, NoWaits, Uncounted
from support.drivers.counted_step import BUDGET, PAGE, CountedStep
from support.nightly_cases import rest_nightly

pytestmark = pytest.mark.triton

START = [11 * PAGE + 5, 10 * PAGE - 1]
"""Tokens of each request: in the steps that follow, the second completes a page, and begins the next."""
STEPS = 3


def tensors(of: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What a step's metadata is made of; those that follow from others are kept beside the fields."""
    parts = {field.name: getattr(of, field.name) for field in fields(of)} | getattr(of, "__dict__", {})
    for name, part in parts.items():
        if isinstance(part, torch.Tensor):
            yield name, part
        elif is_dataclass(part):
            yield from tensors(part)


def metadata(step: CountedStep) -> list[tuple[str, torch.Tensor]]:
    (decode_step,) = step.backend._steps
    assert not step.backend._alone
    return [*tensors(decode_step), *tensors(step.pool._write_plan)]


@torch.inference_mode()
@pytest.mark.parametrize("selector", rest_nightly(["bits", "token"]))
def test_a_captured_step_replays_as_it_runs(selector: str, device: str) -> None:
    """Other tokens, lengths and pages, in the buffers of the step that was captured."""
    on_cuda = device == "cuda"
    no_waits: type[DeviceCounts] = NoSyncs if on_cuda else NoWaits
    graph = CudaGraph() if on_cuda else CapturedStep()
    eager, captured = (CountedStep(len(START), max(START), selector, device=device) for _ in range(2))
    for each in (eager, captured):
        each.fill([length - 2 for length in START])
        # What is kept of the pages of a request that has not chosen yet is asked of the device.
        lengths = [length - 1 for length in START]
        each.run_layers(each.inputs(), each.begin(lengths, DeviceCounts()), no_waits())
    inputs = captured.inputs()
    outputs = captured.run_layers(inputs, captured.begin(START, no_waits()), graph)
    static = metadata(captured)
    if on_cuda:
        graph.replay()
    assert_same(outputs, eager.run_layers(eager.inputs(), eager.begin(START, no_waits()), no_waits()))
    completed = 0
    for step in range(1, STEPS):
        lengths = [length + step for length in START]
        completed += sum(length % PAGE == 0 for length in lengths)
        expected = eager.run_layers(eager.inputs(), eager.begin(lengths, no_waits()), no_waits())
        captured.begin(lengths, no_waits())
        for (name, buffer), (_, fresh) in zip(static, metadata(captured), strict=True):
            assert buffer.shape == fresh.shape, f"the shape of {name} depends on the batch"
            buffer.copy_(fresh)
        for old, new in zip(inputs, captured.inputs(), strict=True):
            for buffer, fresh in zip(old, new, strict=True):
                buffer.copy_(fresh)
        before = [output.clone() for output in outputs]
        graph.replay()
        assert not torch.equal(before[0], outputs[0])
        assert_same(outputs, expected)
    assert completed == 1
    if on_cuda:
        torch.cuda.synchronize()
    for mine, its in zip(captured.pool.slots.host, eager.pool.slots.host, strict=True):
        assert all(torch.equal(part, other) for part, other in zip(mine, its, strict=True))
    representations = captured.pool.slots.representations
    assert representations is not None
    assert bool(representations._is_built[:, captured.locations[1, START[1]] // PAGE].all()), "as completed"
    captured.pool.slots.check_integrity()


@torch.inference_mode()
@pytest.mark.parametrize(("short", "min_context"), [(4 * PAGE - 1, 0), (9 * PAGE + 3, 10 * PAGE)])
def test_a_graph_of_the_server_replays_other_requests(short: int, min_context: int, device: str) -> None:
    """As upstream captures and replays it: three rows for two requests, one of which reads everything, once
    more pages than a budget."""
    graph = CudaGraph() if device == "cuda" else CapturedStep()
    lengths, rows = [11 * PAGE + 5, short], 3
    eager, captured = (CountedStep(2, max(lengths) + STEPS, "bits", device, min_context) for _ in range(2))
    for each in (eager, captured):
        each.fill([length - 1 for length in lengths])
    backend = captured.backend
    assert not backend.can_replay(captured.batch_of(lengths)), "before there is a graph"
    backend.init_cuda_graph_state(4, 4)
    nowhere = torch.zeros(rows, dtype=torch.int64, device=device)
    batch = captured.replayed([], rows, nowhere)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    inputs = captured.inputs(rows)
    if device == "cuda":  # as upstream warms up: what the first launch builds is not captured
        captured.run_layers(inputs, batch, Uncounted())
    outputs = captured.run_layers(inputs, batch, graph)
    for _ in range(STEPS):
        batch = captured.batch_of(lengths)
        assert backend.can_replay(batch)
        backend.init_forward_metadata_out_graph(captured.replayed(lengths, rows, batch.out_cache_loc))
        drawn = eager.inputs()
        for old, new in zip(inputs, drawn, strict=True):
            for buffer, fresh in zip(old, new, strict=True):
                buffer[: len(fresh)].copy_(fresh)
        graph.replay()
        expected = eager.run_layers(drawn, eager.begin(lengths, Uncounted()), Uncounted())
        assert_same([output[: len(lengths)] for output in outputs], expected)
        lengths = [length + 1 for length in lengths]
    if device == "cuda":
        torch.cuda.synchronize()
    captured.pool.slots.check_integrity()
    for request in captured.requests:
        mine, its = (each.selections.of(request.rid) for each in (captured, eager))
        assert (mine.candidates, mine.selected) == (its.candidates, its.selected)
        assert mine.selected > 0 or request.rid == "1", "the first one chooses"


def test_no_page_is_freed_while_a_graph_runs() -> None:
    """Whose scheduler frees pages of the last step as soon as the graph of the next one lets it."""
    for mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY):
        ends = CapturedTieredBackend.shared_read_ends(mock.Mock(spec=CapturedTieredBackend), mode)
        assert ends is SharedReadEnds.POST_REPLAY


@given(
    page_size=st.sampled_from([1, 16, 32, 64, 128, 256]),
    most_pages=st.integers(1, 40),
    max_pages=st.integers(1, 12),
    data=st.data(),
)
def test_a_graph_has_room_for_what_its_rows_choose(
    page_size: int, most_pages: int, max_pages: int, data: st.DataObject
) -> None:
    """Also where sinks and window alone are more than the budget."""
    rule = ChoiceRule(SINK_TOKENS, WINDOW_TOKENS)
    steps = CapturedSteps(mock.Mock(rule=rule), 1, most_pages, max_pages, page_size, "cpu")
    length = data.draw(st.integers(1, most_pages * page_size))
    pages = torch.zeros(1, most_pages, dtype=torch.int64)
    contexts = Contexts.of(pages, [length], [max_pages], rule, page_size)
    assert steps.holds(-(-length // page_size), max_pages)
    assert contexts.most_chosen <= steps._most_chosen


def test_what_no_graph_holds_runs_eagerly(device: str) -> None:
    lengths = [11 * PAGE + 5, 4 * PAGE - 1]
    step = CountedStep(2, max(lengths), "bits", device=device)
    backend, batch = step.backend, step.batch_of(lengths)
    backend.init_cuda_graph_state(4, 4)
    assert backend.can_replay(batch)
    backend.on_choice = lambda *_: None
    assert not backend.can_replay(batch), "somebody lists the pages"
    backend.on_choice = None
    step.selections.open(step.requests[0], reads_all=False, budget=10.0 * BUDGET)  # type: ignore[arg-type]
    assert not backend.can_replay(batch), "a budget of its own"
    step.selections.open(step.requests[0], reads_all=True, budget=None)  # type: ignore[arg-type]
    assert not backend.can_replay(batch), "more pages to be read than others choose"
    step.selections.open(step.requests[0], reads_all=False, budget=None)  # type: ignore[arg-type]
    assert backend.can_replay(batch)
    batch.seq_lens_cpu = None
    assert not backend.can_replay(batch), "lengths that only the device knows"


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for layer, (output, wanted) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(output, wanted), layer


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "a number": lambda x: float(x.sum()),
    "a condition": lambda x: bool((x > 0).any()),
    "a list": lambda x: x.tolist(),
    "an array": lambda x: x.numpy(),
    "a copy": lambda x: x.cpu(),
    "a move": lambda x: x.to("cpu"),
    "where": lambda x: (x > 0).nonzero(),
    "chosen ones": lambda x: x[x > 0],
    "masked ones": lambda x: x.masked_select(x > 0),
    "different ones": lambda x: x.unique(),
    "so many of each": lambda x: x.repeat_interleave(x.long()),
    "equality": lambda x: torch.equal(x, x + 1),
    "the host's numbers": lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
    "the host's numbers, moved": lambda x: x + torch.tensor([1.0, 2.0, 3.0], device="cpu"),
}


@torch.inference_mode()
@pytest.mark.skipif(torch.cuda.is_available(), reason="what is counted is on a CPU")
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_nothing_is_read_from_the_device(read: Callable[[torch.Tensor], Any]) -> None:
    x = torch.tensor([1.0, 0.0, 2.0])
    with CapturedStep().counting(), pytest.raises(HostRead):
        read(x)


@torch.inference_mode()
def test_what_python_decided_is_not_decided_again() -> None:
    x, graph, factor = torch.tensor([1.0, 2.0]), CapturedStep(), 2
    with graph.counting():
        y = (x * factor)[:1]
        x.add_(1)
    factor = 3
    x.fill_(5.0)
    graph.replay()
    assert (y.tolist(), x.tolist()) == ([10.0], [6.0, 6.0])
