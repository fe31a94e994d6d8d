"""The data-parallel replicas of a server, each with a tree of its own."""

from __future__ import annotations

from sglang.srt.runtime_context import get_parallel


def data_parallel_rank() -> int:
    """Of the replica that this scheduler belongs to."""
    parallel = get_parallel()
    if parallel.enable_dp_attention:
        return int(parallel.attn_dp_rank)
    return int(parallel.dp_rank or 0)
