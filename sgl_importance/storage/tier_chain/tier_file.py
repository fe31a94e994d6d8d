"""The file of ``--kv-importance-tiers`` and ``replay --tiers``: tiers in TOML, fastest first."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf, isfinite
from pathlib import Path
from typing import Any

from sgl_importance.errors import ImportanceError
from sgl_importance.options.setting import has_home

MAX_FILE_BYTES = 1 << 20
MAX_TIERS = 16
_UNITS = {"": 1, "B": 1, **{f"{p}B": 1000**i for i, p in enumerate("KMGTP", start=1)}} | {
    f"{p}iB": 1024**i for i, p in enumerate("KMGTP", start=1)
}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]?i?B?)")
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")


class TierKind(StrEnum):
    HBM = "hbm"
    """The device. sglang keeps it: a replay may have it in front of the chain, a server may not."""
    DRAM = "dram"
    """Memory of the process, which ends with it."""
    CXL = "cxl"
    """A mapped file: on a DAX device, or in tmpfs bound to a NUMA node."""
    NVME = "nvme"
    """Files read and written past the page cache (O_DIRECT), where their file system takes that."""
    FS = "fs"
    """Files in a directory, such as that of a parallel file system."""
    RDMA = "rdma"
    """Memory of other machines, in a Mooncake store; its folder knows what is there."""
    HICACHE = "hicache"
    """Any storage backend of HiCache, which deletes nothing when asked to; its folder knows what is there."""


INDEX_KINDS = frozenset({TierKind.RDMA, TierKind.HICACHE})
"""Whose folders hold an index of records that lie elsewhere."""
FOLDER_KINDS = frozenset({TierKind.CXL, TierKind.NVME, TierKind.FS, *INDEX_KINDS})
PROTOCOLS = ("rdma", "tcp")


class TierFileError(ImportanceError, ValueError):
    """The file cannot be used; the message is one line that names the cure."""


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One tier, as the file describes it.

    Attributes:
        name: of the tier, unique in its chain.
        kind: how its bytes are kept.
        capacity: bytes of each rank.
        folder: where they are; empty where the kind has none.
        bytes_per_second: published bandwidth of reads, for replays; inf where the file gives none.
        latency_seconds: published time to the first byte, for replays.
        price_per_gigabyte_hour: for replays, in any currency; 0 where the file gives none.
        injected_seconds: added to each access of a server, to stand for what the machine lacks.
        injected_bytes_per_second: most that a server gets from the tier, for the same end; inf for no limit.
        source: where published numbers are from, in words.
        master: ``host:port`` of a Mooncake store, for the kind that has one.
        protocol: over which it is reached, one of ``PROTOCOLS``.
        devices: RDMA devices, separated by commas; empty for Mooncake's choice.
        host: by which store nodes reach this machine; empty for its name.
        backend: of HiCache, for the kind that has one, as ``--hicache-storage-backend`` names it.
        config: its settings, as ``--hicache-storage-backend-extra-config`` takes them.
    """

    name: str
    kind: TierKind
    capacity: int
    folder: str = ""
    bytes_per_second: float = inf
    latency_seconds: float = 0.0
    price_per_gigabyte_hour: float = 0.0
    injected_seconds: float = 0.0
    injected_bytes_per_second: float = inf
    source: str = ""
    master: str = ""
    protocol: str = PROTOCOLS[0]
    devices: str = ""
    host: str = ""
    backend: str = ""
    config: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def path(self) -> Path:
        """Of its folder, from the root on."""
        return Path(self.folder).expanduser().absolute()

    @property
    def is_injected(self) -> bool:
        """Whether a server slows the tier down to stand for other hardware."""
        return self.injected_seconds > 0 or isfinite(self.injected_bytes_per_second)


@dataclass(frozen=True, slots=True)
class ChainSpec:
    """A chain of tiers, fastest first.

    Attributes:
        tiers: at least one.
        move_bytes_per_second: most that promotions and demotions may write into each tier.
    """

    tiers: tuple[TierSpec, ...]
    move_bytes_per_second: float = inf

    @property
    def capacity(self) -> int:
        """Bytes of all tiers."""
        return sum(tier.capacity for tier in self.tiers)


def read_tier_file(path: Path) -> ChainSpec:
    """
    Raises:
        TierFileError: the file cannot be read, or its tiers cannot be used.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise TierFileError(
            f"{path} cannot be read ({error.strerror}): name a file that describes tiers"
        ) from error
    if len(data) > MAX_FILE_BYTES:
        raise TierFileError(f"{path} is larger than {MAX_FILE_BYTES} bytes: name a file that describes tiers")
    try:
        return parse_tiers(data.decode("utf-8-sig"))
    except RecursionError as error:
        raise TierFileError(f"{path}: its tables are nested too deeply: write them as documented") from error
    except TierFileError as error:
        raise TierFileError(f"{path}: {error}") from error
    except UnicodeDecodeError as error:
        raise TierFileError(f"{path}: it is no text in UTF-8: write it as TOML") from error


def parse_tiers(text: str) -> ChainSpec:
    """
    Raises:
        TierFileError: the text is no TOML, or its tiers cannot be used.
    """
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # the former also of numbers of too many digits
        raise TierFileError(f"no TOML: {' '.join(str(error).split())}") from error
    top = _Fields("the file", document)
    speed = top.size("move_bytes_per_second", inf)
    entries = top.take("tier", [])
    if not isinstance(entries, list) or not entries or not all(isinstance(each, dict) for each in entries):
        raise TierFileError("it has no tier: give at least one table [[tier]]")
    if len(entries) > MAX_TIERS:
        raise TierFileError(f"it has {len(entries)} tiers: use at most {MAX_TIERS}")
    top.refuse_rest()
    tiers = tuple(_tier(number, entry) for number, entry in enumerate(entries, start=1))
    _check_chain(tiers)
    return ChainSpec(tiers, speed)


def _tier(number: int, entry: Mapping[str, Any]) -> TierSpec:
    fields = _Fields(f"tier {number}", entry)
    word = fields.word("kind")
    if word not in TierKind.__members__.values():
        raise TierFileError(f"tier {number} has the kind {word!r}: use one of {', '.join(TierKind)}")
    kind = TierKind(word)
    name = fields.word("name", kind.value)
    if not _NAME.fullmatch(name):
        raise TierFileError(
            f"tier {number} has the name {name!r}: use up to 32 of a-z, 0-9, - and _, a letter or digit first"
        )
    fields.owner = f"tier {name}"
    folder = fields.word("folder", "")
    if kind in FOLDER_KINDS and not folder:
        raise TierFileError(f'tier {name} is of kind {kind} and has no folder: give folder = "/some/path"')
    if not has_home(folder):
        raise TierFileError(f"tier {name} has the folder {folder!r}, of no user here: write the whole path")
    if folder and kind not in FOLDER_KINDS:
        raise TierFileError(f"tier {name} is of kind {kind}, which lies in no folder: leave out folder")
    capacity = fields.size("capacity", None)
    spec = TierSpec(
        name=name,
        kind=kind,
        capacity=int(capacity),
        folder=folder,
        bytes_per_second=fields.size("bytes_per_second", inf),
        latency_seconds=fields.number("latency_us", 0.0) / 1e6,
        price_per_gigabyte_hour=fields.number("price_per_gb_hour", 0.0),
        injected_seconds=fields.number("inject_latency_us", 0.0) / 1e6,
        injected_bytes_per_second=fields.size("inject_bytes_per_second", inf),
        source=fields.word("source", ""),
        **_elsewhere(kind, fields),
    )
    fields.refuse_rest()
    return spec


def _elsewhere(kind: TierKind, fields: _Fields) -> dict[str, Any]:
    """How records are reached that do not lie on this machine."""
    if kind is TierKind.HICACHE:
        return {"backend": fields.word("backend"), "config": fields.json_table("config")}
    if kind is not TierKind.RDMA:
        return {}
    found = {key: fields.word(key, "") for key in ("master", "devices", "host")}
    found["protocol"] = fields.word("protocol", PROTOCOLS[0])
    if found["protocol"] not in PROTOCOLS:
        raise TierFileError(
            f"{fields.owner} has the protocol {found['protocol']!r}: use one of {', '.join(PROTOCOLS)}"
        )
    return found


def _check_chain(tiers: tuple[TierSpec, ...]) -> None:
    names = [tier.name for tier in tiers]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise TierFileError(f"two tiers are called {doubled[0]}: give each a name of its own")
    folders = [str(tier.path) for tier in tiers if tier.folder]
    if doubled := sorted({folder for folder in folders if folders.count(folder) > 1}):
        raise TierFileError(f"two tiers lie in {doubled[0]}: give each a folder of its own")
    if any(tier.kind is TierKind.HBM for tier in tiers[1:]):
        raise TierFileError("hbm is not the first tier: put the fastest first")
    for tier in tiers[:-1]:
        if tier.kind is TierKind.HICACHE:
            raise TierFileError(
                f"tier {tier.name} is of kind hicache, whose backends delete nothing, and is not the last: "
                "put it last, and only one"
            )


class _Fields:
    """The keys of one table, each taken once; what is left over is a mistake."""

    def __init__(self, owner: str, table: Mapping[str, Any]) -> None:
        self.owner = owner
        self._left = dict(table)

    def take(self, key: str, default: Any) -> Any:
        return self._left.pop(key, default)

    def word(self, key: str, default: str | None = None) -> str:
        value = self.take(key, default)
        if value is None:
            raise TierFileError(f"{self.owner} has no {key}: give it")
        if not isinstance(value, str) or not value.isprintable():
            raise TierFileError(f"{self.owner} has {key} = {value!r}: give a printable text in quotes")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.take(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < 1e18:
            raise TierFileError(f"{self.owner} has {key} = {value!r}: give a number of at least 0")
        return float(value)

    def size(self, key: str, default: float | None) -> float:
        """Bytes, or bytes a second: a whole number, or a text such as "64GB" or "1.5TiB"."""
        value = self.take(key, default)
        if value is None:
            raise TierFileError(f'{self.owner} has no {key}: give it, such as "64GB"')
        if value == inf and default == inf:
            return inf
        amount: float = -1.0
        if isinstance(value, int) and not isinstance(value, bool):
            amount = value
        elif isinstance(value, str) and (match := _BYTES.fullmatch(value.strip())):
            amount = float(match[1]) * _UNITS.get(match[2], -inf)
        if not 1 <= amount < 1e18:
            raise TierFileError(f'{self.owner} has {key} = {value!r}: give bytes, such as 64000000 or "64GB"')
        return amount

    def json_table(self, key: str) -> dict[str, Any]:
        """A table of what JSON can hold as well."""
        value = self.take(key, {})
        try:
            if isinstance(value, dict):
                json.dumps(value, allow_nan=False)
                return value
        except (TypeError, ValueError):
            pass
        raise TierFileError(f"{self.owner} has {key} = {value!r}: give a table of texts, numbers and tables")

    def refuse_rest(self) -> None:
        if self._left:
            raise TierFileError(f"{self.owner} has the unknown key {min(self._left)!r}: correct or drop it")
