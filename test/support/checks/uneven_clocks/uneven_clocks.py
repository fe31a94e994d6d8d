"""A plugin in whose schedulers time is another on each rank: rank 1 is an hour ahead, rank 2 two, and so on.

Found by sglang through the folder's dist-info, where PYTHONPATH names the folder; no part of the package.
"""

from __future__ import annotations

import multiprocessing

HOUR = 3600.0


def register() -> None:
    if multiprocessing.parent_process() is None:
        return
    from sgl_importance.placement.ledger import steady_time

    now = steady_time.steady_time

    def uneven() -> float:
        from sglang.srt.runtime_context import get_parallel

        return now() + HOUR * get_parallel().tp_rank

    steady_time.steady_time = uneven
