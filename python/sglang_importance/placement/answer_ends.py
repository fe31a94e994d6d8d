"""How answers ended: by their tokens at once, or when the HTTP process has parsed their text."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sgl_importance.reuse.answer_end import MAX_AWAITED, AnswerEnd, AnswerMarkers
from sgl_importance.reuse.turns import Turn
from sglang_importance.tree.annotated_tree import AnnotatedTree
from sglang_importance.upstream.nodes import NodeId

if TYPE_CHECKING:
    from sglang.srt.function_call.base_format_detector import BaseFormatDetector
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

logger = logging.getLogger(__name__)

AFTER_A_MARKER = ("", "\n", "[", " [")
"""What parsers want to see behind the token of a marker, beside the token."""
CALLS_WITHOUT_A_MARKER = (
    '{"name": "look", "parameters": {}}',
    '[{"name": "look", "parameters": {}}]',
    '[look(at="it")]',
)


class AnswerEnds:
    """Finds out how the answers of a server with tools ended.

    Args:
        markers: of the model and its parser.
        tree: whose nodes learn what the HTTP process tells.
        refresh: ranks a node anew.
    """

    def __init__(
        self, markers: AnswerMarkers, tree: AnnotatedTree, refresh: Callable[[UnifiedTreeNode], None]
    ) -> None:
        self._markers = markers
        self._tree = tree
        self._refresh = refresh
        self._awaited: OrderedDict[str, tuple[NodeId | None, int, Turn | None]] = OrderedDict()

    def of(self, req: Req) -> AnswerEnd:
        """How the answer of a finished request ended, by its tokens."""
        assert req.finished_reason is not None
        return self._markers.end_of(
            req.finished_reason.to_json()["type"],
            req.output_ids_through_stop,
            is_json=req.sampling_params.json_schema is not None,
        )

    def await_end(self, rid: str, end: NodeId | None, clock: int, turn: Turn | None) -> None:
        """The tokens did not say how the answer ended.

        Args:
            rid: of the request.
            end: the last node of its path.
            clock: of its end, in admitted requests.
            turn: that it became.
        """
        self._awaited[rid] = end, clock, turn
        if len(self._awaited) > MAX_AWAITED:
            self._awaited.popitem(last=False)

    def reset(self) -> None:
        """The tree was emptied; its numbers of nodes begin anew."""
        self._awaited.clear()

    def told(self, rid: str, answer_end: AnswerEnd) -> bool:
        """The HTTP process has parsed the answer. Nodes that were visited since then keep what they have.

        Returns:
            Whether nothing had said before how it ended.
        """
        if (awaited := self._awaited.pop(rid, None)) is None:
            return False
        end, clock, turn = awaited
        path = self._tree.path_to(end)
        untouched = [node for node in path if self._tree.metadata(node).last_access <= clock]
        self._tree.tracker.answered([self._tree.metadata(node) for node in untouched], answer_end)
        self._tree.turns.told(turn, answer_end)
        for node in untouched:
            self._refresh(node)
        return True


def answer_markers(parser: str | None, tokenizer: Any) -> AnswerMarkers | None:
    """The markers that can be seen in generated tokens; None where the server parses no calls of tools.

    Args:
        parser: ``--tool-call-parser``.
        tokenizer: of the served model; None where the server has none.
    """
    if parser is None or tokenizer is None:
        return None
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    try:
        detector = FunctionCallParser(tools=[], tool_call_parser=parser, tokenizer=tokenizer).detector
    except ValueError as error:  # 0.5.23: response_template, where the tokenizer has no template
        logger.info("KV importance: no call of --tool-call-parser %s is recognised: %s", parser, error)
        return None
    # Tokenizers that are not of transformers do not say which of their tokens are added ones.
    added = tokenizer.get_added_vocab() if hasattr(tokenizer, "get_added_vocab") else {}
    markers = find_markers(detector, added)
    how = "every call" if markers.mark_every_call else "calls" if markers.tool_call_ids else "no call"
    logger.info("KV importance: %s of --tool-call-parser %s is recognised by its tokens", how, parser)
    return markers


def find_markers(detector: BaseFormatDetector, added_tokens: Mapping[str, int]) -> AnswerMarkers:
    """Asks a parser which tokens it takes for a call.

    Args:
        detector: of a format of calls.
        added_tokens: ids of tokens beside those of the text, which no text is made of by chance.
    """
    if detector.has_tool_call(""):  # it takes all text for calls
        return AnswerMarkers(frozenset(), mark_every_call=False)
    ids = frozenset(
        token_id
        for token, token_id in added_tokens.items()
        if any(detector.has_tool_call(token + after) for after in AFTER_A_MARKER)
    )
    if not ids:  # a call that begins with several tokens, or with text: its last one may do
        last = added_tokens.get(detector.eot_token.strip())
        ids = frozenset() if last is None else frozenset({last})
    unmarked = any(map(detector.has_tool_call, CALLS_WITHOUT_A_MARKER))
    return AnswerMarkers(ids, mark_every_call=bool(ids) and not unmarked)
