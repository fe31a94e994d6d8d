"""What `sgl-importance doctor --url` finds in a running server. Never imports sglang."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from sglang_importance.launch.finding import Finding, Status


def server_findings(document: dict[str, Any]) -> Iterator[Finding]:
    """
    Args:
        document: of ``GET /kv_importance``.
    """
    yield Finding("policy", Status.OK, f"{document['policy']}, learnt from {document['clock']:,} requests")
    yield from _faults(document["faults"]["counts"])
    yield _eviction(document["policy"], document["faults"]["fallback"])
    for place in document.get("volatile", ()):
        yield Finding("volatile beginning", Status.NOTE, place["sentence"], place["cure"])
    if "pages" in document:
        yield _pages(document["pages"])
    if "ledger" in document:
        yield _ledger(document["ledger"])
    if "store_tiers" in document:
        yield from _store_tiers(document["store_tiers"])


def _faults(counts: dict[str, int]) -> Iterator[Finding]:
    if not counts:
        yield Finding("faults", Status.OK, "none")
    for place, count in counts.items():
        yield Finding(
            f"faults: {place}", Status.NOTE, f"{count:,}, caught and counted", f"report {_log_line(place)}"
        )


def _eviction(policy: str, fallback: dict[str, Any] | None) -> Finding:
    if fallback is None:
        order = "the marginal loss" if policy == "importance" else "LRU, as stock does"
        return Finding("eviction", Status.OK, f"by {order}")
    when = datetime.fromtimestamp(fallback["time"], UTC)
    return Finding(
        "eviction",
        Status.PROBLEM,
        f"evicts by LRU until it is restarted, since request {fallback['clock']:,} "
        f"({when:%Y-%m-%d %H:%M:%S} UTC): {fallback['error']}",
        f"restart it, and report {_log_line(fallback['place'])}",
    )


def _pages(pages: dict[str, Any]) -> Finding:
    taken = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in pages["device_bytes"].items())
    return Finding(
        "tiered pages",
        Status.OK,
        f"{pages['host_tokens']:,} tokens on the host, {pages['device_tokens_per_layer']:,} of each layer on "
        f"the device ({taken} of {pages['device_budget_bytes'] / 2**20:.1f} MiB), {pages['max_requests']} "
        f"requests at a time; {pages['loaded']:,} of {pages['read']:,} pages read came from the host",
    )


def _ledger(ledger: dict[str, Any]) -> Finding:
    lost = f"{ledger['lost_visits']:,} visits lost since the start"
    if ledger["is_written"]:
        return Finding("ledger", Status.OK, f"{ledger['place']}, {lost}")
    cure = (
        "see the line 'KV importance ledger' of its log: it is tried again every 30 s, "
        "and where it could not be opened at the start, at the next one"
    )
    return Finding("ledger", Status.PROBLEM, f"{ledger['place']} is not written: {lost}", cure)


def _store_tiers(chain: dict[str, Any]) -> Iterator[Finding]:
    for tier in chain["tiers"]:
        note = f" ({tier['note']})" if tier["note"] else ""
        yield Finding(
            f"storage tier {tier['name']}",
            Status.OK if tier["state"] == "in use" else Status.PROBLEM,
            f"{tier['state']}: {tier['kind']}{note}, {tier['pages']:,} of {tier['capacity_pages']:,} pages, "
            f"read at {tier['read_bytes_per_second'] / 1e9:.2f} GB/s when the server started; "
            f"by {chain['ranking']}",
            "" if tier["state"] == "in use" else "look after its medium: it is tried again every 10 s",
        )


def _log_line(place: str) -> str:
    return f"the line 'KV importance: fault in {place}' of its log, and what is below it"
