"""Page lists beside an attention backend: of each token that they are for, by the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sgl_importance_lab.conformance.page_scores import layer_page_scores
from sglang_importance.attention.page_lists import PageListProbe
from sglang_importance.observe.observed_pages import ObservedPages

from support.drivers.attention_driver import KV_HEADS, NUM_LAYERS, SCALE, AttentionDriver, Sequence, options

PAGE = 4


class Listed:
    """A driver whose backend is probed, and what was listed; the driver compares outputs with upstream's."""

    def __init__(self, share: float = 1.0, sliding: int | None = None, **attention: object) -> None:
        self.driver = AttentionDriver(options(), page_size=PAGE, **attention)
        if sliding is not None:
            self.driver.layers[sliding].sliding_window_size = 8
        self.probe = PageListProbe(self.driver.backend, self.driver.runner, share)
        self.found: list[tuple[str, ObservedPages]] = []
        self.faults: list[Exception] = []
        self.probe.attach(self.take, self.faults.append)

    def take(self, rid: str, lists: ObservedPages) -> None:
        self.found.append((rid, lists))

    def check(self, lists: ObservedPages, sequence: Sequence, share: float = 1.0) -> None:
        """Against the reference of each query head alone."""
        position = lists.seq_len - 1
        count = int(np.ceil(share * -(-lists.seq_len // PAGE)))
        assert lists.pages.shape == lists.mass.shape == (len(lists.layers), KV_HEADS, count)
        for at, layer in enumerate(lists.layers):
            queries, keys = sequence.q[layer][position], sequence.k[layer][: position + 1]
            for head, own in enumerate(queries.chunk(KV_HEADS)):
                expected = (
                    layer_page_scores(
                        own[None],
                        keys[:, head : head + 1],
                        torch.tensor([position]),
                        scale=SCALE,
                        logit_cap=self.driver.layers[layer].logit_cap,
                        page_size=PAGE,
                        sink_tokens=0,
                        local_tokens=0,
                    )
                    .mass[0]
                    .numpy()
                )
                np.testing.assert_array_equal(
                    lists.pages[at, head], np.argsort(-expected, kind="stable")[:count]
                )
                np.testing.assert_allclose(lists.mass[at, head], np.sort(expected)[::-1][:count], atol=1e-5)


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_the_last_token_of_every_request_in_a_pass_is_listed(share: float) -> None:
    listed = Listed(share)
    a, b = Sequence("a", 1), Sequence("b", 2)
    listed.driver.extend((a, 17))
    listed.driver.extend((b, 9), (a, 6))
    listed.driver.decode(b, a)
    listed.driver.decode(a, dummy=True)
    listed.driver.decode(a)
    got = [(rid, each.forward_pass, each.seq_len, each.new_tokens) for rid, each in listed.found]
    assert got == [
        ("a", 1, 17, 17),
        ("b", 2, 9, 9),
        ("a", 2, 23, 6),
        ("b", 3, 10, 1),
        ("a", 3, 24, 1),
        ("a", 5, 26, 1),
    ]
    for rid, lists in listed.found:
        assert lists.layers == tuple(range(NUM_LAYERS))
        assert lists.chosen == (None,) * NUM_LAYERS
        listed.check(lists, {"a": a, "b": b}[rid], share)


def test_sliding_layers_are_left_out_and_soft_caps_count() -> None:
    listed = Listed(sliding=1, logit_cap=2.0)
    a = Sequence("a", 1)
    listed.driver.extend((a, 13))
    ((_, lists),) = listed.found
    assert lists.layers == (0, 2)
    listed.check(lists, a)


def test_an_exception_costs_the_lists_of_its_pass_and_nothing_else() -> None:
    listed = Listed()

    def fail(rid: str, lists: ObservedPages) -> None:
        raise RuntimeError("no room")

    a = Sequence("a", 1)
    listed.driver.extend((a, 5))
    listed.probe.attach(fail, listed.faults.append)
    listed.driver.decode(a)
    listed.driver.decode(a)
    assert [str(fault) for fault in listed.faults] == ["no room"] * 2
    listed.probe.attach(listed.take, listed.faults.append)
    listed.driver.decode(a)
    assert [lists.seq_len for _, lists in listed.found] == [5, 8]
    assert len(listed.faults) == 2


def test_nothing_is_listed_before_somebody_takes_it() -> None:
    driver = AttentionDriver(options(), page_size=PAGE)
    PageListProbe(driver.backend, driver.runner, 1.0)
    driver.extend((Sequence("a", 1), 5))
