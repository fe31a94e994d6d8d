"""Recordings of a server, which studies and replays read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from sgl_importance.options.setting import option

TraceDetail = Literal["folds", "steps"]


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What is recorded, and where."""

    directory: str = option(
        "",
        help="directory to record requests, page scores and tree events in",
        flag="--kv-importance-trace",
        is_path=True,
        cost="scheduler time for digests and copies, a thread, disk",
    )
    detail: TraceDetail = option(
        "folds",
        help="'folds' records what is handed to the tree, 'steps' also the page scores of each emitting step",
        choices=get_args(TraceDetail),
        cost="'steps' makes recordings larger, and a first token waits for its prefill's page scores",
    )
    megabytes: int = option(
        1024,
        help="size of a recording beyond which its oldest part is deleted",
        unit="MiB",
        minimum=1,
        cost="so much disk",
    )
    pages: float = option(
        0.0,
        help="records, for every generated token, layer and KV head, which pages got the most attention, "
        "best first: this share of the context's pages; 0 records none. A selector's choices are recorded "
        "too",
        unit="share",
        minimum=0,
        maximum=1,
        whole=False,
        cost="every layer's attention weights are computed once more in each step; at 0.4, 1.6 bytes of disk "
        "for each page, layer and KV head of a step",
    )
