"""Hands the page scores of a request to the nodes of its path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

from sgl_importance.metrics_table import FaultPlace
from sgl_importance.signal.fold import Observation, QueryFolds, fold
from sglang_importance.attention.rows import Phase, ScoreRows
from sglang_importance.observe.recorder import Recorder
from sglang_importance.tree.state import TreeState


@dataclass(frozen=True)
class Folding:
    """Takes the page scores of a request out of its rows and folds them into nodes.

    Args:
        state: whose nodes they are folded into.
        rows: the score rows; None where no attention backend emits.
        recorder: records each fold; None records nothing.
    """

    state: TreeState
    rows: ScoreRows | None
    recorder: Recorder | None

    def fold(
        self,
        req: Req,
        query: QueryFolds,
        path: Sequence[UnifiedTreeNode],
        slot: int | None,
        *,
        is_finished: bool,
    ) -> bool:
        """Folds the scores of the request's rows into the nodes of its path, root side first; whether any.

        Args:
            slot: the request's slot, which it may have given back; None where it had none.
        """
        before = self.state.counters.folds
        observations = self._take_observations(req, slot, is_finished=is_finished)
        for i, observation in enumerate(observations):
            first = query.is_first
            weight = query.take(last=is_finished and req.finished() and i == len(observations) - 1)
            if weight <= 0:
                break
            fold(
                [self.state.tree.metadata(node).importance for node in path],
                observation,
                query=query.serial,
                weight=weight,
                first=first,
                half_life_queries=self.state.options.signal.half_life_queries,
            )
            if self.recorder is not None:
                self.state.faults.beside(
                    FaultPlace.RECORDING,
                    self.recorder.folded,
                    req,
                    observation,
                    query=query.serial,
                    clock=self.state.policy.clock,
                    weight=weight,
                    first=first,
                )
            self.state.counters.folds += 1
        return self.state.counters.folds > before

    def _take_observations(self, req: Req, slot: int | None, *, is_finished: bool) -> list[Observation]:
        """Takes the observations out of the request's rows, prefill before decode."""
        rows = self.rows
        if rows is None or slot is None:
            return []
        # At the end of a prefill a first token waits: scores still to be computed are folded at the finish.
        # The path of the request is locked against eviction until then.
        taken = [rows.consume(slot, Phase.PREFILL, owner=req.rid, compute=is_finished)]
        if is_finished:
            decode = rows.consume(slot, Phase.DECODE, owner=req.rid)
            # Under overlap scheduling a step runs behind the last token; it is all that a request of one
            # token has decoded, and no part of its answer.
            if len(req.output_ids) > 1:
                taken.append(decode)
        observations = (Observation.from_sums(scores.body, scores.peak) for scores in taken if scores)
        return [observation for observation in observations if observation is not None]
