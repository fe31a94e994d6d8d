"""Opens the tiers that a file describes, measures each, and makes them a chain."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from math import isfinite
from pathlib import Path

from sgl_importance.errors import ImportanceError
from sgl_importance.storage.private_files import make_folder
from sgl_importance.storage.tier_chain.chain import SequenceVisit, TierChain
from sgl_importance.storage.tier_chain.kinds.backend_tier import BackendTier, RecordBackend
from sgl_importance.storage.tier_chain.kinds.file_tier import FileTier
from sgl_importance.storage.tier_chain.kinds.mapped_tier import MappedTier
from sgl_importance.storage.tier_chain.kinds.mooncake_tier import MooncakeTier, connect
from sgl_importance.storage.tier_chain.kinds.record_index import RecordIndex
from sgl_importance.storage.tier_chain.kinds.tier import DramTier, StorageTier
from sgl_importance.storage.tier_chain.kinds.tier_record import record_bytes
from sgl_importance.storage.tier_chain.measure import MOST_RECORDS, FetchCost, inject_delay, measure_reads
from sgl_importance.storage.tier_chain.member import ChainMember
from sgl_importance.storage.tier_chain.ranking import Ranking
from sgl_importance.storage.tier_chain.tier_counters import TierCounters
from sgl_importance.storage.tier_chain.tier_file import FOLDER_KINDS, ChainSpec, TierKind, TierSpec

MAPPED_FILE = "slots"
LOCK_FILE = "lock"
FEWEST_PAGES = 2
_OWNER = re.compile(r"tp\d+(-[a-z]+\d+)*")
"""Such as ``tp0-pp0-cp0``, and ``tp0-pp0-cp0-dp1`` of another replica than the first."""

OpenBackend = Callable[[TierSpec, int, str], RecordBackend]
"""Opens the backend of HiCache that a tier names, for records of so many bytes, of an owner who is named the
same after each restart and as nobody else; it may raise anything."""


class ChainError(ImportanceError, OSError):
    """The chain cannot be opened; the message is one line that names the cure."""


def rank_folder(spec: TierSpec, owner: str) -> Path:
    """Where one rank of a server keeps its records of a tier."""
    return spec.path / owner


def is_rank_folder(folder: Path) -> bool:
    """Whether a folder of a tier is named after a rank; a mount point has others, as ``lost+found``."""
    return bool(_OWNER.fullmatch(folder.name))


def chain_problems(spec: ChainSpec) -> list[str]:
    """One line for each reason why a server cannot use these tiers here; folders are made where missing."""
    lines = []
    for tier in spec.tiers:
        if tier.kind is TierKind.HBM:
            lines.append(f"tier {tier.name}: hbm is sglang's own; take it out, it is for replays")
        if tier.kind in FOLDER_KINDS:
            folder = tier.path
            try:
                make_folder(folder)
                writable = os.access(folder, os.W_OK)
            except OSError:
                writable = False
            if not writable:
                lines.append(
                    f"tier {tier.name}: {folder} cannot be written: name a folder the server may write"
                )
        if tier.kind is TierKind.RDMA and not tier.master:
            lines.append(f'tier {tier.name}: it has no master: give master = "host:port" of a Mooncake store')
    return lines


class OpenChain:
    """A chain, and the locks on its folders; see ``TierChain``.

    Args:
        spec: of the tiers.
        owner: name of the rank, which has folders of its own below those of the tiers.
        page_bytes: of each page.
        make_ranking: makes the ranking for so many tiers.
        counters: of the tiers.
        visits: as for ``TierChain``.
        open_backend: for tiers of kind ``hicache``.

    Raises:
        ChainError: a tier cannot be used.
    """

    def __init__(
        self,
        spec: ChainSpec,
        *,
        owner: str,
        page_bytes: int,
        make_ranking: Callable[[int], Ranking],
        counters: TierCounters,
        open_backend: OpenBackend,
        visits: Callable[[], Iterable[SequenceVisit]] = tuple,
    ) -> None:
        size = record_bytes(page_bytes)
        self._open_backend = open_backend
        self._locks: list[int] = []
        self._tiers: list[StorageTier] = []
        members = []
        try:
            for tier in spec.tiers:
                pages = tier.capacity // size
                if pages < FEWEST_PAGES:
                    raise ChainError(
                        f"tier {tier.name} has room for {pages} pages of {size} bytes: "
                        f"give it at least {FEWEST_PAGES * size} bytes"
                    )
                try:
                    members.append(self._open(tier, owner, page_bytes, pages))
                except ChainError:
                    raise
                except OSError as error:
                    raise ChainError(
                        f"tier {tier.name} cannot be used ({error}): mend it, or take it out"
                    ) from error
            self.chain = TierChain(
                members,
                page_bytes=page_bytes,
                ranking=make_ranking(len(members)),
                counters=counters,
                move_bytes_per_second=spec.move_bytes_per_second,
                visits=visits,
            )
        except ChainError:
            self._give_up()
            raise
        except OSError as error:
            self._give_up()
            raise ChainError(
                f"pages of the tiers cannot be taken in ({error}): mend their folders"
            ) from error

    def close(self) -> None:
        self.chain.close()
        self._unlock()

    def _give_up(self) -> None:
        for tier in self._tiers:
            with suppress(OSError):
                tier.close()
        self._unlock()

    def _unlock(self) -> None:
        for file in self._locks:
            os.close(file)
        self._locks.clear()

    def _open(self, spec: TierSpec, owner: str, page_bytes: int, pages: int) -> ChainMember:
        if spec.kind in FOLDER_KINDS:
            self._locks.append(_locked(rank_folder(spec, owner), spec.name))
        tier = open_tier(spec, owner, record_bytes(page_bytes), pages, self._open_backend)
        self._tiers.append(tier)
        cost = _measured(tier, page_bytes, pages)
        return ChainMember(spec.name, spec.kind.value, tier, pages, cost)


def open_tier(spec: TierSpec, owner: str, size: int, pages: int, open_backend: OpenBackend) -> StorageTier:
    """
    Raises:
        OSError: it cannot be opened.
    """
    tier: StorageTier
    match spec.kind:
        case TierKind.DRAM:
            tier = DramTier()
        case TierKind.CXL:
            tier = MappedTier(rank_folder(spec, owner) / MAPPED_FILE, size, pages)
        case TierKind.NVME | TierKind.FS:
            tier = FileTier(rank_folder(spec, owner), size, direct=spec.kind is TierKind.NVME)
        case TierKind.RDMA:
            client = connect(
                master=spec.master,
                protocol=spec.protocol,
                devices=spec.devices,
                host=spec.host,
                record_bytes=size,
            )
            tier = MooncakeTier(rank_folder(spec, owner), size, client)
        case TierKind.HICACHE:
            index = RecordIndex(rank_folder(spec, owner))
            try:
                backend = open_backend(spec, size, index.prefix)
            except Exception as error:  # of a package that is missing, a service that does not answer, ...
                raise OSError(f"{type(error).__name__}: {error}") from error
            tier = BackendTier(spec.backend, index, size, backend)
        case TierKind.HBM:
            raise ChainError(f"tier {spec.name}: hbm is sglang's own; take it out, it is for replays")
    if spec.is_injected:
        inject_delay(tier, seconds=spec.injected_seconds, bytes_per_second=spec.injected_bytes_per_second)
    return tier


def _measured(tier: StorageTier, page_bytes: int, pages: int) -> FetchCost:
    present, held = [], 0
    for held, listed in enumerate(tier.records(), start=1):
        if held <= MOST_RECORDS:
            present.append(listed.name)
    return measure_reads(tier, page_bytes, room=max(0, pages - held), present=present)


def _locked(folder: Path, name: str) -> int:
    """Keeps other processes off a folder, until the file is closed.

    Raises:
        ChainError: another process uses it.
    """
    make_folder(folder)
    file = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        with suppress(OSError):
            os.close(file)
        raise ChainError(
            f"tier {name}: another server uses {folder}: give each server folders of its own"
        ) from error
    return file


def describe_chain(members: Sequence[ChainMember]) -> list[str]:
    """One line for each tier: its size, what was measured at start, and what is special here."""
    lines = []
    for member in members:
        speed = member.cost.bytes_per_second
        measured = f"{speed / 1e9:.2f} GB/s of pages read" if isfinite(speed) else "not measured"
        note = f" ({member.tier.note})" if member.tier.note else ""
        lines.append(f"{member.name}: {member.kind}, {member.pages} pages, {measured}{note}")
    return lines
