"""What a selector keeps of a page on the device, for those who size a deployment without tensors."""

from __future__ import annotations

_UNIT_BYTES = 4  # of the numbers of a page and KV head
_HEADER_BYTES = 4  # of bits, between mean and codes


def kept_bytes(selector: str, head_dim: int, page_size: int) -> int:
    """Bytes of a page and KV head, with their unit; as a mean over layers.

    Args:
        selector: ``bits`` (a mean in int8, a factor, and 27/16 bits of each number of every key) or ``token``
            (every key in int8).
        head_dim: numbers of a key.
        page_size: tokens per page; a multiple of 8.
    """
    assert page_size % 8 == 0, page_size
    if selector == "token":
        return page_size * head_dim + _UNIT_BYTES
    assert selector == "bits", selector
    return head_dim + _HEADER_BYTES + 27 * head_dim // 16 * page_size // 8 + _UNIT_BYTES
