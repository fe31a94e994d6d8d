"""A real tree with stand-ins for the lower tiers, asked ahead of every copy as on a server."""

from __future__ import annotations

from sgl_importance.options.importance_options import ImportanceOptions

from support.doubles.lower_tiers import LowerTiers
from support.drivers.tree_driver import TreeDriver

POOL, HOST = 128, 192


def tiered(
    write_policy: str, *, storage: bool = True, pool: int = POOL, is_buffer: bool = False
) -> tuple[TreeDriver, LowerTiers]:
    driver = TreeDriver(tokens=pool, options=ImportanceOptions(policy="importance"))
    tiers = LowerTiers.attach(
        driver.cache, host_tokens=HOST, write_policy=write_policy, storage=storage, is_buffer=is_buffer
    )
    driver.filter_backups()
    return driver, tiers
