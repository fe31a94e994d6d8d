"""What tiers below the GPUs hold of requests, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sgl_importance_lab.kv_size.deployment import Deployment, LayerBytes, Stage
from sgl_importance_lab.kv_size.fields import SizeError
from sgl_importance_lab.kv_size.request import layer_request_bytes

GB = 1e9
HOURS_PER_MONTH = 730.0
MILLION = 10**6
DEVICE, HOST = "device", "host"
"""Tiers that keep a copy for each GPU: the host's is made of one pool per rank (HiCache)."""


@dataclass(frozen=True, slots=True)
class TierSize:
    """
    Attributes:
        name: of the tier.
        gigabytes: over all machines of the deployment.
        gb_month: price of a GB for a month; None for none.
    """

    name: str
    gigabytes: float
    gb_month: float | None = None


@dataclass(frozen=True, slots=True)
class TierFit:
    """What fits into a tier, and what it costs there.

    Attributes:
        name: of the tier.
        request_bytes: that one request takes in it.
        tokens: of requests that fit.
        requests: that fit.
        million_tokens_month: price of a million cached tokens for a month; None without a price.
        break_even_hours: how long keeping costs less than computing once more; None without prices.
    """

    name: str
    request_bytes: int
    tokens: int
    requests: int
    million_tokens_month: float | None
    break_even_hours: float | None


def parse_tier(text: str) -> TierSize:
    """From ``NAME=GB`` or ``NAME=GB@PRICE``, the price of a GB for a month.

    Raises:
        SizeError: it is something else.
    """
    name, equals, rest = text.partition("=")
    size, at, price = rest.partition("@")
    try:
        tier = TierSize(name.strip(), float(size), float(price) if at else None)
    except ValueError:
        tier = TierSize("", 0.0)
    # What is not finite fails both comparisons, or the first one.
    sound = 0 < tier.gigabytes < 1e12 and (tier.gb_month is None or 0 <= tier.gb_month < 1e12)
    if not (tier.name and equals and sound):
        raise SizeError(f"--tier {text}: write NAME=GB or NAME=GB@PRICE, such as host=512@0.5")
    if tier.name == DEVICE:
        raise SizeError(f"--tier {text}: the device's memory is given by --gpu-memory")
    return tier


def stored_request_bytes(
    parts: Sequence[Stage], deployment: Deployment, context: int, *, per_rank: bool
) -> int:
    """Bytes of one request over a whole attention group.

    Args:
        per_rank: every GPU has a copy of its own, as in its memory and in the host's. Below that, latents are
            written once, by the first rank; heads by every rank, also those that share one.
    """
    page = deployment.page_size

    def stored(layer: LayerBytes) -> int:
        everywhere = layer_request_bytes(layer, context, page) * deployment.attention_tp
        return everywhere if per_rank or not layer.is_latent else everywhere // layer.copies

    return sum(stored(layer) for stage in parts for layer in (*stage.layers, *stage.drafts))


def tier_fit(
    tier: TierSize,
    parts: Sequence[Stage],
    deployment: Deployment,
    context: int,
    million_computed: float | None = None,
) -> TierFit:
    """
    Args:
        million_computed: price of computing a million prompt tokens.
    """
    each = stored_request_bytes(parts, deployment, context, per_rank=tier.name in (DEVICE, HOST))
    requests = int(tier.gigabytes * GB) // each
    month = hours = None
    if tier.gb_month is not None:
        month = each / context * MILLION / GB * tier.gb_month
        if million_computed is not None and month > 0:
            hours = million_computed / month * HOURS_PER_MONTH
    return TierFit(tier.name, each, requests * context, requests, month, hours)
