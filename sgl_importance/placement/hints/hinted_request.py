"""One request with hints: their effect on the nodes of its path, and its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sgl_importance.misses.account import AccountedRequest
from sgl_importance.misses.miss_documents import client_document
from sgl_importance.nodes.ghosts import Eviction
from sgl_importance.nodes.named_sessions import Session
from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.nodes.reuse_tracker import ReuseTracker
from sgl_importance.placement.hints.block_places import PromptBlocks
from sgl_importance.placement.hints.hints import ANSWER_ENDS, Hints
from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance.reuse.reuse_class import BlockType, Transition
from sgl_importance.tiers import Tier

MAX_LOST_PARTS = 8
OBSERVED = "--kv-policy observe keeps stock's evictions"
NO_HOST = "the server has no host tier"
SHARED = "others have asked for all of it"
NO_SESSION = "the request names no session_id"
NO_SELECTOR = "the server has no selector: every page is read"


@dataclass(frozen=True, slots=True)
class LostPages:
    """Pages that a request computed again although the cache had held them."""

    tokens: int
    eviction: Eviction


class HintedRequest:
    """Follows the hints of one request from its admission to its end.

    Args:
        hints: with messages located.
        prompt_tokens: length of the prompt.
        cached_tokens: tokens of it that the cache knew when the request was admitted.
        clock: serial of the request, in admitted requests.
        observe: whether hints may predict, but move nothing.
        has_session: whether it names the session that it belongs to.
        has_selector: whether the server's steps read chosen pages only, which a budget is for.
    """

    def __init__(
        self,
        hints: Hints,
        *,
        prompt_tokens: int,
        cached_tokens: int,
        clock: int,
        observe: bool,
        has_session: bool = False,
        has_selector: bool = False,
    ) -> None:
        self.hints = hints
        self.lost: list[LostPages] = []
        self.outcome: dict[str, dict[str, Any]] = {}
        self.misses: AccountedRequest | None = None
        """Why tokens of its prompt were not found; None where no account is kept."""
        self._prompt_tokens = prompt_tokens
        self._cached_tokens = cached_tokens
        self._clock = clock
        self._observe = observe
        self._blocks = PromptBlocks(hints.block_types, new_from=cached_tokens, prompt_tokens=prompt_tokens)
        if hints.prefetch:
            self.outcome["prefetch"] = {"applied": True}
        if hints.session_over:
            self.outcome["session_over"] = {"applied": has_session and not observe}
            if not has_session or observe:
                self.outcome["session_over"]["reason"] = OBSERVED if has_session else NO_SESSION
        if hints.selector is not None:
            self.outcome["selector"] = {"applied": True}
        if hints.budget is not None:
            self.outcome["budget"] = {"applied": has_selector}
            if not has_selector:
                self.outcome["budget"]["reason"] = NO_SELECTOR
        if observe:
            for name in ("retain", "drop_after_use", "demote"):
                if getattr(hints, name):
                    self.outcome[name] = {"applied": False, "reason": OBSERVED}

    @property
    def drops(self) -> bool:
        """Whether the KV that the request brings is to be evicted first."""
        return self.hints.drop_after_use and not self._observe

    @property
    def retains(self) -> bool:
        """Whether the prompt is to be pinned."""
        return self.hints.retain is not None and not self._observe

    def transition(self, observed: Transition) -> Transition:
        """The request's transition; only a hint can tell a tool's answer."""
        new = self._blocks.of(self._cached_tokens, self._prompt_tokens)
        answers_a_tool = self.hints.transition == "tool_call" or new is BlockType.TOOL_OUTPUT
        is_tool_call = answers_a_tool and observed is Transition.NEXT_TURN
        if self.hints.transition is not None:
            self.outcome["transition"] = {"applied": is_tool_call}
            if not is_tool_call:
                self.outcome["transition"]["reason"] = "no earlier request of the session is in the cache"
        return Transition.TOOL_CALL if is_tool_call else observed

    def answer_end(self, recognised: AnswerEnd) -> AnswerEnd:
        """How the answer is taken to have ended; a hint overrides what the server recognised."""
        if self.hints.answer_end is None:
            return recognised
        self.outcome["answer_end"] = {"applied": True}
        return ANSWER_ENDS[self.hints.answer_end]

    def created(self, node: NodeMetadata) -> None:
        """The request brought the node, whose earlier visits have been restored from ghosts."""
        node.expendable = self.drops and not node.accesses

    def label(self, path: Sequence[NodeMetadata], tracker: ReuseTracker) -> None:
        """Sets the block types of the nodes of the request's path."""
        if not self.hints.block_types:
            return
        tokens = 0
        for node in path:
            block_type = self._blocks.of(node.depth, node.depth + node.tokens)
            if block_type is None:
                continue
            tokens += node.tokens
            # A shared prefix was observed; any other block type was only hinted.
            if block_type is not BlockType.USER or node.continuations < 2:
                tracker.holds(node, block_type)
        self.outcome["block_types"] = {"applied": tokens > 0, "tokens": tokens}
        if not tokens:
            self.outcome["block_types"]["reason"] = "no node of the tree lies mostly in a part that was named"

    def ended(self, path: Sequence[NodeMetadata], *, finished: bool) -> None:
        """The request gave its path up.

        Args:
            path: nodes, root side first.
            finished: False at a retraction: the request itself will ask for its nodes again.
        """
        if not self.drops:
            return
        tokens = sum(node.tokens for node in path if node.expendable)
        self.outcome["drop_after_use"] = {"applied": tokens > 0, "tokens": tokens}
        if not finished:
            for node in path:
                node.expendable = False

    def demote(self, path: Sequence[NodeMetadata], session: Session | None, *, has_host: bool) -> None:
        """The request has ended: what of its path is its own, or its session's, may leave first."""
        if not self.hints.demote or self._observe:
            return
        own = [node for node in path if (node.session is session if session else not node.accesses)]
        if not has_host or not own:
            self.outcome["demote"] = {"applied": False, "reason": SHARED if has_host else NO_HOST}
            return
        for node in own:
            node.is_demoted = True
        self.outcome["demote"] = {"applied": True, "tokens": sum(node.tokens for node in own)}

    def report(self, hit_tokens: Mapping[Tier, int]) -> dict[str, Any]:
        """The report of a request that asked for one.

        Args:
            hit_tokens: prompt tokens found, by the tier that held them.
        """
        parts: dict[Eviction, int] = {}
        for pages in self.lost:
            parts[pages.eviction] = parts.get(pages.eviction, 0) + pages.tokens
        largest = sorted(parts.items(), key=lambda part: -part[1])[:MAX_LOST_PARTS]
        return {
            "prompt_tokens": self._prompt_tokens,
            **({} if self.misses is None else client_document(self.misses)),
            "hit_tokens": {tier.value: hit_tokens[tier] for tier in Tier},
            "lost_tokens": sum(parts.values()),
            "lost": [
                {
                    "tokens": tokens,
                    "tier": eviction.tier.value,
                    "reason": eviction.reason.value,
                    "requests_ago": self._clock - eviction.clock,
                    "loss": eviction.loss,
                }
                for eviction, tokens in largest
            ],
            "hints": self.outcome,
        }
