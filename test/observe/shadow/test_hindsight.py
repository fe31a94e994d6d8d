"""What true ends of sessions would save, as the shadow that looks ahead counts it."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance.nodes.named_sessions import SessionName
from sgl_importance.observe.shadow import hindsight
from sgl_importance.observe.shadow.comparison import Comparison
from sgl_importance.observe.shadow.hindsight import Hindsight
from sgl_importance.observe.shadow.shadow_cache import ShadowCache
from sgl_importance.observe.shadow.shadow_pair import ShadowPair
from sgl_importance.observe.shadow.shadow_ranking import ImportanceRanking, LruShadowRanking
from sgl_importance.policy.cost_model import CostModel
from sgl_importance.reuse.answer_end import AnswerEnd

from support.workloads import recordings

PAGE = 4
POOL = 24
AHEAD = 12
COST = CostModel(**recordings.COST)


class Asked(NamedTuple):
    """A request with its answer, in whole pages."""

    session: SessionName | None
    prompt: list[bytes]
    answer: list[bytes]
    is_last: bool


def conversations(seed: int, num_requests: int = 120, alive: int = 4) -> list[Asked]:
    """Sessions that take turns, each with its next request at most ``AHEAD`` requests later."""
    chance = random.Random(seed)
    texts: dict[int, list[bytes]] = {number: [] for number in range(alive)}
    asked = []
    newest = alive
    for number in range(num_requests):
        session = min(texts) if number % 2 else chance.choice(sorted(texts)[-2:])
        text = texts.pop(session)
        prompt = text + [b"p%07d" % (number * 10 + place) for place in range(chance.randrange(1, 4))]
        answer = [b"a%07d" % number]
        is_last = len(prompt) > 12 or number % 2 == 1
        asked.append(Asked(SessionName(str(session)), prompt, answer, is_last))
        if is_last:
            texts[newest] = []
            newest += 1
        else:
            texts[session] = prompt + answer
    return asked


def importance() -> ShadowCache:
    return ShadowCache(POOL, PAGE, ImportanceRanking(COST, PAGE, 4 * POOL))


def ask(cache: ShadowCache, number: int, asked: Asked) -> int:
    hits = cache.admit(str(number), asked.prompt, len(asked.prompt) * PAGE, asked.session)
    text = asked.prompt + asked.answer
    cache.finish(str(number), text, len(text) * PAGE)
    assert hits is not None
    return hits


def look_ahead(asked: list[Asked]) -> Comparison:
    comparison = Comparison()
    shadow, lru = Hindsight(importance(), comparison), ShadowCache(POOL, PAGE, LruShadowRanking())
    for number, each in enumerate(asked):
        lru_hits = ask(lru, number, each)
        shadow.admit(str(number), each.prompt, len(each.prompt) * PAGE, each.session, lru_hits)
        text = each.prompt + each.answer
        shadow.finish(str(number), text, len(text) * PAGE, AnswerEnd.UNKNOWN)
    return comparison


@pytest.fixture(autouse=True)
def few_requests_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hindsight, "REQUESTS_AHEAD", AHEAD)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**16))
def test_it_finds_what_a_cache_finds_to_which_sessions_say_that_they_are_over(seed: int) -> None:
    asked = conversations(seed)
    comparison = look_ahead(asked)
    told, lru = importance(), ShadowCache(POOL, PAGE, LruShadowRanking())
    followed = len(asked) - AHEAD
    lru_hits = hits = 0
    for number, each in enumerate(asked[:followed]):
        lru_hits += ask(lru, number, each)
        hits += ask(told, number, each)
        if all(each.session != later.session for later in asked[number + 1 : number + 1 + AHEAD]):
            assert each.session is not None
            told.session_over(each.session)
    assert comparison.requests == followed
    assert (comparison.lru_hit_tokens, comparison.other_hit_tokens) == (lru_hits, hits)


def test_ends_save_tokens_here() -> None:
    gains = []
    for seed in range(5):
        asked = conversations(seed)
        untold = importance()
        hits = sum(ask(untold, number, each) for number, each in enumerate(asked[: len(asked) - AHEAD]))
        gains.append(look_ahead(asked).other_hit_tokens - hits)
    assert sum(gains) > 0, gains


def test_nothing_is_followed_where_nobody_names_a_session() -> None:
    asked = [each._replace(session=None) for each in conversations(0)]
    assert look_ahead(asked).requests == 0


def test_texts_that_take_much_memory_are_looked_ahead_less_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hindsight, "BYTES_AHEAD", 2000)
    asked = conversations(0)
    assert len(asked) - AHEAD < look_ahead(asked).requests <= len(asked)


def test_a_request_that_is_gone_ends_its_session_too() -> None:
    cache = importance()
    shadow = Hindsight(cache, Comparison())
    left = [b"x" * 8]
    shadow.admit("first", left, PAGE, SessionName("left"), 0)
    shadow.finish("first", left, PAGE, AnswerEnd.UNKNOWN)
    shadow.admit("second", left, PAGE, SessionName("left"), 0)
    shadow.gone("second")
    for number in range(AHEAD + 1):
        page = b"%08d" % number
        shadow.admit(str(number), [page], PAGE, SessionName(str(number)), 0)
        shadow.finish(str(number), [page], PAGE, AnswerEnd.UNKNOWN)
    given_back = [node.pages for node in cache.nodes() if node.metadata and node.metadata.is_given_back]
    assert left in given_back


def test_the_pair_says_what_ends_would_save() -> None:
    pair = ShadowPair(POOL, PAGE, COST, 4 * POOL)
    for number, each in enumerate(conversations(2)):
        pair.admit(str(number), each.prompt, len(each.prompt) * PAGE, each.session)
        text = each.prompt + each.answer
        pair.finish(str(number), text, len(text) * PAGE)
    ends = pair.document()["sessions_end"]
    assert ends["requests"] == pair.comparison.requests - AHEAD
    assert ends["hit_tokens"] > ends["lru_hit_tokens"]
