"""Classes of nodes whose reuse is predicted alike: by what a node holds, how its last visitor got there, and
how well known it is."""

from __future__ import annotations

from bisect import bisect_right
from enum import IntEnum


class BlockType(IntEnum):
    """What a node holds."""

    USER = 0
    """Prompt text of one session: a user's words or a document."""
    SHARED_PREFIX = 1
    """Prompt text from which several continuations departed."""
    TOOL_OUTPUT = 2
    """Prompt text that a tool produced. Only hints say so."""
    GENERATED = 3
    """Text of the model."""
    PARTIAL = 4
    """A block that its prompt filled only in part: only the same prompt can hit it. A server whose cache
    keeps whole pages has none."""


class Transition(IntEnum):
    """How the last request that visited a node related to what was known before it."""

    COLD = 0
    """Nothing of the prompt was known."""
    NEW_SESSION = 1
    """It departed where others had departed before: a new session on a shared prefix."""
    BRANCH = 2
    """It departed inside what one session had brought: an edit, a retry, or the second user of a prefix."""
    NEXT_TURN = 3
    """It went on where an earlier request had ended."""
    TOOL_CALL = 4
    """As NEXT_TURN, with a tool's answer. Only hints say so."""


VISIT_STARTS = (1, 2, 4, 8)
"""First number of visits of each level but the lowest; the last of them is divided further."""
GAP_STARTS = (4, 16, 64, 256, 1024)
"""First mean number of requests between visits of each division of the last level, but the lowest. Eight
visits tell how often a node is asked for; how many more there were says little."""
NUM_VISIT_LEVELS = len(VISIT_STARTS) + 1 + len(GAP_STARTS)
NUM_COUNTED_LEVELS = len(VISIT_STARTS)
"""Levels below this one count visits; the others are told apart by the gaps between them."""
NUM_TRANSITIONS = len(Transition)  # asking an enumeration for it takes longer than the rest of a class number
NUM_CLASSES = len(BlockType) * NUM_TRANSITIONS * NUM_VISIT_LEVELS


def visit_level(accesses: int, span: int) -> int:
    """How well known a node is, in [0, NUM_VISIT_LEVELS).

    Args:
        accesses: admitted requests that found it in the cache, or would have found it.
        span: admitted requests between its first visit and its last.
    """
    level = bisect_right(VISIT_STARTS, accesses)
    return level if level < len(VISIT_STARTS) else level + bisect_right(GAP_STARTS, span / accesses)


def reuse_class(block_type: BlockType, transition: Transition, level: int) -> int:
    """Number of the class whose history predicts a node, in [0, NUM_CLASSES).

    Args:
        block_type: what the node holds.
        transition: how the last request got to it.
        level: its ``visit_level``.
    """
    return (block_type * NUM_TRANSITIONS + transition) * NUM_VISIT_LEVELS + level


def transition_of(reuse_class: int) -> Transition:
    """The transition that a class number was made of."""
    return Transition(reuse_class // NUM_VISIT_LEVELS % NUM_TRANSITIONS)
