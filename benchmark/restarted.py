"""A shadow of a server that starts again, with all or part of what it had learnt."""

from __future__ import annotations

from sgl_importance.observe.shadow.shadow_cache import ShadowCache
from sgl_importance.observe.shadow.shadow_ranking import ImportanceRanking
from sgl_importance.reuse.conversations import Conversations
from sgl_importance.reuse.turns import TurnEstimator

NO_TURNS, TABLES, ALL = "no turns kept", "tables kept", "all kept"
"""No turns are what a ledger keeps: nodes, and the life tables of their classes."""


class RestartedRanking(ImportanceRanking):
    """Of a server that starts with a ledger."""

    def forget_turns(self, keep_tables: bool) -> None:
        """What the ledger does not keep is gone. Called when nothing is in the pool."""
        for ghost, _ in self._tracker.ghosts._pages.values():
            ghost.turn = None
        turns = self.policy.turns
        if keep_tables:
            turns.forget_open()
        else:  # as new, in the place that the policy knows
            vars(turns).update(vars(TurnEstimator()))
            self._turns._knows_ends, self._turns._conversations = False, Conversations()


def restart(cache: ShadowCache, arm: str) -> None:
    """Empties the pool into ghosts, which the ledger brings back, and forgets what the arm does not keep."""
    cache.evict(cache.used)
    assert cache.used == 0, "a request is running"
    if arm in (NO_TURNS, TABLES):
        assert isinstance(cache.ranking, RestartedRanking)
        cache.ranking.forget_turns(keep_tables=arm == TABLES)
