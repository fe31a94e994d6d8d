"""A scheduler that reports ready must prove that our parts are live in it; test_launch.py has real ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_importance.launch.launcher import PROOF_KEY, _check_proofs
from sglang_importance.upstream.refusal import LaunchRefused

LIVE = {PROOF_KEY: {"cache": True, "hooks": True}}


def launched(*infos: dict[str, Any]) -> tuple[Any, ...]:
    """What upstream's launch returns, as far as it is looked at."""
    return (None, SimpleNamespace(scheduler_infos=list(infos)))


def test_schedulers_whose_parts_are_all_live_serve() -> None:
    _check_proofs(launched(LIVE, LIVE))


@pytest.mark.parametrize(
    "infos",
    [(), ({},), (LIVE, {}), ({PROOF_KEY: {"cache": True, "hooks": False}},)],
    ids=["no scheduler", "no proof", "one without proof", "a dead part"],
)
def test_others_are_refused(infos: tuple[dict[str, Any], ...]) -> None:
    with pytest.raises(LaunchRefused, match="without proof that importance is live"):
        _check_proofs(launched(*infos))
