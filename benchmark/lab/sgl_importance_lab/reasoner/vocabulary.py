"""The closed word lists of the reasoning language.

The order of the words is that of the token ids of a checkpoint: append, never reorder.
"""

from __future__ import annotations

from sgl_importance_lab.probe.vocabulary import NAMES, UNSEEN_NAMES, VALUES

NODES = (*NAMES, *UNSEEN_NAMES, *VALUES)
"""Names of variables and of nodes."""
MODULUS = 10
NO_NODE = "none"

_SIGNS = (":", ".", "?")
_WORDS = (
    *("Program", "Sums", "Order", "Graph", "Question", "to", "path", "before"),
    *("visit", "back", "from", NO_NODE, "seen", "new", "goal", "answer"),
)


def head(node: str) -> str:
    """The word that a node's record begins with: its name in capitals, so no other place looks like it."""
    return node.upper()


def spaced(word: str) -> str:
    """The text of a word's token: every word of this language has one space behind it."""
    return word + " "


def word_pieces() -> tuple[str, ...]:
    """Every string that is one token of its own, in the order of the token ids."""
    digits = (str(digit) for digit in range(MODULUS))
    heads = (head(node) for node in NODES)
    return tuple(spaced(word) for word in (*NODES, *heads, *digits, *_SIGNS, *_WORDS))
