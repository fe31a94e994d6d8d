"""The shadow caches of ``observe``, behind a recording in place of a server."""

from __future__ import annotations

from typing import Any

from sgl_importance.nodes.ghosts import ghost_pages_of
from sgl_importance.observe.shadow.shadow_pair import SERVER_CHUNK_TOKENS, ShadowPair
from sgl_importance.observe.shadow.tiered_shadow import HostWrites
from sgl_importance.observe.trace.arrivals import HEALTH_CHECK_PREFIX
from sgl_importance.observe.trace.reader import TraceReader
from sgl_importance.observe.trace.records import AnswerTold, Header, RequestAdmitted, RequestFinished
from sgl_importance.policy.cost_model import CostModel
from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance.tiers import Tier

_ANSWER_ENDS = {end.name.lower(): end for end in AnswerEnd}


def recorded_pair(reader: TraceReader, chunk_tokens: int | None = None) -> ShadowPair | None:
    """What a server under ``observe`` would have compared while the recording was made.

    Args:
        reader: of the recording.
        chunk_tokens: the server's ``--chunked-prefill-size``; None for the recorded one.

    Returns:
        None where the recording does not say how large the device tier was.
    """
    header = reader.header
    capacity = header.capacity_tokens.get(Tier.DEVICE, 0) // header.page_size
    if not capacity:
        return None
    constants: dict[str, Any] = {**header.cost, "bytes_per_token": int(header.cost["bytes_per_token"])}
    cost = CostModel(**constants)
    ghosts = ghost_pages_of(capacity)
    chunk = chunk_tokens or header.options.get("chunked_prefill_size", SERVER_CHUNK_TOKENS)
    pair = ShadowPair(capacity, header.page_size, cost, ghosts, chunk_tokens=chunk if chunk > 0 else None)
    if host := header.capacity_tokens.get(Tier.HOST, 0) // header.page_size:
        pair.add_host(host, HostWrites.of(header.options.get("hicache_write_policy")))
    prompts: dict[int, int] = {}
    for record in reader:
        match record:
            case Header():  # a server's life begins
                pair.reset()
                prompts.clear()
            # The server's own requests are in no trace that is replayed beside this.
            case RequestAdmitted() if not record.rid.startswith(HEALTH_CHECK_PREFIX):
                prompts[record.request] = record.input_tokens
                pages = [reader.digest(page) for page in record.pages.tolist()]
                pair.admit(str(record.request), pages, record.input_tokens)
            case RequestFinished() if record.reason != "retracted" and record.request in prompts:
                pages = [reader.digest(page) for page in record.pages.tolist()]
                tokens = prompts.pop(record.request) + record.output_tokens
                pair.finish(str(record.request), pages, tokens, _ANSWER_ENDS[record.answer_end])
            case AnswerTold():
                pair.told(str(record.request), _ANSWER_ENDS[record.answer_end])
    return pair
