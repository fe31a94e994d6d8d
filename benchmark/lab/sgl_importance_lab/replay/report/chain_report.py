"""The table of a replay through a chain of tiers."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from sgl_importance.terminal import add_texts, plain
from sgl_importance_lab.replay.lower_tiers.chain_replay import ChainRow


def chain_table(rows: Sequence[ChainRow]) -> Table:
    """One line per policy and size: where tokens were found, and what that takes. Rows are of one trace."""
    priced = any(row.price for row in rows)
    table = Table(
        "policy",
        box=SIMPLE_HEAD,
        pad_edge=False,
        title=plain(
            f"{rows[0].trace}: {rows[0].requests:,} requests, {rows[0].prompt_tokens / 1e6:,.1f} M tokens",
            "table.title",
        ),
        caption="Shares of the prompt tokens; TTFT without queueing, by the numbers of the file",
    )
    names = [tier.name for tier in rows[0].tiers]
    for title in (
        "of unique",
        *names,
        "computed",
        "us/token",
        "TTFT mean",
        "p50",
        "p95",
        *["price"] * priced,
    ):
        table.add_column(plain(title), justify="right")
    for row in rows:
        shares = {tier.name: f"{tier.hit_tokens / max(row.prompt_tokens, 1):.4f}" for tier in row.tiers}
        add_texts(
            table,
            f"{row.policy}, one tier" if row.one_tier else row.policy,
            "" if row.fraction is None else f"{row.fraction:.1%}",
            *(shares.get(name, "") for name in names),
            f"{row.recomputed_tokens / max(row.prompt_tokens, 1):.4f}",
            f"{row.fetch_microseconds_per_token:.2f}",
            f"{row.ttft_mean:.3f}",
            f"{row.ttft_p50:.3f}",
            f"{row.ttft_p95:.3f}",
            *([f"{row.price:.2f}"] if priced else []),
        )
    return table
