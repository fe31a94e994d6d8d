"""One page's record: any change of any bit is noticed, and every mismatch has its name."""

from __future__ import annotations

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance.storage.checksum import checksum_problem, crc32c
from sgl_importance.storage.page_record import (
    HEADER_BYTES,
    MissReason,
    ModelIdentity,
    PageDamaged,
    check_page,
    encode_header,
    page_digest,
)

PAGE, IDENTITY = page_digest("a" * 64), bytes(range(32))
BODY = np.frombuffer(bytes(range(256)) * 4, np.uint8)
HEADER = encode_header(page=PAGE, identity=IDENTITY, depth=7, body=BODY)


def test_the_checksum_is_crc32c_by_the_c_library() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the check value of the polynomial's catalogue entry
    assert crc32c(np.frombuffer(b"123456789", np.uint8)) == 0xE3069283
    assert checksum_problem() is None


def test_a_missing_c_library_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(google_crc32c, "implementation", "python")
    problem = checksum_problem()
    assert problem is not None
    assert "install" in problem
    assert "\n" not in problem


def test_an_intact_page_passes() -> None:
    assert len(HEADER) == HEADER_BYTES == 96
    check_page(HEADER, BODY, page=PAGE, identity=IDENTITY)


def test_any_flipped_bit_of_the_header_is_noticed() -> None:
    for bit in range(HEADER_BYTES * 8):
        header = bytearray(HEADER)
        header[bit // 8] ^= 1 << bit % 8
        reason = None
        try:
            check_page(bytes(header), BODY, page=PAGE, identity=IDENTITY)
        except PageDamaged as damaged:
            reason = damaged.reason
        assert reason is (MissReason.MAGIC if bit < 64 else MissReason.HEADER), f"bit {bit}"


@given(st.integers(0, BODY.nbytes * 8 - 1))
def test_any_flipped_bit_of_the_body_is_noticed(bit: int) -> None:
    body = BODY.copy()
    body[bit // 8] ^= 1 << bit % 8
    with pytest.raises(PageDamaged) as caught:
        check_page(HEADER, body, page=PAGE, identity=IDENTITY)
    assert caught.value.reason is MissReason.BODY


@given(st.integers(0, HEADER_BYTES - 1))
def test_a_cut_header_is_noticed(length: int) -> None:
    with pytest.raises(PageDamaged) as caught:
        check_page(HEADER[:length], BODY, page=PAGE, identity=IDENTITY)
    assert caught.value.reason is MissReason.TRUNCATED


@pytest.mark.parametrize(
    ("page", "identity", "body", "reason"),
    [
        (page_digest("b" * 64), IDENTITY, BODY, MissReason.PAGE),
        (PAGE, bytes(32), BODY, MissReason.IDENTITY),
        (PAGE, IDENTITY, BODY[:-1], MissReason.LENGTH),
    ],
    ids=["another prompt", "another model", "another length"],
)
def test_an_intact_page_of_something_else_is_refused(
    page: bytes, identity: bytes, body: np.ndarray, reason: MissReason
) -> None:
    with pytest.raises(PageDamaged) as caught:
        check_page(HEADER, body, page=page, identity=identity)
    assert caught.value.reason is reason


FACTS = {
    "weights": "w",
    "weights_version": "v",
    "config": "c",
    "dtype": "torch.float32",
    "layout": "page_first",
    "page_size": 16,
    "page_bytes": 1024,
    "layers": 2,
    "heads": 2,
    "head_dim": 4,
    "tp_rank": 0,
    "tp_size": 1,
    "pp_rank": 0,
    "pp_size": 1,
    "cp_rank": 0,
    "cp_size": 1,
    "sglang": "0",
}


@pytest.mark.parametrize("name", FACTS)
def test_every_attribute_makes_another_identity(name: str) -> None:
    value = FACTS[name]
    other = value + 1 if isinstance(value, int) else f"{value}x"
    assert ModelIdentity(**FACTS).digest() == ModelIdentity(**FACTS).digest()
    assert ModelIdentity(**FACTS).digest() != ModelIdentity(**{**FACTS, name: other}).digest()
