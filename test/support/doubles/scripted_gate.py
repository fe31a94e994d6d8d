"""A gate that answers what a test tells it to, on a real tree with stand-ins for the lower tiers."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.options import ImportanceOptions
from sgl_importance.ranking.write_gate import Refusal
from sgl_importance.tiers import Tier
from sglang_importance.placement.backup_filter import open_gate

from support.doubles.lower_tiers import LowerTiers
from support.drivers.tree_driver import TreeDriver

POOL, HOST = 128, 192


class ScriptedGate:
    """Answers what it is told to; remembers what it was asked."""

    refusal = Refusal.PAYBACK

    def __init__(self, *answers: bool, otherwise: bool = True) -> None:
        self.answers = list(answers)
        self.otherwise = otherwise
        self.asked: list[tuple[Tier, list[NodeMetadata], bool]] = []

    def admits(self, tier: Tier, chain: Sequence[NodeMetadata], *, can_wait: bool = False) -> bool:
        answer = self.answers.pop(0) if self.answers else self.otherwise
        self.asked.append((tier, list(chain), answer))
        return answer

    def tick(self) -> None: ...

    def reset(self) -> None: ...

    def gave_up(self, tier: Tier, node: NodeMetadata) -> None: ...


def gated(
    write_policy: str,
    gate: ScriptedGate | None = None,
    *,
    storage: bool = True,
    pool: int = POOL,
    options: ImportanceOptions | None = None,
) -> tuple[TreeDriver, LowerTiers]:
    options = options or ImportanceOptions(policy="importance", gate="on")
    driver = TreeDriver(tokens=pool, options=options)
    tiers = LowerTiers.attach(driver.cache, host_tokens=HOST, write_policy=write_policy, storage=storage)
    if gate is not None:
        driver.filter_backups(gate)
    else:
        driver.filter_backups(open_gate(driver.cache, driver.component.state))
    return driver, tiers
