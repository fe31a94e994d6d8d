"""A trace through a shadow cache: stock's recency and the server's own policy as a server would run them.

One request at a time, and blocks stand for the server's pages. An answer enters the cache when its request
ends. Where the trace does not say which blocks it filled, as a recording does, they are those with which the
first later request goes on from the prompt, as far as the answer reached, if nobody had asked for them
before. Others have no name, and nobody finds them again.
"""

from __future__ import annotations

from collections.abc import Sequence

from sgl_importance.nodes.ghosts import ghost_pages_of
from sgl_importance.observe.shadow.shadow_cache import ShadowCache
from sgl_importance.observe.shadow.shadow_ranking import ImportanceRanking, LruShadowRanking
from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance_lab.replay.cache import ReplayCounts
from sgl_importance_lab.replay.importance_replay import UNIFORM_COST
from sgl_importance_lab.replay.trace import Trace


def replay_served(
    trace: Trace, capacity: int, *, is_importance: bool, chunk_tokens: int | None = None
) -> ReplayCounts:
    """Replays as a server serves; a request longer than the cache is refused.

    Args:
        trace: requests as paths in a prefix tree.
        capacity: blocks that the cache can hold.
        is_importance: whether the server's policy evicts; else stock's recency.
        chunk_tokens: most that a request computes, and inserts, at once; None for no bound.
    """
    assert trace.parents is not None, "independent objects have no prefix tree: use replay_objects"
    tokens = trace.block_tokens
    ranking = (
        ImportanceRanking(UNIFORM_COST, tokens, ghost_pages_of(capacity))
        if is_importance
        else LruShadowRanking()
    )
    cache = ShadowCache(capacity, tokens, ranking, spare_pages=int(tokens > 1), chunk_tokens=chunk_tokens)
    hit_blocks = hit_tokens = full_hits = refused = refused_blocks = refused_tokens = 0
    served = ServedPages(trace)
    for index in range(trace.num_requests):
        blocks = int(trace.offsets[index + 1] - trace.offsets[index])
        prompt_tokens = int(trace.input_tokens[index])
        found = cache.admit(str(index), served.prompt(index), prompt_tokens)
        if found is None:
            refused += 1
            refused_blocks += blocks
            refused_tokens += prompt_tokens
            continue
        hit_tokens += found
        hit_blocks += found // tokens
        full_hits += found // tokens == blocks > 0
        end = AnswerEnd(int(trace.answer_ends[index]))
        cache.finish(str(index), served.with_answer(index), served.tokens(index), end)
    return ReplayCounts(
        hit_blocks, hit_tokens, full_hits, cache.evicted, 0, refused, refused_blocks, refused_tokens
    )


class ServedPages:
    """What each request of a trace is to a shadow cache whose pages are the trace's blocks."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._answers = trace.answers or answer_blocks(trace)

    def prompt(self, index: int) -> list[bytes]:
        """Names of the whole pages of a prompt."""
        whole = int(self._trace.input_tokens[index]) // self._trace.block_tokens
        return [block.to_bytes(8, "big") for block in self._trace.request(index)[:whole].tolist()]

    def with_answer(self, index: int) -> list[bytes]:
        """Names of the whole pages of prompt and answer."""
        pages = self.prompt(index)
        pages += [block.to_bytes(8, "big") for block in self._answers[index]]
        filled = self.tokens(index) // self._trace.block_tokens
        return pages + [b"answer %d %d" % (index, page) for page in range(len(pages), filled)]

    def tokens(self, index: int) -> int:
        """Of prompt and answer."""
        return int(self._trace.input_tokens[index] + self._trace.output_tokens[index])


def answer_blocks(trace: Trace) -> Sequence[Sequence[int]]:
    """The blocks behind the whole blocks of each prompt that its answer filled, as far as they have names."""
    answers: list[list[int]] = [[] for _ in range(trace.num_requests)]
    ends: dict[int, int] = {}  # request that nobody has gone on from, by the last whole block of its prompt
    known = 0  # blocks are numbered as they appear
    for index in range(trace.num_requests):
        path = trace.request(index)
        found = int((path < known).sum())
        if 0 < found < len(path) and (earlier := ends.pop(int(path[found - 1]), None)) is not None:
            tokens = int(trace.input_tokens[earlier] + trace.output_tokens[earlier])
            answers[earlier] = path[found : tokens // trace.block_tokens].tolist()
        whole = min(len(path), int(trace.input_tokens[index]) // trace.block_tokens)
        if whole and trace.output_tokens[index]:
            ends[int(path[whole - 1])] = index
        known = max(known, int(path.max(initial=-1)) + 1)
    return answers
