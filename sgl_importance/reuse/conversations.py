"""Whether traffic goes on from earlier turns, so that these say what becomes of nodes."""

LONGER_SHARE = 0.5
"""Least share of requests that go on from an earlier turn with a longer prompt where turns rank nodes though
nobody tells how answers end: .59 to .97 of recorded agents, .28 of conversations of an hour (Mooncake)."""
LONGER_REQUESTS = 128
"""Requests of late whose mean that share is."""
FIRST_REQUESTS = 4
"""As many that go on from none stand for what came before the first."""


class Conversations:
    """Whether traffic is mostly conversations, whose prompts grow from turn to turn.

    Then a turn says of the nodes that it was the last to visit more than their own class does, even where
    nobody tells how answers end (docs/evidence/eviction.md).
    """

    def __init__(self) -> None:
        self._share = 0.0
        self._requests = FIRST_REQUESTS

    def count(self, is_longer: bool) -> bool:
        """One more request.

        Args:
            is_longer: whether it goes on from an earlier turn with a longer prompt.

        Returns:
            Whether requests are mostly such, of late.
        """
        self._requests = min(self._requests + 1, LONGER_REQUESTS)
        self._share += (is_longer - self._share) / self._requests
        return self._share >= LONGER_SHARE
