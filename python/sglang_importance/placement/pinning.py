"""Soft pins on the radix tree: ranks the nodes that a pin covers, and cuts nodes where a pin ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sgl_importance.metrics_table import FaultPlace
from sgl_importance.nodes.named_sessions import Session
from sgl_importance.nodes.node_metadata import NOT_PINNED, NodeMetadata
from sgl_importance.placement.pins.pin import Pin, PinEnd, PinSource
from sgl_importance.placement.pins.pin_table import PinTable
from sgl_importance.tiers import Tier
from sglang_importance.tree.faults import upstream
from sglang_importance.tree.occupancy import capacity_tokens
from sglang_importance.tree.state import TreeState

_PINNED_BY = {
    PinSource.REQUESTED: "asked_for",
    PinSource.HINTED: "hinted",
}


class PinKeeper(Protocol):
    """Keeps pins over a restart."""

    def keep_pins(self, pins: Iterable[Pin]) -> None:
        """The pins that shall outlive the server, oldest first."""

    def surviving_pins(self) -> frozenset[str]:
        """Names of the pins that a server which started now would find."""


class Pinning:
    """Applies the pin table to a tree, whatever order pins and text come in.

    A node counts as pinned where its last page is: pages of a pin are a prefix, so all before it are too.
    A node that goes on beyond a pin's end, or leaves its text, is cut there as soon as the request that
    brought it is cached.

    Args:
        state: whose tree is followed.
        cache: in which pinned text is matched, and cut out of longer nodes.
        refresh: ranks a node again.
        now: Unix time at which pins expire, without jumps, the same on all ranks; that of ``state.ranks``
            where None.
    """

    def __init__(
        self,
        state: TreeState,
        cache: UnifiedRadixCache,
        refresh: Callable[[UnifiedTreeNode], None],
        *,
        now: Callable[[], float] | None = None,
    ) -> None:
        self.keeper: PinKeeper | None = None
        self.capacity_tokens: Callable[[], dict[Tier, int]] = partial(capacity_tokens, cache)
        """Size of the tiers that evict."""
        self._state = state
        self._tree = state.tree
        self._cache = cache
        self._refresh = refresh
        self.now = now or state.ranks.now
        self.table = PinTable(state.tree.page_size, state.options.pins.budget, {})
        self.table.on_ended = self._ended
        self._has_kept = True
        """Whether the ledger knows of every change."""
        self._unsettled: dict[str, Pin] = {}

    # ---- requests of callers ----

    def pin(self, pin: Pin) -> None:
        """Takes a pin in, for text in the cache and for text that is still to come.

        Raises:
            PinRefused: the prefix fills no page, or there is no room for one more pin.
        """
        self.let_time_pass()
        self._add(pin)

    def unpin(self, pin_id: str) -> None:
        """Ends a pin; KeyError where there is none of that name."""
        self.let_time_pass()
        self._apply(self.table.remove(pin_id))
        self._keep()

    def session_over(self, session: Session) -> None:
        """Ends the pins that only the requests of a session asked for."""
        self.let_time_pass()
        names = [pin.pin_id for pin in self.table.pins() if pin.session is session]
        self._apply(self.table.change(names, why=PinEnd.SESSION_OVER))

    def retain(self, pin: Pin, needless: Sequence[str]) -> int:
        """Takes in a hint's pin in place of earlier ones; the tree follows with ``settle``.

        Args:
            pin: of a prompt in the tree.
            needless: names of the pins that it supersedes.

        Returns:
            How many other pins ended for it.

        Raises:
            PinRefused: nothing has changed.
        """
        before = len(self.table)
        self._settle_later(self.table.change(needless, pin, PinEnd.SUPERSEDED))
        self._state.events.pinned(pin, _PINNED_BY[pin.source])
        return before - len(needless) + 1 - len(self.table)

    def retainable_tokens(self) -> int:
        """Most tokens of a prompt that a pin could be granted now; ends pins whose time is over."""
        self._settle_later(self.table.resize(self.capacity_tokens()) + self._advance())
        return self.table.grantable_tokens

    def current(self) -> list[Pin]:
        """The pins that have not ended, oldest first."""
        self.let_time_pass()
        return self.table.pins()

    def resident_tokens(self, pin: Pin) -> int:
        """Leading tokens of the pin that lie on the device now; changes nothing."""
        tokens, _, _ = self._tree.core.match_full_device_prefix(self._key(pin, len(pin.digests)))
        return int(tokens)

    def survivors(self) -> frozenset[str]:
        """Names of the pins that a server which started now would find, by a look at the ledger's file."""
        return frozenset() if self.keeper is None else self.keeper.surviving_pins()

    def restore(self, pins: Sequence[Pin]) -> list[Pin]:
        """Takes in the pins of an earlier server for which there is room."""
        self.let_time_pass()
        self._apply(self.table.restore(pins))
        restored = [pin for pin in pins if self.table.get(pin.pin_id) is pin]
        for pin in restored:
            self._state.events.pinned(pin, "restored")
        return restored

    # ---- tree events ----

    def reset(self) -> None:
        """The tree was emptied. Pins that were asked for stay, and hold again when their text returns."""
        self._unsettled.clear()

    def admitted(self, hits: Iterable[UnifiedTreeNode]) -> None:
        """A request was admitted that found these nodes in the cache; takes effect with ``settle``."""
        if not len(self.table):
            return
        changed = self._advance()
        for node in hits:
            if (digest := self._tree.end_digest(node)) in self.table:  # granted room, or not
                changed += self.table.used(digest, self._state.policy.clock)
        self._settle_later(changed)

    def _settle_later(self, changed: Iterable[Pin]) -> None:
        self._unsettled.update((pin.pin_id, pin) for pin in changed)

    def settle(self) -> None:
        """Does the work that tree events deferred; call it where the tree may be changed."""
        if self._unsettled:
            pins = list(self._unsettled.values())
            self._unsettled.clear()
            self._apply(pins)

    def taken_in(self, node: UnifiedTreeNode, metadata: NodeMetadata) -> None:
        """Ranks a new node. Called within upstream's insert: a cut waits for ``settle``."""
        if not len(self.table):
            return
        first = last = None
        known = 0
        for digest in self._tree.iterate_pages(node):
            if digest not in self.table:
                break
            first, last = first or digest, digest
            known += 1
        if first is None or last is None:
            return
        pages = metadata.importance.num_pages
        if known == pages:
            metadata.digest = last
            metadata.pin_octaves = self._octaves(last)
        for pin in self.table.holders(first):
            if known < pages or self._ends_inside(pin, metadata):
                self._unsettled[pin.pin_id] = pin

    def _ends_inside(self, pin: Pin, metadata: NodeMetadata) -> bool:
        """Whether the bias of a pin changes between two pages of the node."""
        start = metadata.depth // self._tree.page_size
        return any(0 < pages - start < metadata.importance.num_pages for pages in _boundaries(pin))

    # ---- how ----

    def let_time_pass(self) -> None:
        """Ends the pins whose time is over; cheap where nothing is due."""
        # The host pool is made after the component: sizes are known when the first pin comes.
        self._apply(self.table.resize(self.capacity_tokens()) + self._advance())

    def _advance(self) -> list[Pin]:
        changed = self.table.advance(self._state.policy.clock, self.now())
        self._keep()
        return changed

    def _add(self, pin: Pin) -> None:
        self._apply(self.table.add(pin))
        self._state.events.pinned(pin, _PINNED_BY[pin.source])
        self._has_kept &= pin.source is not PinSource.REQUESTED
        self._keep()

    def _ended(self, pin: Pin, why: PinEnd) -> None:
        self._state.events.unpinned(pin, why)
        self._has_kept &= pin.source is not PinSource.REQUESTED

    def _keep(self) -> None:
        """Hands the pins to the ledger, where they have changed."""
        if not self._has_kept and self.keeper is not None:
            # Only the rank that writes has a keeper: what fails here must not end learning on it alone.
            self._state.faults.beside(FaultPlace.RECORDING, self.keeper.keep_pins, self.table.requested())
            self._has_kept = True

    def budgets(self) -> dict[Tier, tuple[int, int]]:
        """Tokens that pins hold of each tier's budget, and the budget; O(1)."""
        page_size, share = self._tree.page_size, self.table.share
        return {
            tier: (self.table.granted_tokens(tier), int(tokens // page_size * share) * page_size)
            for tier, tokens in self.capacity_tokens().items()
        }

    def _apply(self, pins: Iterable[Pin]) -> None:
        """Cuts the tree where the pins end, and ranks every node that they cover or covered."""
        nodes = {node.id: node for pin in pins for node in self._path(pin)}
        for node in nodes.values():
            metadata = self._tree.metadata(node)
            octaves = self._octaves(self._tree.end_digest(node))
            if octaves != metadata.pin_octaves:
                metadata.pin_octaves = octaves
                self._refresh(node)

    def _path(self, pin: Pin) -> list[UnifiedTreeNode]:
        """Nodes that hold the pin's text, as far as it is in the tree; none reaches beyond a boundary."""
        for pages in sorted(_boundaries(pin)):
            # Matching cuts the node where the text ends, as for any request that departs there.
            with upstream():
                self._cache.match_prefix(MatchPrefixParams(key=self._key(pin, pages)))
        return self._tree.covered(self._key(pin, len(pin.digests)))

    def _key(self, pin: Pin, pages: int) -> RadixKey:
        return RadixKey(pin.tokens[: pages * self._tree.page_size], pin.extra_key, cache_salt=pin.cache_salt)

    def _octaves(self, digest: bytes) -> Mapping[Tier, float]:
        biases = {tier: self.table.octaves(digest, tier) for tier in self.table.tiers}
        return {tier: octaves for tier, octaves in biases.items() if octaves} or NOT_PINNED

    def check_integrity(self) -> None:
        """Asserts that every node carries the bias of its last page, and that pins are cut out of nodes."""
        self.table.check_integrity()
        if self._unsettled:
            return
        for node in self._tree.nodes():
            metadata = self._tree.known(node)
            if metadata is None:
                continue
            pages = list(self._tree.iterate_pages(node))
            assert metadata.pin_octaves == self._octaves(pages[-1]), node.id
            for pin in self.table.holders(pages[0]):
                assert pages[-1] in self.table, (node.id, pin.pin_id)
                assert not self._ends_inside(pin, metadata), (node.id, pin.pin_id)


def _boundaries(pin: Pin) -> set[int]:
    """Pages after which the pin's bias changes: its end, and the end of its share on each tier."""
    return {pages for pages in (len(pin.digests), *pin.granted.values()) if pages}
