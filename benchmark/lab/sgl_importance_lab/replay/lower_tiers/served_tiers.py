"""A trace through a shadow cache of device and host, which handles whole nodes as a server does.

One request at a time, as in ``replay.served_nodes``.
"""

from __future__ import annotations

import numpy as np

from sgl_importance.nodes.ghosts import ghost_pages_of
from sgl_importance.observe.shadow.shadow_ranking import ImportanceRanking, LruShadowRanking
from sgl_importance.observe.shadow.tiered_shadow import HostWrites, TieredShadowCache
from sgl_importance.policy.cost_model import CostModel
from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance_lab.replay.lower_tiers.tiered_replay import TierCounts, TieredCounts
from sgl_importance_lab.replay.lower_tiers.tiered_setup import TieredSetup
from sgl_importance_lab.replay.policy_registry import IMPORTANCE
from sgl_importance_lab.replay.served_nodes import ServedPages
from sgl_importance_lab.replay.trace import Trace

_NEXT_TO_NOTHING = (
    1e-15  # seconds per pair of tokens: as in ``TieredSetup``, a token costs what any other does
)


def replay_served_tiers(trace: Trace, setup: TieredSetup) -> TieredCounts:
    """Replays all requests; one that is longer than the device's pool is refused, and counts nowhere."""
    assert trace.parents is not None, "independent objects have no prefix tree"
    device, host = setup.sizes
    tokens = trace.block_tokens
    cost = CostModel(
        prefill_seconds_per_token=1 / setup.prefill_tokens_per_second,
        prefill_seconds_per_token_pair=_NEXT_TO_NOTHING,
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
    ttft = np.zeros(trace.num_requests)
    found = recomputed = 0
    for index in range(trace.num_requests):
        prompt_tokens, loaded = int(trace.input_tokens[index]), cache.loaded
        hits = cache.admit(str(index), served.prompt(index), prompt_tokens)
        if hits is None:
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
        ttft[index] = (
            loaded_bytes / host.bytes_per_second + (prompt_tokens - hits) / setup.prefill_tokens_per_second
        )
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
        ttft,
    )
