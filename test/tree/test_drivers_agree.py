"""All who drive the policy evict the same pages, of the same classes and ages, where they can.

The server's real tree, a shadow cache, the replay of blocks and the compiled one see the same requests: one
tier, g = 1, ghosts without limit, one page to a block, one request at a time, each
bringing at most one page, so that every node is one. Room is made behind a request. What is left out is
where they differ (docs/evidence/replay.md), and what ``test_where_drivers_differ.py`` shows one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance.nodes import tail_size
from sgl_importance.nodes.tail_size import LEAST_TOKENS
from sgl_importance_lab.replay.cache import replay_tree
from sgl_importance_lab.replay.compiled.fast_importance import evictions
from sgl_importance_lab.replay.sessions import block_facts
from sgl_importance_lab.replay.trace import TraceBuilder

from support.drivers.policy_drivers import (
    Known,
    NotingReplay,
    Pages,
    ServerTree,
    Shadow,
    counted,
    tokens_of,
)
from support.drivers.tree_driver import PAGE


@dataclass
class Traffic:
    """Chooses requests from what is cached. Pages are numbered as they are first asked for.

    A request asks again for a cached path, or for one and a page behind it: one that nobody knows, or one
    that was evicted before anything had followed it, where no two texts part (why: docs/evidence/replay.md).
    """

    paths: list[Pages] = field(default_factory=list)
    followers: list[int] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)

    def choose(self, kind: int, which: int, cached: set[int]) -> Pages:
        known = sorted(cached)
        behind: Pages = self.paths[known[which % len(known)]] if known else ()
        if kind == 0 and behind:
            self.happened["asked again"] += 1
            return behind
        if kind == 1:
            returning = [path for page, path in enumerate(self.paths) if self._can_return(page, path, cached)]
            if returning:
                self.happened["returned"] += 1
                return returning[which % len(returning)]
        if kind == 2:
            behind = ()
        page = len(self.paths)
        self.paths.append((*behind, page))
        self.followers.append(0)
        if behind:
            self.happened["continued"] += 1
            self.followers[behind[-1]] += 1
        return self.paths[page]

    def _can_return(self, page: int, path: Pages, cached: set[int]) -> bool:
        if page in cached or self.followers[page] or len(path) == 1:
            return False
        return path[-2] in cached and self.followers[path[-2]] < 2


Drawn = Sequence[tuple[int, int]]


def check_agreement(drawn: Drawn, capacity: int) -> Counter[str]:
    """Serves the same requests to all drivers; what happened, and how often."""
    server, shadow, traffic = ServerTree(), Shadow(), Traffic()
    builder = TraceBuilder("agreed", PAGE)
    after: list[Known] = []
    hits = 0
    cached: set[int] = set()
    for kind, which in drawn:
        path = traffic.choose(kind, which, cached)
        builder.add(path, input_tokens=PAGE * len(path) + 1, output_tokens=1)
        prompt = [*tokens_of(path), 0]  # the last token of a prompt is always computed
        found = server.serve(prompt)
        assert shadow.serve(prompt) == found
        hits += found // PAGE
        for cache in (server, shadow):
            while cache.pages() > capacity:
                cache.evict(1)
        known = server.known()
        assert shadow.known() == known
        after.append(known)
        cached = {each.page for each in known.kept}

    trace = builder.build()
    facts = block_facts(trace)
    # Every page is a node and counts as one.
    facts = replace(facts, is_evidence=np.ones_like(facts.is_evidence))
    blocks = NotingReplay(capacity, trace, facts=facts)
    assert replay_tree(trace, blocks).hit_blocks == hits
    blocks.note()
    for request, (expected, known) in enumerate(zip(after, blocks.after, strict=True)):
        assert known == expected, request
    evicted = [(clock, *each) for clock, known in enumerate(after, start=1) for each in known.evicted]
    assert [tuple(row) for row in evictions(trace, capacity, facts).tolist()] == evicted
    for policy in (shadow.policy, blocks.nodes.policy):
        assert counted(policy) == counted(server.policy)
    classes = {each.reuse_class for known in after for each in known.kept}
    return traffic.happened + Counter({"evicted": len(evicted), "classes": len(classes)})


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30)), min_size=1, max_size=80), st.integers(1, 12)
)
def test_all_drivers_evict_the_same_pages_for_the_same_reasons(drawn: Drawn, capacity: int) -> None:
    check_agreement(drawn, capacity)


def test_all_drivers_agree_over_a_long_history() -> None:
    rng = np.random.default_rng(7)
    happened = check_agreement(rng.integers((0, 0), (5, 31), (600, 2)).tolist(), 10)
    assert happened["evicted"] > 200
    assert happened["returned"] > 20
    assert happened["continued"] > 100
    assert happened["asked again"] > 100
    assert happened["classes"] > 15


turns = st.lists(
    st.tuples(
        st.integers(0, 40), st.integers(0, 60), st.integers(1, 14), st.integers(1, 10), st.integers(0, 5)
    ),
    min_size=1,
    max_size=50,
)


@settings(max_examples=12, deadline=None)
@given(drawn=turns, least=st.sampled_from([PAGE, LEAST_TOKENS]))
def test_a_shadow_knows_of_every_node_what_the_server_knows(drawn: list[tuple[int, ...]], least: int) -> None:
    """Sessions that grow, branch inside pages, end anywhere and come back: long nodes, cuts, answers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tail_size, "LEAST_TOKENS", least)
        check_knowledge(drawn)


def check_knowledge(drawn: list[tuple[int, ...]]) -> None:
    server, shadow = ServerTree(), Shadow()
    fresh = iter(range(1, 10**6))
    texts: list[list[int]] = [[]]
    for which, follow, new, answered, evicted in drawn:
        base = texts[which % len(texts)]
        prompt = base[: follow % (len(base) + 1)] + [next(fresh) for _ in range(new)]
        answer = [next(fresh) for _ in range(answered)]
        texts.append(prompt + answer)
        assert shadow.serve(prompt, answer) == server.serve(prompt, answer)
        for cache in (server, shadow):
            cache.evict(evicted)
        assert shadow.known() == server.known()
    assert counted(shadow.policy) == counted(server.policy)
    shadow.cache.check_integrity()
    server.driver.component.check_integrity()
