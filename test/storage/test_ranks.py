"""Two tensor-parallel ranks on the CPU, each with pages of its own: what fails on one is a miss on both."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sgl_importance.storage.inspect import scan
from sgl_importance.storage.page_record import decode_header

from support.servers import ServerProcess
from support.store_bench import COMMON_FLAGS, PAGE_TOKENS, PROMPT_PAGES, answer, count, flush, store_flags
from support.waiting import wait_until

pytestmark = [pytest.mark.server, pytest.mark.nightly]

PROMPTS = 4
DAMAGED_PAGE = 2
RANKS = ("--tp-size", "2")


@pytest.fixture
def ranks_env() -> dict[str, str]:
    cores = os.cpu_count() or 1
    if cores < 2:
        pytest.skip("sglang binds each rank to cores of its own: two are needed")
    half = cores // 2
    return {"SGLANG_CPU_OMP_THREADS_BIND": f"0-{half - 1}|{half}-{cores - 1}"}


def test_a_page_that_fails_on_one_rank_is_a_miss_on_both(
    models: list[Path], ranks_env: dict[str, str], tmp_path: Path
) -> None:
    flags = ("--kv-policy", "default", "--disable-radix-cache", *COMMON_FLAGS, *RANKS)
    with ServerProcess(*flags, model=models[0], env=ranks_env) as server:
        expected = [answer(server, index)["output_ids"] for index in range(PROMPTS)]

    def served(server: ServerProcess) -> list[int]:
        replies = [answer(server, index) for index in range(PROMPTS)]
        assert [reply["output_ids"] for reply in replies] == expected
        return [(reply["meta_info"]["cached_tokens_details"] or {}).get("storage", 0) for reply in replies]

    with ServerProcess(*store_flags(tmp_path), *RANKS, model=models[0], env=ranks_env) as server:
        served(server)
        wait_until(lambda: len(list(scan(tmp_path / "pages"))) >= 2 * PROMPTS * PROMPT_PAGES)
        files = [file.path for file in scan(tmp_path / "pages")]
        of_ranks = sorted({file.parent for file in files})
        assert len(of_ranks) == 2, "each rank has an identity of its own"
        flush(server)
        assert served(server) == [PROMPT_PAGES * PAGE_TOKENS] * PROMPTS

        damaged = 0
        for file in of_ranks[1].glob("*.page"):
            content = bytearray(file.read_bytes())
            if decode_header(bytes(content[:100])).depth == DAMAGED_PAGE:
                content[-5] ^= 1
                file.write_bytes(content)
                damaged += 1
        assert damaged == PROMPTS
        flush(server)
        assert served(server) == [DAMAGED_PAGE * PAGE_TOKENS] * PROMPTS
        assert count(server, "missed_pages", reason="body") == PROMPTS
