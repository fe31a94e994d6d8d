"""The roofline says what its audit said by hand, and bytes count as they should."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark" / "kernels"))

from roofline import DEVICES, LLAMA_8B, predicted

AUDITED = {
    (32768, 1): (5.5, 4.6),
    (32768, 16): (21.3, 6.3),
    (131072, 1): (8.6, 4.9),
    (131072, 16): (29.7, 12.0),
}
RATES = {"budget": 0.05, "missing": 0.1, "launches_per_layer": 168.0}


@pytest.mark.parametrize("shape", AUDITED)
def test_the_table_of_the_audit(shape: tuple[int, int]) -> None:
    context, batch = shape
    row = predicted(DEVICES["H200"], LLAMA_8B, context, batch, "rep", **RATES)
    dense, floor = AUDITED[shape]
    assert row["dense_ms"] == pytest.approx(dense, rel=0.03)
    assert row["floor_ms"] == pytest.approx(floor, rel=0.03)
    assert row["eager_ms"] > row["captured_ms"] > row["floor_ms"]
    assert row["waited_ms"] == pytest.approx(row["floor_ms"] + 32 * 168 * 1.5e-3 + row["link_ms"]), (
        "copies in front of the attention that reads them"
    )


def test_what_reads_everything_is_dense_and_what_does_not_fit_is_not_served() -> None:
    rates = {**RATES, "launches_per_layer": 0.0, "missing": 0.0}
    row = predicted(DEVICES["H200"], LLAMA_8B, 32768, 4, "all", **rates)
    assert row["floor_times_dense"] == pytest.approx(1.0)
    assert predicted(DEVICES["H200"], LLAMA_8B, 131072, 16, "rep", **rates)["dense_requests"] == 6
