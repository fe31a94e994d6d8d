"""A trace through a shadow cache of device and host, which handles whole nodes as a server does.

One request at a time, as in ``replay.served_nodes``.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sgl_importance.nodes.ghosts import ghost_pages_of
from sgl_importance.observe.shadow.shadow_ranking import ImportanceRanking, LruShadowRanking
from sgl_importance.observe.shadow.tiered_shadow import HostWrites, TieredShadowCache
from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance_lab.replay.importance_replay import UNIFORM_COST
from sgl_importance_lab.replay.lower_tiers.tiered_replay import TierCounts, TieredCounts
from sgl_importance_lab.replay.lower_tiers.tiered_setup import TieredSetup
from sgl_importance_lab.replay.policy_registry import IMPORTANCE
from sgl_importance_lab.replay.served_nodes import ServedPages
from sgl_importance_lab.replay.trace import Trace


def replay_served_tiers(trace: Trace, setup: TieredSetup) -> TieredCounts:
    """Replays all requests; one that is longer than the device's pool is refused."""
    assert trace.parents is not None, "independent objects have no prefix tree"
    device, host = setup.sizes
    tokens = trace.block_tokens
    cost = replace(
        UNIFORM_COST,
        prefill_seconds_per_token=1 / setup.prefill_tokens_per_second,
        bytes_per_token=setup.bytes_per_token,
        host_bytes_per_second=host.bytes_per_second,
        storage_bytes_per_second=host.bytes_per_second,
    )
    is_importance = device.policy == IMPORTANCE
    ghosts = ghost_pages_of(device.capacity)
    cache = TieredShadowCache(
        device.capacity,
        host.capacity,
        tokens,
        ImportanceRanking(cost, tokens, ghosts) if is_importance else LruShadowRanking(),
        HostWrites.of(setup.write_policy),
        spare_pages=int(tokens > 1),
        chunk_tokens=setup.chunk_tokens,
    )
    served = ServedPages(trace)
    ttft: list[float] = []
    found = recomputed = refused = refused_blocks = refused_tokens = 0
    for index in range(trace.num_requests):
        prompt_tokens, loaded = int(trace.input_tokens[index]), cache.loaded
        hits = cache.admit(str(index), served.prompt(index), prompt_tokens)
        if hits is None:
            refused += 1
            refused_blocks += int(trace.offsets[index + 1] - trace.offsets[index])
            refused_tokens += prompt_tokens
            continue
        cache.finish(
            str(index),
            served.with_answer(index),
            served.tokens(index),
            AnswerEnd(int(trace.answer_ends[index])),
        )
        found += hits
        recomputed += prompt_tokens - hits
        loaded_bytes = (cache.loaded - loaded) * tokens * setup.bytes_per_token
        computing = (prompt_tokens - hits) / setup.prefill_tokens_per_second
        ttft.append(loaded_bytes / host.bytes_per_second + computing)
    on_host = cache.loaded
    on_device = found // tokens - on_host
    return TieredCounts(
        (
            TierCounts(device.tier, device.capacity, device.policy, on_device, on_device * tokens, 0, 0),
            TierCounts(
                host.tier,
                host.capacity,
                host.policy,
                on_host,
                on_host * tokens,
                on_host * tokens * setup.bytes_per_token,
                cache.written * tokens * setup.bytes_per_token,
            ),
        ),
        recomputed,
        np.array(ttft),
        refused,
        refused_blocks,
        refused_tokens,
    )
