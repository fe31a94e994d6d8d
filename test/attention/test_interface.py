"""The signal between attention and memory checks itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sgl_importance.interface import BlockImportance, Importance, ImportanceSource, SignalKind


def vector(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


EXACT = BlockImportance(
    mass=vector(0.5, 0.25, 0.25),
    body_mass=vector(0.0, 1.0, 0.0),
    peak=vector(0.9, 0.5, 0.3),
    page_size=16,
    query_tokens=4,
)


def test_a_sound_signal_passes() -> None:
    EXACT.check_integrity()
    replace(EXACT, body_mass=vector(0, 0, 0)).check_integrity()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mass": vector(0.5, 0.25, 0.5)}, "mass sums to 1.25"),
        ({"body_mass": vector(0.5, 0.5, 0.5)}, "body mass sums to 1.5"),
        ({"peak": vector(0.5, 0.5)}, "peak: shape"),
        ({"peak": vector(0.5, 0.5, 1.5)}, "peak 1.5"),
        ({"mass": vector(1.5, -0.5, 0.0)}, "mass: negative"),
        ({"peak": vector(0.5, float("nan"), 0.5)}, "peak: not finite"),
        ({"body_mass": np.zeros(3)}, "float64, not float32"),
        ({"query_tokens": 0}, "query_tokens 0"),
    ],
)
def test_an_unsound_signal_is_told(change: dict[str, object], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        replace(EXACT, **change).check_integrity()


def test_a_proxy_need_not_add_up_but_must_be_finite() -> None:
    proxy = replace(EXACT, kind=SignalKind.PROXY, mass=vector(7, 0, 3), peak=vector(7, 0, 3))
    proxy.check_integrity()
    with pytest.raises(AssertionError, match="not finite"):
        replace(proxy, mass=vector(7, float("inf"), 3)).check_integrity()


def test_a_source_is_recognised_by_its_shape() -> None:
    class Known:
        def get_importance(self, key: bytes) -> Importance | None:
            return None

    assert isinstance(Known(), ImportanceSource)
    assert not isinstance(object(), ImportanceSource)
