"""Classes of nodes whose reuse is predicted alike: by how the last answer ended, block type, transition and
visit level."""

from __future__ import annotations

from bisect import bisect_right
from enum import IntEnum

from sgl_importance.reuse.answer_end import AnswerEnd


class BlockType(IntEnum):
    """The kind of text that a node holds."""

    USER = 0
    """Prompt text of one session: a user's words or a document."""
    SHARED_PREFIX = 1
    """Prompt text that several continuations followed."""
    TOOL_OUTPUT = 2
    """Prompt text that a tool produced. Only hints say so."""
    GENERATED = 3
    """Text of the model."""
    PARTIAL = 4
    """A block that its prompt filled only in part: only the same prompt can hit it. A server whose cache
    keeps whole pages has none."""


class Transition(IntEnum):
    """The relation of a node's last visitor to the text that was in the tree before it."""

    COLD = 0
    """Nothing of the prompt was known."""
    NEW_SESSION = 1
    """It left the known text where others had left it before: a new session on a shared prefix."""
    BRANCH = 2
    """It left the known text inside that of one session: an edit, a retry, or a prefix's second user."""
    NEXT_TURN = 3
    """It went on where an earlier request had ended."""
    TOOL_CALL = 4
    """As NEXT_TURN, with a tool's answer. Only hints say so."""


VISIT_STARTS = (1, 2, 4, 8)
"""First number of visits of each level but the lowest; the last of them is divided further."""
GAP_STARTS = (4, 16, 64, 256, 1024)
"""First mean number of requests between visits of each division of the last level, but the lowest. Eight
visits give the rate of a node; further ones add little."""
NUM_VISIT_LEVELS = len(VISIT_STARTS) + 1 + len(GAP_STARTS)
NUM_COUNTED_LEVELS = len(VISIT_STARTS)
"""Levels below this one count visits; the others are told apart by the gaps between them."""
NUM_TRANSITIONS = len(Transition)  # len() of an enumeration takes longer than the rest of ``reuse_class``
CLASSES_OF_END = len(BlockType) * NUM_TRANSITIONS * NUM_VISIT_LEVELS
"""Classes of one end; those of UNKNOWN come first, so their numbers do not depend on the other ends."""
NUM_CLASSES = len(AnswerEnd) * CLASSES_OF_END


def visit_level(accesses: int, span: int) -> int:
    """Level of a node by number and spacing of its visits, in [0, NUM_VISIT_LEVELS).

    Args:
        accesses: admitted requests that found it in the cache, or would have found it.
        span: admitted requests between its first visit and its last.
    """
    level = bisect_right(VISIT_STARTS, accesses)
    return level if level < len(VISIT_STARTS) else level + bisect_right(GAP_STARTS, span / accesses)


def reuse_class(
    block_type: BlockType, transition: Transition, level: int, answer_end: AnswerEnd = AnswerEnd.UNKNOWN
) -> int:
    """Number of the class whose history predicts a node, in [0, NUM_CLASSES).

    Args:
        block_type: of the node.
        transition: of the last request that visited it.
        level: its ``visit_level``.
        answer_end: of the last answer on its path. A prefix that sessions share returns whatever became of
            one of them: there it does not count.
    """
    number = (block_type * NUM_TRANSITIONS + transition) * NUM_VISIT_LEVELS + level
    return number if block_type is BlockType.SHARED_PREFIX else answer_end * CLASSES_OF_END + number


def transition_of(reuse_class: int) -> Transition:
    """The transition that a class number was made of."""
    return Transition(reuse_class // NUM_VISIT_LEVELS % NUM_TRANSITIONS)


def answer_end_of(reuse_class: int) -> AnswerEnd:
    """The end that a class number was made of."""
    return AnswerEnd(reuse_class // CLASSES_OF_END)
