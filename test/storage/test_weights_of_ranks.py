"""Weights of several ranks: KV of each comes of the shards of all, so all change their identity at once."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import sglang  # noqa: F401  # first: with it come the shims
import torch
import torch.distributed as dist

from sglang_importance.storage import weights
from sglang_importance.storage.guards import _around_weight_change
from sglang_importance.storage.weights import WATCH, WeightsWatch, fingerprint

from support.two_ranks import printed_by_ranks

RANK = """
    import json, sys
    from types import SimpleNamespace
    import sglang
    import torch
    import torch.distributed as dist
    from sglang_importance.storage import guards, weights

    rank, store = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
    weights._weight_version = lambda: "1"
    weights._nothing_is_cached = lambda scheduler: False
    weights.config_digest = lambda config: "c"
    model = torch.nn.Linear(2, 2)
    for tensor in model.parameters():
        torch.nn.init.constant_(tensor, rank)
    runner = SimpleNamespace(model=model, kv_cache_dtype=torch.float32, model_config=None)
    scheduler = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=runner), tp_cpu_group=dist.group.WORLD
    )
    watch = guards.WATCH
    watch.watch(scheduler)
    told = []

    def tell():
        told.append((watch.current.fingerprint, watch.current.pages_match, watch.counters["weight_updates"]))

    def update(manager, value):
        if rank == 1 and value is not None:
            torch.nn.init.constant_(model.weight, value)

    tell()
    for value in (None, 7.0, 1.0):
        guards._around_weight_change(update, SimpleNamespace(_session=None), value)
        tell()
    print(json.dumps(told))
"""


def test_a_shard_that_changes_on_one_rank_is_other_weights_on_all(tmp_path: Path) -> None:
    """Also an update that only one rank takes; one that none takes changes nothing."""
    first, second = map(json.loads, printed_by_ranks(RANK, tmp_path))
    assert first == second
    loaded, refused, changed, back = first
    assert refused == loaded
    assert changed[0] != loaded[0]
    assert changed[1:] == [False, 1]
    assert back == [loaded[0], False, 2]


@pytest.fixture
def alone(tmp_path: Path) -> dist.ProcessGroup:
    return dist.ProcessGroupGloo(dist.FileStore(str(tmp_path / "store"), 1), 0, 1)


def test_a_rank_that_is_alone_keeps_its_own_fingerprint(
    monkeypatch: pytest.MonkeyPatch, alone: dist.ProcessGroup
) -> None:
    """Or every store of one rank would begin anew."""
    monkeypatch.setattr(dist, "get_world_size", lambda group: group.size())
    monkeypatch.setattr(weights, "_weight_version", lambda: "1")
    monkeypatch.setattr(weights, "config_digest", lambda config: "c")
    model = torch.nn.Linear(2, 2)
    runner = SimpleNamespace(model=model, kv_cache_dtype=torch.float32, model_config=None)
    watch = WeightsWatch()
    worker = SimpleNamespace(model_runner=runner)
    watch.watch(SimpleNamespace(tp_worker=worker, tp_cpu_group=alone))  # type: ignore[arg-type]
    assert watch.current is not None
    assert watch.current.fingerprint == fingerprint(model)


@pytest.mark.usefixtures("watch")
def test_an_update_that_raises_asks_no_other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have raised on one rank only: the others would wait for it, or it for them."""

    def fail(manager: object) -> None:
        raise OSError("gone")

    monkeypatch.setattr(WATCH, "_read", lambda: pytest.fail("the ranks were asked"))
    with pytest.raises(OSError, match="gone"):
        _around_weight_change(fail, SimpleNamespace(_session=None))
    assert WATCH.current is None
