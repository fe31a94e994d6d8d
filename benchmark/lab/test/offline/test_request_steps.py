"""A cache is asked in the form that its release of sglang takes."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from sgl_importance_lab.offline.request_steps import (
    insert_finished,
    insert_unfinished,
    lock_match,
    matched_slots,
    release,
)


class _Calls:
    """A cache that writes down what it is asked, with the methods of one form alone."""

    def __init__(self, *methods: str) -> None:
        self.asked: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        for name in methods:
            setattr(self, name, partial(self._ask, name))

    def _ask(self, name: str, *args: Any, **named: Any) -> Any:
        self.asked.append((name, args, named))
        return SimpleNamespace(to_dec_params=lambda: "receipt")


def test_up_to_0_5_21_a_request_is_cached_while_it_runs_and_inserted_at_its_end() -> None:
    cache: Any = _Calls("inc_lock_ref", "cache_unfinished_req", "insert_req", "unpin", "on_release")
    request = SimpleNamespace(last_node=7)
    lock_match(cache, request)
    insert_unfinished(cache, request, up_to=64, is_chunk=True)
    insert_finished(cache, request, up_to=90)
    release(cache, request, inserted=True)
    assert request.lock_receipt == "receipt"
    assert cache.asked == [
        ("inc_lock_ref", (7,), {}),
        ("cache_unfinished_req", (request,), {"chunked": True}),
        ("insert_req", (request,), {"up_to": 90}),
        ("unpin", (request,), {}),
        ("on_release", (request,), {"inserted": True}),
    ]


def test_later_a_request_has_checkpoints_and_a_lock_of_its_own() -> None:
    cache: Any = _Calls("lock", "checkpoint", "unlock", "on_release")
    request = SimpleNamespace(last_node=7)
    lock_match(cache, request)
    lock = request.lock
    insert_unfinished(cache, request, up_to=64, is_chunk=True)
    insert_finished(cache, request, up_to=90)
    release(cache, request, inserted=False)
    assert request.lock is None
    assert cache.asked == [
        ("lock", (7,), {}),
        ("checkpoint", (request,), {"up_to": 64}),
        ("checkpoint", (request,), {"up_to": 90}),
        ("unlock", (lock,), {}),
        ("on_release", (request,), {"checkpointed": False}),
    ]


def test_what_a_match_found_is_in_it_or_on_the_path_to_its_node() -> None:
    slots = torch.arange(10)
    cache: Any = SimpleNamespace(path_device_indices={7: slots}.get)
    assert matched_slots(cache, SimpleNamespace(device_indices=slots)) is slots  # type: ignore[arg-type]
    later: Any = SimpleNamespace(last_device_node=7, device_prefix_len=6)
    assert matched_slots(cache, later).tolist() == list(range(6))
