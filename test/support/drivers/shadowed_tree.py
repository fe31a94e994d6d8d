"""A tree's component that observes: a pair of shadow caches hears of its requests."""

from __future__ import annotations

from sgl_importance.observe.shadow.shadow_pair import ShadowPair
from sglang_importance.cache.component import ImportanceComponent
from sglang_importance.observe.shadowing import Shadowing

from support.waiting import wait_until


def shadowed(component: ImportanceComponent, pair: ShadowPair) -> Shadowing:
    """Has the pair follow the component from now on."""
    shadowing = Shadowing(pair)
    for listener in (component, component.requests, component.requests.admissions):
        listener._shadowing = shadowing
    return shadowing


def settle(shadowing: Shadowing) -> None:
    """Waits until what was told so far is followed."""
    wait_until(lambda: not shadowing.document()["waiting_events"], look_every=0.001)
