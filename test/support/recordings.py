"""Recordings of a server that still runs, and the shadow caches that follow one."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from sgl_importance.observe.shadow.shadow_pair import ShadowPair
from sgl_importance.observe.trace.reader import TraceReader, open_trace
from sgl_importance.observe.trace.records import Header, RequestAdmitted, RequestFinished
from sgl_importance.policy.cost_model import CostModel
from sgl_importance_lab.replay.formats.recorded import ANSWER_ENDS
from sglang_importance.cache.cache_factory import GHOSTS_PER_DEVICE_PAGE as GHOSTS

from support.waiting import wait_until


def wait_until_recorded(trace: Path, rids: Collection[str]) -> None:
    """Until the ends of these requests are written, and what came before: a thread writes behind the answers.

    What a server asks itself is recorded, too: to count requests would not do.
    """

    def are_written() -> bool:
        records = list(open_trace(trace))
        names = {record.request: record.rid for record in records if isinstance(record, RequestAdmitted)}
        ended = {names.get(record.request) for record in records if isinstance(record, RequestFinished)}
        return ended.issuperset(rids)

    wait_until(are_written, look_every=0.1)


def shadows_of(reader: TraceReader, chunk_tokens: int) -> ShadowPair:
    """A recording sent through a pair, as a server under ``observe`` would have while it was made."""
    header = reader.header
    capacity = header.capacity_tokens["device"] // header.page_size
    cost = {**header.cost, "bytes_per_token": int(header.cost["bytes_per_token"])}
    pair = ShadowPair(
        capacity, header.page_size, CostModel(**cost), GHOSTS * capacity, chunk_tokens=chunk_tokens
    )
    prompts: dict[int, int] = {}
    for record in reader:
        match record:
            case Header():
                pair.reset()
                prompts.clear()
            case RequestAdmitted():
                prompts[record.request] = record.input_tokens
                pages = [reader.digest(page) for page in record.pages.tolist()]
                pair.admit(str(record.request), pages, record.input_tokens)
            case RequestFinished() if record.reason != "retracted" and record.request in prompts:
                pages = [reader.digest(page) for page in record.pages.tolist()]
                tokens = prompts.pop(record.request) + record.output_tokens
                pair.finish(str(record.request), pages, tokens, ANSWER_ENDS[record.answer_end])
    return pair
