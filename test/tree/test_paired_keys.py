"""Trees of EAGLE, whose keys are pairs of tokens: a page is another one where another token follows."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance.misses.path_tree import unpacked
from sgl_importance.misses.reason import Reason
from sgl_importance.nodes.digests import chain_digests, iterate_chain, root_digest
from sglang_importance.operations.job import RequestError
from sglang_importance.operations.miss_view import why_prompt
from sglang_importance.operations.pin_operations import unpin
from sglang_importance.upstream.nodes import tokens_of

from support.drivers.history import OPERATIONS, History
from support.drivers.tree_driver import PAGE, TreeDriver

WITHOUT_PINS = [name for name in OPERATIONS if name not in ("pin", "unpin")]
events = st.lists(
    st.tuples(st.sampled_from(WITHOUT_PINS), st.integers(0, 2**16), st.integers(0, 2**16)),
    min_size=10,
    max_size=80,
)


def serve(driver: TreeDriver, prompt: list[int], answer: list[int]) -> int:
    """Tokens of a prompt that were found."""
    request = driver.admit(prompt)
    found = request.cached_tokens_device
    driver.prefill(request)
    driver.decode(request, answer)
    driver.finish(request)
    return found


def paired(driver: TreeDriver) -> TreeDriver:
    driver.core.is_eagle = True
    misses = driver.component.misses
    assert misses is not None
    assert misses.memory is not None
    misses.memory.ahead = 1
    return driver


def test_a_page_is_named_with_the_token_behind_it() -> None:
    tokens = list(range(3 * PAGE + 1))
    plain = chain_digests(root_digest(None, None), tokens, PAGE)
    ahead = list(iterate_chain(root_digest(None, None), tokens, PAGE, ahead=1))
    assert len(plain) == len(ahead) == 3
    assert set(plain).isdisjoint(ahead)
    cut = list(iterate_chain(root_digest(None, None), tokens[:-1], PAGE, ahead=1))
    assert cut == ahead[:-1]  # nobody knows what follows the last page
    other = list(iterate_chain(root_digest(None, None), [*tokens[:-1], 99], PAGE, ahead=1))
    assert (other[:-1], other[-1] != ahead[-1]) == (ahead[:-1], True)


def test_two_pages_of_the_same_tokens_are_two() -> None:
    driver = paired(TreeDriver())
    shared = list(range(100, 100 + 2 * PAGE))
    assert serve(driver, [*shared, 1, 2, 3, 4, 5], [6] * PAGE) == 0
    assert serve(driver, [*shared, 7, 8, 9, 4, 5], [6] * PAGE) == PAGE  # the second page goes on otherwise
    driver.component.check_integrity()
    tree = driver.component.state.tree
    while not tree.source.catch_up():
        pass
    tree.source.check_integrity()
    first, *others = sorted(tree.nodes(), key=lambda node: len(tree.path(node)))
    assert list(tokens_of(first)) == shared[:PAGE]
    again = [node for node in others if list(tokens_of(node))[:PAGE] == shared[PAGE:]]
    assert len(again) == 2
    keys = {tree.page_digests(node)[0] for node in again}
    assert len(keys) == 2
    assert all(driver.cache.get_importance(key) is not None for key in keys)


def test_an_account_says_where_pairs_part() -> None:
    driver = paired(TreeDriver())
    shared = list(range(100, 100 + 2 * PAGE))
    for ends, found in (([1, 2, 3, 4, 5], 0), ([7, 8, 9, 4, 5], PAGE), ([7, 8, 9, 4, 5], 2 * PAGE)):
        assert serve(driver, [*shared, *ends], [6] * PAGE) == found
    misses = driver.component.misses
    assert misses is not None
    misses.settle()
    first, second, third = (each.account for each in misses.recent)
    assert first.missed() == {Reason.NEVER_SEEN: 2 * PAGE, Reason.SHORT: 5}
    assert second.missed() == {Reason.PARTED: PAGE, Reason.SHORT: 5}
    assert third.missed() == {Reason.SHORT: 5}
    assert second.parting is not None
    assert second.parting.token == 2 * PAGE
    assert (unpacked(second.parting.asked)[:3], unpacked(second.parting.known)[:3]) == ([7, 8, 9], [1, 2, 3])
    assert unpacked(second.parting.before)[-2:] == shared[-2:]
    # A prompt that ends with whole pages: the last one cannot be looked up, since nothing follows it.
    asked = why_prompt(driver.cache, {"tokens": [*shared, 7], "extra_key": None, "cache_salt": None})
    (told,) = asked["requests"]
    assert (told["found_tokens"]["device"], told["missed_tokens"]) == (PAGE, {"short": PAGE + 1})


def test_pins_are_refused() -> None:
    with pytest.raises(RequestError, match="without --speculative-algorithm"):
        unpin(paired(TreeDriver()).cache, {"pin_id": "a"})


@pytest.mark.parametrize("kind", ["importance", "observe"])
@settings(max_examples=40, deadline=None)
@given(events)
def test_any_history_keeps_the_tree_consistent(kind: str, history: list[tuple[str, int, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        tree = History(kind, patch)
        paired(tree.driver)
        for event in history:
            tree.apply(*event)
        tree.end()
