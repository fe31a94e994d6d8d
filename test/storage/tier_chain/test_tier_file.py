"""The file of tiers: what it may say, and one clear line for everything else."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance.storage.tier_chain.tier_file import TierFileError, TierKind, parse_tiers, read_tier_file

WHOLE = """
move_bytes_per_second = "2GB"

[[tier]]
kind = "dram"
capacity = "1.5GiB"

[[tier]]
name = "far"
kind = "cxl"
capacity = 4000000
folder = "/dev/shm/kv"
inject_latency_us = 2
inject_bytes_per_second = "20GB"
bytes_per_second = "28GB"
latency_us = 2
price_per_gb_hour = 1.5
source = "a paper"
"""


def test_reads_what_is_written() -> None:
    chain = parse_tiers(WHOLE)
    first, second = chain.tiers
    assert chain.move_bytes_per_second == 2e9
    assert chain.capacity == 1.5 * 2**30 + 4e6
    assert (first.name, first.kind, first.folder, first.bytes_per_second) == ("dram", TierKind.DRAM, "", inf)
    assert not first.is_injected
    assert second.is_injected
    assert (second.injected_seconds, second.injected_bytes_per_second) == (2e-6, 2e10)
    assert (second.bytes_per_second, second.latency_seconds) == (2.8e10, 2e-6)
    assert second.price_per_gigabyte_hour == 1.5
    assert (second.name, second.folder, second.source) == ("far", "/dev/shm/kv", "a paper")


DRAM = '[[tier]]\nkind = "dram"\n'
HICACHE = '[[tier]]\nkind = "hicache"\ncapacity = "1GB"\nfolder = "/x"\n'
BAD = {
    "": "no tier",
    "tier = 3": "no tier",
    "[[tier]]": "no kind",
    '[[tier]]\nkind = "tape"': "use one of hbm, dram, cxl, nvme, fs, rdma, hicache",
    DRAM: 'no capacity: give it, such as "64GB"',
    DRAM + "capacity = 0": "give bytes",
    DRAM + "capacity = true": "give bytes",
    DRAM + "capacity = 1.5": "give bytes",
    DRAM + 'capacity = "many"': "give bytes",
    DRAM + 'capacity = "9XB"': "give bytes",
    DRAM + 'capacity = "1GB"\nfolder = "/x"': "leave out folder",
    DRAM + 'capacity = "1GB"\nlatency_us = -1': "at least 0",
    DRAM + 'capacity = "1GB"\nlatency_us = nan': "at least 0",
    DRAM + 'capacity = "1GB"\nsize = 3': "unknown key 'size'",
    DRAM + 'capacity = "1GB"\nname = "A b"': "use up to 32 of",
    DRAM + 'capacity = "1GB"\nname = 3': "printable text",
    'speed = 3\n[[tier]]\nkind = "dram"\ncapacity = "1GB"': "unknown key 'speed'",
    '[[tier]]\nkind = "fs"\ncapacity = "1GB"': "no folder",
    '[[tier]]\nkind = "fs"\ncapacity = "1GB"\nfolder = "~nobody-at-all/kv"': "write the whole path",
    2 * (DRAM + 'capacity = "1GB"\n'): "two tiers are called dram",
    "".join(
        f'[[tier]]\nname = "{n}"\nkind = "fs"\ncapacity = "1GB"\nfolder = "/x"\n' for n in "ab"
    ): "two tiers lie",
    DRAM + 'capacity = "1GB"\n[[tier]]\nkind = "hbm"\ncapacity = "1GB"': "hbm is not the first",
    "a = [": "no TOML",
    "move_bytes_per_second = " + "9" * 5000: "no TOML: Exceeds the limit",
    HICACHE: "tier hicache has no backend: give it",
    DRAM + 'capacity = "1GB"\nbackend = "file"': "unknown key 'backend'",
    HICACHE + 'backend = "file"\nconfig = 3': "give a table",
    HICACHE + 'backend = "file"\nconfig = {at = 2026-01-01}': "give a table",
    HICACHE + 'backend = "file"\n' + DRAM + 'capacity = "1GB"': "delete nothing, and is not the last",
}


def test_a_backend_of_hicache_is_the_last_tier() -> None:
    text = (
        DRAM
        + 'capacity = "1GB"\n'
        + HICACHE
        + 'backend = "file"\nconfig = {max_size = "2GB", deep = {a = [1]}}'
    )
    last = parse_tiers(text).tiers[-1]
    assert (last.kind, last.backend, last.config) == (
        TierKind.HICACHE,
        "file",
        {"max_size": "2GB", "deep": {"a": [1]}},
    )
    assert len({last, last}) == 1, "it can be hashed"


@pytest.mark.parametrize("text", BAD)
def test_each_mistake_gets_one_line_with_its_cure(text: str) -> None:
    with pytest.raises(TierFileError, match=BAD[text]) as caught:
        parse_tiers(text)
    assert str(caught.value).isprintable()


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    for each in (text, DRAM + text, f"[[tier]]\n{text}"):
        try:
            chain = parse_tiers(each)
        except TierFileError as error:
            lines = str(error).splitlines()
            assert len(lines) == 1
        else:
            assert chain.tiers


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(TierFileError, match="cannot be read"):
        read_tier_file(tmp_path / "absent")
    with pytest.raises(TierFileError, match="cannot be read"):
        read_tier_file(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TierFileError, match="UTF-8"):
        read_tier_file(tmp_path / "binary")
    for key in ("config", "source"):
        deep = f'{HICACHE}backend = "file"\n{key}.{".".join("a" * 5000)} = 1'
        (tmp_path / "deep.toml").write_text(deep)
        with pytest.raises(TierFileError, match=r"deep\.toml: its tables are nested too deeply"):
            read_tier_file(tmp_path / "deep.toml")
    (tmp_path / "tiers.toml").write_text(WHOLE, encoding="utf-8-sig")  # as some editors do
    assert len(read_tier_file(tmp_path / "tiers.toml").tiers) == 2
