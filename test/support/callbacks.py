"""What upstream calls of ours and may fail, each with the call to fail at."""

from __future__ import annotations

from sgl_importance.placement.hints.hinted_request import HintedRequest
from sglang_importance.cache.admissions import Admissions
from sglang_importance.cache.component import ImportanceComponent
from sglang_importance.cache.node_events import NodeEvents
from sglang_importance.cache.request_flow import RequestFlow
from sglang_importance.metrics.publisher import MetricsPublisher
from sglang_importance.observe.recorder import Recorder
from sglang_importance.placement.backup_filter import BackupFilter
from sglang_importance.placement.hint_follower import HintFollower
from sglang_importance.placement.pinning import Pinning
from sglang_importance.tree.eviction import MarginalLossOrder, RankedLeaves, StockOrder
from sglang_importance.tree.folding import Folding

Callback = tuple[type, str, int]
"""Class, method, and a call that comes when there is something in the tree already."""

LEARNING: list[Callback] = [
    (RequestFlow, "inserting", 20),
    (Admissions, "admit", 9),
    (RequestFlow, "inserted", 20),
    (RequestFlow, "cached", 20),
    (RequestFlow, "_learn", 9),
    (Folding, "fold", 9),
    (HintFollower, "admitted", 9),
    (Pinning, "settle", 9),
    (Pinning, "taken_in", 9),
    (NodeEvents, "split", 2),
    (NodeEvents, "removed", 2),
    (NodeEvents, "transferred", 2),
    (NodeEvents, "evicted", 2),
    (RankedLeaves, "enter_device", 20),
    (RankedLeaves, "_leave_device", 20),
    (RankedLeaves, "_enter_host", 2),
    (RankedLeaves, "_leave_host", 2),
    (MarginalLossOrder, "begin", 2),
    (MarginalLossOrder, "device_victim", 2),
    (MarginalLossOrder, "host_victim", 1),
    (MarginalLossOrder, "end", 2),
    (BackupFilter, "_copies_to_host", 2),
]
"""Under ``importance``; the first fault ends learning."""
WITH_STORAGE: list[Callback] = [
    (NodeEvents, "handed_to_storage", 2),
    (NodeEvents, "storage_ended", 2),
    (NodeEvents, "prefetched", 2),
]
"""The same where there is a storage tier; the last wants one that holds something."""
ON_FLUSH: list[Callback] = [(ImportanceComponent, "_watch_tree", 1)]
"""The same when the cache is flushed."""
OBSERVING: list[Callback] = [
    (StockOrder, "begin", 2),
    (StockOrder, "device_victim", 2),
    (StockOrder, "end", 2),
]
"""Under ``observe``; the first fault ends learning."""
RECORDING: list[Callback] = [(Recorder, method, 9) for method in ("event", "admitted", "folded", "finished")]
"""Where a recording is made; a fault costs what was to be recorded."""
BESIDE: list[Callback] = [(HintedRequest, "report", 2), (MetricsPublisher, "publish", 2)]
"""Always; a fault costs the one report, or the one update of the metrics."""


def name_of(owner: type, method: str) -> str:
    return f"{owner.__name__}.{method}"
