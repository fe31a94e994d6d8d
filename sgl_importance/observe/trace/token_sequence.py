"""The tokens of a request, handed from the scheduler's thread to the thread that hashes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sgl_importance.nodes.digests import chain_digests, root_digest


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Tokens whose whole pages are to be named.

    Attributes:
        namespace: extra key and salt, which keep equal tokens apart, as for ``root_digest``.
        tokens: of the sequence; must not change afterwards.
    """

    namespace: tuple[str | None, ...]
    tokens: Sequence[int]

    def digests(self, page_size: int) -> list[bytes]:
        """Of each whole page, chained as by ``chain_digests``."""
        return chain_digests(root_digest(*self.namespace), self.tokens, page_size)
