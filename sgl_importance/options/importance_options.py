"""The operator's options: one frozen record, carried from the launcher into every scheduler."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, NamedTuple, Self, get_args

from sgl_importance.options.observation_options import MissOptions, SignalOptions, TraceOptions
from sgl_importance.options.placement_options import LedgerOptions, PinOptions, PrewarmOptions, StoreOptions
from sgl_importance.options.setting import METADATA_KEY, Setting, option
from sgl_importance.options.tiered_options import SparseOptions, TieredOptions
from sgl_importance.postgres_url import url_problem

logger = logging.getLogger(__name__)

KvPolicy = Literal["default", "observe", "importance"]

KV_POLICIES: tuple[KvPolicy, ...] = get_args(KvPolicy)

CONFIG_FLAG = "--kv-importance-config"
"""Names the TOML file with the options that have no flag."""


class _Need(NamedTuple):
    """What switches a group of options on."""

    place: str
    value: str


_NEEDS = {
    "trace": _Need("trace.directory", "to name a directory"),
    "store": _Need("store.directory", "to name a directory"),
    "tiered": _Need("tiered.residency", "to be 'tiered'"),
    "sparse": _Need("sparse.selector", "to be a selector, not 'all'"),
}


@dataclass(frozen=True, slots=True)
class ImportanceOptions:
    """What an operator chose; ``SETTINGS`` says what each option means.

    Raises:
        ValueError: names every option whose value cannot be used.
    """

    policy: KvPolicy = option(
        "default",
        help="who ranks the KV cache: 'default' is stock sglang; 'observe' keeps stock's evictions and "
        "reports what ours would have saved; 'importance' evicts what will be missed least: by predicted "
        "reuse and the cost of restoring",
        flag="--kv-policy",
        choices=KV_POLICIES,
        process="both",
        cost="but for 'default': sglang's tree in Python instead of Rust, and page scores",
    )
    source: str = option(
        "auto",
        help="producer of the page scores; 'none' leaves attention alone, whatever its backend, and reuse is "
        "predicted without scores; 'auto' takes the producer of the attention backend in use where it has "
        "run on that kind of device, else 'none'",
        flag="--kv-importance-source",
        cost="but for 'none': work in the layers that emit; on a CPU a second pass over queries and keys",
    )
    signal: SignalOptions = field(default_factory=SignalOptions)
    pins: PinOptions = field(default_factory=PinOptions)
    ledger: LedgerOptions = field(default_factory=LedgerOptions)
    prewarm: PrewarmOptions = field(default_factory=PrewarmOptions)
    trace: TraceOptions = field(default_factory=TraceOptions)
    misses: MissOptions = field(default_factory=MissOptions)
    store: StoreOptions = field(default_factory=StoreOptions)
    tiered: TieredOptions = field(default_factory=TieredOptions)
    sparse: SparseOptions = field(default_factory=SparseOptions)

    @classmethod
    def of(cls, chosen: Mapping[str, Any]) -> Self:
        """The options with some of them chosen.

        Args:
            chosen: values by place, such as ``policy`` or ``sparse.budget``.

        Raises:
            ValueError: names every option whose value cannot be used.
            KeyError: there is no option at a place.
        """
        groups: dict[str, dict[str, Any]] = {name: {} for name in _GROUPS}
        top: dict[str, Any] = {}
        for place, value in chosen.items():
            if place not in SETTINGS:
                raise KeyError(place)
            group, _, name = place.rpartition(".")
            (groups[group] if group else top)[name] = in_use(place, value)
        return cls(**top, **{name: _GROUPS[name](**values) for name, values in groups.items()})

    def __post_init__(self) -> None:
        unusable = [
            f"{name_of(place)} {problem}"
            for place, setting in SETTINGS.items()
            if (problem := setting.problem(self.at(place)))
        ]
        # Only values that can be used can be compared.
        if problems := unusable or self._contradictions():
            raise ValueError("; ".join(problems))

    def _contradictions(self) -> list[str]:
        problems = list(self._without_effect())
        if "://" in self.ledger.place and (problem := url_problem(self.ledger.place)):
            problems.append(f"{name_of('ledger.place')} {problem}")
        if not self.is_stock and not self.ledger_place:
            ledger = f"{name_of('ledger.place')} or {name_of('store.directory')} to name a directory"
            if self.prewarm.at == "idle" and self.policy == "importance":
                problems.append(f"{name_of('prewarm.at')} 'idle' needs {ledger}")
            if self.ledger.megabytes != DEFAULTS["ledger.megabytes"]:
                problems.append(f"{name_of('ledger.megabytes')} needs {ledger}")
        if self.is_tiered and self.policy != "importance":
            problems.append(
                f"{name_of('tiered.residency')} 'tiered' needs {name_of('policy')} to be 'importance'"
            )
        if self.is_sparse and not self.is_tiered:
            selector = f"{name_of('sparse.selector')} {self.sparse.selector!r}"
            problems.append(f"{selector} needs {name_of('tiered.residency')} to be 'tiered'")
        if self.source == "none":
            problems += [
                f"{need} needs page scores, which {name_of('source')} 'none' does not take"
                for need in self.needing_scores
            ]
        return problems

    def _without_effect(self) -> Iterator[str]:
        """Options that were chosen where what they belong to is off."""
        for group, need in _NEEDS.items():
            if self.at(need.place) != DEFAULTS[need.place]:
                continue
            for place in SETTINGS:
                if place.startswith(f"{group}.") and self.at(place) != DEFAULTS[place]:
                    yield f"{name_of(place)} needs {name_of(need.place)} {need.value}"
        if self.store.tiers and self.store.max_bytes != DEFAULTS["store.max_bytes"]:
            yield (
                f"{name_of('store.max_bytes')} has no effect beside {name_of('store.tiers')}: drop it, each "
                "tier has a capacity in that file"
            )

    def at(self, place: str) -> Any:
        """The value of one option.

        Args:
            place: as in ``SETTINGS``.
        """
        group, _, name = place.rpartition(".")
        return getattr(getattr(self, group) if group else self, name)

    @property
    def is_sparse(self) -> bool:
        """Whether steps read only the pages that a selector chooses."""
        return self.sparse.selector != "all"

    @property
    def is_tiered(self) -> bool:
        """Whether the KV of running requests lies on the host, with a cache of pages on the device."""
        return self.tiered.residency == "tiered"

    def device_tokens_of(self, pool_tokens: int) -> int:
        """Tokens whose dense KV would fill the device memory given for tiered pages.

        Args:
            pool_tokens: tokens of the pool, which lies on the host.
        """
        given = self.tiered.device_tokens
        return int(given * pool_tokens if given < 1 else given)

    @property
    def needing_scores(self) -> tuple[str, ...]:
        """The choices that mean nothing without page scores, as ``name 'value'``."""
        needing = {
            "signal.g": self.use_importance,
            "trace.detail": self.trace.detail == "steps",
        }
        return tuple(f"{name_of(place)} {self.at(place)!r}" for place, needs in needing.items() if needs)

    @property
    def use_importance(self) -> bool:
        """Whether g moves the ranking."""
        return self.signal.g != "off"

    @property
    def ledger_place(self) -> str:
        """The directory or database that keeps what is learnt between starts; empty where nothing is kept."""
        if self.is_stock or self.ledger.place == "off":
            return ""
        return self.store.directory if self.ledger.place == "auto" else self.ledger.place

    @property
    def is_stock(self) -> bool:
        """Whether sglang runs as if this package were not installed, but for a store where one is named."""
        return self.policy == "default"


def in_use(place: str, value: Any) -> Any:
    """What a value of the last release now means, with a warning; any other as it is."""
    replaced = SETTINGS[place].replaced
    if not isinstance(value, str) or value not in replaced:
        return value
    logger.warning("KV importance: %s %s is gone: %s takes its place", name_of(place), value, replaced[value])
    return replaced[value]


_GROUPS: dict[str, type] = {
    each.name: each.default_factory  # type: ignore[misc]  # a group's own class
    for each in fields(ImportanceOptions)
    if METADATA_KEY not in each.metadata
}


def _fields() -> Iterator[tuple[str, Field[Any]]]:
    for each in fields(ImportanceOptions):
        if each.name in _GROUPS:
            yield from ((f"{each.name}.{inner.name}", inner) for inner in fields(_GROUPS[each.name]))
        else:
            yield each.name, each


SETTINGS: dict[str, Setting] = {place: each.metadata[METADATA_KEY] for place, each in _fields()}
"""Every option by its place: ``policy``, ``sparse.budget``."""

DEFAULTS: dict[str, Any] = {place: each.default for place, each in _fields()}
"""What each option is where nobody chose."""


def name_of(place: str) -> str:
    """What an operator writes to choose an option: its flag, or its key and the file that this stands in."""
    return SETTINGS[place].flag or f"{place} of {CONFIG_FLAG}"


def keyword_of(place: str) -> str:
    """The name of an option with a flag among sglang's arguments: ``kv_sparse_budget``."""
    return SETTINGS[place].flag.removeprefix("--").replace("-", "_")
