"""Page scores over tensor-parallel ranks: integer sums, in a real gloo world of two processes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sglang_importance.attention.rank_sums import MAX_RANKS, SCALE, from_fixed, share, to_fixed
from sglang_importance.attention.rows import ScoreRows

from support.two_ranks import printed_by_ranks

means = hnp.arrays(np.float32, st.integers(1, 20), elements=st.floats(0, 1, width=32))


@given(values=means, ranks=st.integers(1, MAX_RANKS))
def test_a_mean_over_equal_ranks_is_the_value_itself(values: np.ndarray, ranks: int) -> None:
    total = sum(to_fixed(values).astype(np.int64) for _ in range(ranks))
    assert total.max() <= np.iinfo(np.int32).max
    np.testing.assert_allclose(from_fixed(total, ranks), values, atol=0.5 / SCALE)


def test_the_bound_on_ranks_is_exact() -> None:
    full = int(to_fixed(np.ones(1))[0])
    assert full * MAX_RANKS <= np.iinfo(np.int32).max < full * (MAX_RANKS + 1)


def test_numbers_outside_are_cut_off() -> None:
    assert to_fixed(np.array([-1e-9, 1.02])).tolist() == [0, SCALE]


RANK = """
    import json, os, sys
    import numpy as np
    import torch.distributed as dist
    from sglang_importance.attention.rank_sums import RankSums
    from sglang_importance.attention.rows import RowScores, ScoresFailed

    rank, store = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
    sums = RankSums(dist.group.WORLD)
    random = np.random.default_rng(rank)

    def row(pages, tokens=7):
        body = random.dirichlet(np.ones(pages)).astype(np.float32) * np.float32(tokens)
        peak = random.random(pages).astype(np.float32)
        return RowScores(body=body, peak=peak, query_tokens=tokens)

    own = row(50)
    got = sums.reduced(own, False)
    try:
        sums.reduced(row(50 + rank), False)
        error = None
    except ScoresFailed as caught:
        error = str(caught)
    nothing = sums.reduced(None, False)
    try:
        sums.reduced(None if rank else row(50), rank == 1)
        failure = None
    except ScoresFailed as caught:
        failure = str(caught)

    def spoilt(name, value):
        scores = row(50)
        getattr(scores, name)[3] = value
        return scores

    one_rank_s = [sums.reduced(spoilt("peak", np.nan) if rank == 0 else row(50), False)]
    one_rank_s.append(sums.reduced(spoilt("body", np.inf) if rank == 1 else row(50), False))
    every_rank_s = sums.reduced(spoilt("body", np.nan), False)
    after = sums.reduced(row(50), False)
    names = ("body", "peak")
    print(json.dumps({
        "bits": {name: getattr(got, name).view(np.int32).tolist() for name in names},
        "own": {name: getattr(own, name).tolist() for name in names},
        "error": error,
        "nothing": nothing,
        "failure": failure,
        "not_finite": [*one_rank_s, every_rank_s],
        "after": after.body.view(np.int32).tolist(),
    }))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an ordinary exit
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    outputs = printed_by_ranks(RANK, tmp_path_factory.mktemp("gloo"))
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def test_both_ranks_get_the_same_bits_and_the_mean_of_both(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    assert first["bits"] == second["bits"]
    own = [{name: np.array(values) for name, values in rank["own"].items()} for rank in ranks]
    got = {name: np.array(bits, dtype=np.int32).view(np.float32) for name, bits in first["bits"].items()}
    np.testing.assert_allclose(got["body"], (own[0]["body"] + own[1]["body"]) / 2, atol=1e-6)
    assert not np.allclose(got["body"], own[0]["body"], atol=1e-3)
    np.testing.assert_allclose(got["peak"], np.maximum(own[0]["peak"], own[1]["peak"]), atol=1e-7)


def test_ranks_that_hold_other_pages_say_so_on_both(ranks: list[dict[str, Any]]) -> None:
    (error,) = {rank["error"] for rank in ranks}
    assert error == "tensor-parallel ranks hold between 50 and 51 pages of 7 to 7 query tokens of one request"


def test_a_rank_that_failed_is_told_of_on_both(ranks: list[dict[str, Any]]) -> None:
    assert [rank["nothing"] for rank in ranks] == [None, None]
    assert {rank["failure"] for rank in ranks} == {"a tensor-parallel rank could not take its page scores"}


def test_scores_that_are_not_finite_are_left_out_on_both(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    assert first["not_finite"] == second["not_finite"] == [None, None, None]
    assert first["after"] == second["after"]
    assert np.isfinite(np.array(first["after"], dtype=np.int32).view(np.float32)).all()


def test_one_rank_needs_no_sums() -> None:
    rows = ScoreRows(page_size=4, num_slots=2, max_context_tokens=16)
    share(rows, None)
    assert rows.over_ranks is None
    share(None, None)
