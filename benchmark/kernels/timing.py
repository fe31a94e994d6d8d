"""Times of a step: CUDA-graph replays on a device, plain calls without one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

Step = Callable[[], None]
REPLAYS = 20
ROUNDS = 7
LONG_REPLAYS, LONG_ROUNDS = 2, 5  # Of arms that are many steps each.


def captured(step: Step) -> Step:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _seconds(step: Step, repeats: int, *, on_device: bool) -> float:
    if not on_device:
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        return (time.perf_counter() - start) / repeats
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(repeats):
        step()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1000 / repeats


def interleaved(arms: Mapping[str, Step], *, on_device: bool, as_graphs: bool = True) -> dict[str, float]:
    """Median seconds of each arm; the arms take turns, so that a noisy machine is noisy for all of them.

    ``as_graphs`` captures each arm on a device; without, arms are called, and may replay graphs themselves.
    """
    steps = {name: captured(step) if on_device and as_graphs else step for name, step in arms.items()}
    replays, rounds = (REPLAYS, ROUNDS) if as_graphs else (LONG_REPLAYS, LONG_ROUNDS)
    repeats, rounds = (replays, rounds) if on_device else (1, 1)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(_seconds(step, repeats, on_device=on_device))
    return {name: statistics.median(values) for name, values in times.items()}


def read_bandwidth(device: str, *, megabytes: int) -> float:
    """Bytes per second of reading memory once, by the same clock: the floor of what reads K and V."""
    data = torch.ones(megabytes * (1 << 20) // 4, device=device)
    result = torch.empty((), device=device)

    def read() -> None:
        torch.sum(data, dim=0, out=result)

    seconds = interleaved({"read": read}, on_device=device != "cpu")["read"]
    return data.numel() * 4 / seconds
