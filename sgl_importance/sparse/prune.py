"""``sparse.prune``: fewer pages than the budget allows, where the rest would matter little."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

Kind = Literal["none", "topp", "blasst"]


@dataclass(frozen=True, slots=True)
class Prune:
    """A rule that shortens the list of chosen pages.

    Attributes:
        kind: ``topp`` keeps the best pages until they hold a share of the estimated attention (Twilight, Lin
            et al., 2025); ``blasst`` drops pages whose estimated logit is further below the largest than the
            logarithm of a bound (BLASST, 2025).
        bound: that share, or that bound, between 0 and 1.
    """

    kind: Kind = "none"
    bound: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads ``none``, ``topp:P`` or ``blasst:L``.

        Raises:
            ValueError: it is none of them; the message goes on behind the option's name.
        """
        if text == "none":
            return cls()
        kind, _, number = text.partition(":")
        try:
            bound = float(number)
        except ValueError:
            bound = 0.0
        if kind not in ("topp", "blasst") or not 0 < bound < 1:
            raise ValueError(
                f"must be 'none', 'topp:P' or 'blasst:L' with a number between 0 and 1, not {text!r}"
            )
        return cls("topp" if kind == "topp" else "blasst", bound)
