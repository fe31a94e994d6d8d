"""The state that the parts around one radix tree share."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.policy.marginal_loss import ImportancePolicy
from sglang_importance.metrics.scheduler_counters import Counters
from sglang_importance.tree.annotated_tree import AnnotatedTree
from sglang_importance.tree.event_log import EventLog
from sglang_importance.tree.faults import Faults
from sglang_importance.tree.ranks import Ranks


@dataclass(frozen=True, slots=True)
class TreeState:
    """One tree, the facts of its nodes, and the policy that learns from them.

    Attributes:
        options: of the operator.
        policy: ranks nodes; its clock dates everything.
        counters: of tokens, nodes and events so far.
        tree: facts on nodes, and ghosts of those that left.
        events: the last moves of nodes.
        faults: runs code that may fail.
        ranks: that hold the tree together.
    """

    options: ImportanceOptions
    policy: ImportancePolicy
    counters: Counters
    tree: AnnotatedTree
    events: EventLog
    faults: Faults
    ranks: Ranks

    @classmethod
    def create(
        cls,
        options: ImportanceOptions,
        policy: ImportancePolicy,
        *,
        page_size: int,
        ghost_pages: int,
        ranks: Ranks | None = None,
    ) -> TreeState:
        """The state of a tree that is still to be built.

        Args:
            page_size: tokens per page.
            ghost_pages: pages to remember after their removal.
            ranks: that hold the tree together; None of one that is alone.
        """

        def clock() -> int:
            return policy.clock

        counters = Counters()
        return cls(
            options=options,
            policy=policy,
            counters=counters,
            tree=AnnotatedTree(page_size, policy, counters, ghost_pages=ghost_pages),
            events=EventLog(clock),
            faults=Faults(counters.faults, clock),
            ranks=ranks or Ranks(),
        )
