"""The operator's options: one frozen record, carried from the launcher into every scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_importance.pages.prune import Prune
from sgl_importance.postgres_url import url_problem
from sgl_importance.settings import (
    SETTINGS,
    AutoPins,
    ImportanceG,
    KvPolicy,
    Prewarm,
    Residency,
    ResidencyPolicy,
    SparseSelector,
    StoreBackends,
    Switch,
    TraceDetail,
    has_home,
    keyword,
)


@dataclass(frozen=True, slots=True)
class ImportanceOptions:
    """Options of the importance signal and of the policy that consumes it; ``SETTINGS`` says what each means.

    Raises:
        ValueError: names every option whose value cannot be used.
    """

    policy: KvPolicy = "default"
    source: str = "auto"
    interval: int = 8
    layers: tuple[int, ...] = ()
    window: int = 32
    sink_tokens: int = 4
    local_tokens: int = 16
    half_life_queries: float = 32.0
    g: ImportanceG = "auto"
    pin_budget: float = 0.2
    auto_pins: AutoPins = "off"
    trace: str = ""
    trace_detail: TraceDetail = "folds"
    trace_megabytes: int = 1024
    trace_pages: float = 0.0
    store: str = ""
    store_bytes: int = 64 << 30
    store_backends: StoreBackends = "tested"
    tiers: str = ""
    fetch_timeout_ms: int = 1000
    ledger: str = "auto"
    ledger_token_ids: Switch = "on"
    ledger_megabytes: int = 256
    prewarm: Prewarm = "start"
    prewarm_seconds: int = 60
    residency: Residency = "full"
    device_tokens: float = 1 / 16
    residency_policy: ResidencyPolicy = "ema"
    sparse_selector: SparseSelector = "all"
    sparse_budget: float = 2048.0
    sparse_prune: str = "none"
    sparse_min_context: int = 1024
    sparse_prompt_tokens: int = 0
    sparse_resident_bias: float = 0.0
    sparse_audit_interval: int = 0
    sparse_audit_missed_page: float = 1.0

    def __post_init__(self) -> None:
        problems = [
            f"{keyword(name)} {problem}"
            for name, setting in SETTINGS.items()
            if (problem := setting.problem(getattr(self, name)))
        ]
        if self.auto_pins == "on" and not self.use_importance:
            problems.append(
                f"{keyword('auto_pins')} rests on what attention said: it needs {keyword('g')} to be 'on'"
            )
        if self.trace_pages and not self.trace:
            problems.append(f"{keyword('trace_pages')} needs {keyword('trace')}: name a directory")
        if self.tiers and not self.store:
            problems.append(
                f"{keyword('tiers')} needs {keyword('store')}: a directory for the ledger and for locks"
            )
        problems += [
            f"{keyword(name)} {path!r} is in the home of no user here: write the whole path"
            for name in ("store", "tiers", "ledger", "trace")
            if isinstance(path := getattr(self, name), str) and not has_home(path)
        ]
        if "://" in self.ledger and (problem := url_problem(self.ledger)):
            problems.append(f"{keyword('ledger')} {problem}")
        if self.is_tiered and self.policy != "importance":
            problems.append(f"{keyword('residency')} 'tiered' needs {keyword('policy')} to be 'importance'")
        problems += self._sparse_problems()
        if self.source == "none":
            problems += [
                f"{need} needs page scores, which {keyword('source')} 'none' does not take"
                for need in self.needing_scores
            ]
        if problems:
            raise ValueError("; ".join(problems))

    def _sparse_problems(self) -> list[str]:
        problems = []
        try:
            Prune.parse(self.sparse_prune)
        except ValueError as error:
            problems.append(f"{keyword('sparse_prune')} {error}")
        if self.sparse_audit_missed_page < 1 and not self.sparse_audit_interval:
            problems.append(
                f"{keyword('sparse_audit_missed_page')} needs audits: give {keyword('sparse_audit_interval')}"
            )
        if not self.is_sparse:
            if self.sparse_audit_interval:
                problems.append(f"audits need {keyword('sparse_selector')} to be a selector, not 'all'")
            return problems
        selector = f"{keyword('sparse_selector')} {self.sparse_selector!r}"
        if not self.is_tiered:
            problems.append(f"{selector} needs {keyword('residency')} to be 'tiered'")
        return problems

    @property
    def is_sparse(self) -> bool:
        """Whether steps read only the pages that a selector chooses."""
        return self.sparse_selector != "all"

    @property
    def is_tiered(self) -> bool:
        """Whether the KV of running requests lies on the host, with a cache of pages on the device."""
        return self.residency == "tiered"

    def device_tokens_of(self, pool_tokens: int) -> int:
        """Tokens whose dense KV would fill the device memory given for tiered pages.

        Args:
            pool_tokens: tokens of the pool, which lies on the host.
        """
        return int(self.device_tokens * pool_tokens if self.device_tokens < 1 else self.device_tokens)

    @property
    def needing_scores(self) -> tuple[str, ...]:
        """The choices that mean nothing without page scores, as ``keyword 'value'``."""
        needing = {"g": self.use_importance, "trace_detail": self.trace and self.trace_detail == "steps"}
        return tuple(f"{keyword(name)} {getattr(self, name)!r}" for name, needs in needing.items() if needs)

    @property
    def use_importance(self) -> bool:
        """Whether g moves the ranking. ``auto`` follows the measurements: none showed a gain."""
        return self.g in ("on", "shuffled")

    @property
    def ledger_place(self) -> str:
        """The directory or database that keeps what is learnt between starts; empty where nothing is kept."""
        if self.is_stock or self.ledger == "off":
            return ""
        return self.store if self.ledger == "auto" else self.ledger

    @property
    def is_stock(self) -> bool:
        """Whether sglang runs as if this package were not installed, but for a store where one is named."""
        return self.policy == "default"
