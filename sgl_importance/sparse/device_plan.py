"""How the device memory of a tiered pool is divided: slots, staging and tables, to the byte."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_importance.errors import ImportanceError

TILE_TOKENS = 512
"""Tokens of one partial attention. It decides how sums are rounded, so no flag and no budget changes it."""

FRAME_SHARE = 0.125
"""Part of the slots that may hold the open pages of running requests, where their number is not given."""

_TABLE_ENTRY_BYTES = 8  # of a page's frame, and of a frame's page
_SLOT_NUMBER_BYTES = 4  # of a page's slot in one layer, and of a slot's page
_HISTORY_BYTES = 8  # of a page's reads in one layer, and of the pass that read it last
_ORDERED_SLOT_BYTES = 8  # of a slot, and of its page, in the order in which a GPU gives them, in one layer
_ORDER_BYTES = 2048  # of counting slots by level, in one layer
_ORDER_STATE_BYTES = 12  # the pass, and how many pages are brought
_ARRIVAL_BYTES = 4  # of a request and KV head, whose attention is computed in parts
_UNIT_BYTES = 4  # of the numbers that are kept of a page and KV head


class DeviceTooSmall(ImportanceError, ValueError):
    """The device memory that was asked for cannot hold what must be there; the message names the cure."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """What a token's keys and values take in a pool whose layers are alike.

    Attributes:
        layers: attention layers of this rank.
        kv_heads: of this rank.
        key_dim: numbers of a key's head.
        value_dim: numbers of a value's head.
        item_bytes: bytes of a number.
    """

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    item_bytes: int

    @property
    def layer_token_bytes(self) -> int:
        """One token in one layer."""
        return self.kv_heads * (self.key_dim + self.value_dim) * self.item_bytes

    @property
    def token_bytes(self) -> int:
        """One token in all layers."""
        return self.layers * self.layer_token_bytes


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """What is kept on the device. ``plan_device`` makes one.

    Attributes:
        shape: of keys and values.
        page_size: tokens per page.
        num_pages: logical pages of the pool, with the one for padding.
        num_slots: page slots of each layer, frames included.
        num_frames: slots that hold the pages that requests are filling, one for each request that may run.
        staging_pages: pages that pass through the device at a time.
        budget_bytes: what the operator gave.
        kept_bytes: what a selector keeps of a page for each KV head of each layer, beside its unit.
        table_bytes: what it keeps beside all pages.
        uses_triton: whether kernels give slots, by an order that has its room.
    """

    shape: KvShape
    page_size: int
    num_pages: int
    num_slots: int
    num_frames: int
    staging_pages: int
    budget_bytes: int
    kept_bytes: int = 0
    table_bytes: int = 0
    uses_triton: bool = False

    @property
    def bytes_by_purpose(self) -> dict[str, int]:
        """Bytes of slots, staging, tables, and of what a selector keeps; together within the budget."""
        page_bytes = self.page_size * self.shape.layer_token_bytes
        representations = self.num_pages * _kept_bytes(self.shape, self.kept_bytes) + self.table_bytes
        return {
            "slots": self.shape.layers * self.num_slots * page_bytes,
            "staging": self.staging_pages * page_bytes,
            "tables": self.num_pages * _page_table_bytes(self.shape)
            + self.num_slots * self.shape.layers * _SLOT_NUMBER_BYTES
            + self.num_frames * _TABLE_ENTRY_BYTES
            + (self._order_bytes if self.uses_triton else 0),
            **({"representations": representations} if representations else {}),
        }

    @property
    def _order_bytes(self) -> int:
        ordered = (self.num_slots - self.num_frames) * _ORDERED_SLOT_BYTES
        arrivals = self.num_frames * self.shape.kv_heads * _ARRIVAL_BYTES
        return self.shape.layers * (ordered + _ORDER_BYTES) + _ORDER_STATE_BYTES + arrivals

    @property
    def device_bytes(self) -> int:
        return sum(self.bytes_by_purpose.values())

    @property
    def slot_tokens(self) -> int:
        """Tokens of one layer that slots can hold."""
        return self.num_slots * self.page_size

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in self.bytes_by_purpose.items())
        host = (self.num_pages - 1) * self.page_size
        return (
            f"{host:,} tokens on the host, {self.slot_tokens:,} of each layer on the device ({parts}; "
            f"{self.device_bytes / 2**20:.1f} of {self.budget_bytes / 2**20:.1f} MiB), "
            f"{self.num_frames} requests at a time"
        )


def plan_device(
    shape: KvShape,
    *,
    page_size: int,
    pool_tokens: int,
    device_tokens: int,
    max_requests: int | None,
    kept_bytes: int = 0,
    table_bytes: int = 0,
    uses_triton: bool = False,
) -> DevicePlan:
    """Divides the device memory that dense KV of ``device_tokens`` tokens would take.

    Args:
        shape: of keys and values.
        page_size: tokens per page.
        pool_tokens: tokens of the logical pool; a multiple of the page size.
        device_tokens: tokens whose dense KV, in all layers, would fill the memory.
        max_requests: requests that may run at a time, each with a page of its own at least; None where the
            memory decides.
        kept_bytes: as in ``DevicePlan``.
        table_bytes: likewise.
        uses_triton: likewise.

    Raises:
        DeviceTooSmall: it holds less than one slot for every request.
    """
    assert pool_tokens % page_size == 0, (pool_tokens, page_size)
    num_pages = pool_tokens // page_size + 1
    staging_pages = -(-TILE_TOKENS // page_size)
    page_bytes = page_size * shape.layer_token_bytes
    per_page = _page_table_bytes(shape) + _kept_bytes(shape, kept_bytes)
    fixed = staging_pages * page_bytes + num_pages * per_page + table_bytes
    per_slot = shape.layers * (page_bytes + _SLOT_NUMBER_BYTES) + _TABLE_ENTRY_BYTES
    if uses_triton:  # as if no slot were a frame in an order, and each were one with arrivals
        fixed += shape.layers * _ORDER_BYTES + _ORDER_STATE_BYTES
        per_slot += shape.layers * _ORDERED_SLOT_BYTES + shape.kv_heads * _ARRIVAL_BYTES
    budget = device_tokens * shape.token_bytes
    num_slots = min((budget - fixed) // per_slot, num_pages)
    if max_requests is not None:
        max_requests = min(max_requests, num_pages - 1)

    needed = max_requests or 1
    if num_slots < needed:
        least = -(-(fixed + needed * per_slot) // shape.token_bytes)
        beside = "staging, tables and what the selector keeps" if kept_bytes else "staging and tables"
        raise DeviceTooSmall(
            f"device memory of {device_tokens} tokens holds {max(num_slots, 0)} page slots beside {beside}, "
            f"and {needed} running requests need one each: use --kv-device-tokens {least} or more"
            + (", a smaller --max-running-requests" if max_requests else "")
            + ", or a smaller --max-total-tokens"
        )
    num_frames = max_requests or max(1, int(num_slots * FRAME_SHARE))
    return DevicePlan(
        shape,
        page_size,
        num_pages,
        num_slots,
        num_frames,
        staging_pages,
        budget,
        kept_bytes,
        table_bytes,
        uses_triton,
    )


def _page_table_bytes(shape: KvShape) -> int:
    """What the tables take for each logical page: slot and history in every layer, and its frame."""
    return shape.layers * (_SLOT_NUMBER_BYTES + _HISTORY_BYTES) + _TABLE_ENTRY_BYTES


def _kept_bytes(shape: KvShape, kept_bytes: int) -> int:
    """What a selector keeps of each logical page: its bytes, their unit, and whether they are there."""
    return shape.layers * (shape.kv_heads * (kept_bytes + _UNIT_BYTES) + 1) if kept_bytes else 0
