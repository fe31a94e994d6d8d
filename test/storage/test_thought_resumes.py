"""A long thought that was interrupted goes on with the same tokens, whatever became of its stored pages."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sgl_importance.storage.budget import StoredFile, scan
from sgl_importance.storage.page_record import decode_header
from sgl_importance_lab.reasoner import reasoner_path
from sgl_importance_lab.reasoner.tasks import make_task
from sgl_importance_lab.reasoner.tokenizer import reasoner_tokenizer, render

from support.servers import ServerProcess
from support.store_bench import PAGE_TOKENS, Disk, count, fault_env, flush, store_flags, wait_for_memory
from support.waiting import wait_until
from support.workloads.exchanges import Exchange, ask_at_once

pytestmark = pytest.mark.server

THOUGHT_TOKENS = 2000
GOES_ON = 24
POOL_TOKENS = 4096  # of COMMON_FLAGS


class Thought:
    """A search that the embedded reasoner thinks through on a server with a store, without interruption."""

    def __init__(self, server: ServerProcess, disk: Disk) -> None:
        self.server, self.disk = server, disk
        task = make_task("search", THOUGHT_TOKENS, seed=0)
        self.prompt = reasoner_tokenizer().encode(render(task.messages))
        self.tokens = self.continued(0, THOUGHT_TOKENS)[0]
        stored = {decode_header(file.path.read_bytes()[:100]).depth: file.path for file in self.files()}
        self.pages = [path for _, path in sorted(stored.items())]

    def files(self) -> list[StoredFile]:
        """Of all pages, once they are written."""
        expected = (len(self.prompt) + len(self.tokens) - 1) // PAGE_TOKENS
        wait_until(lambda: len(list(scan(self.disk.store / "pages"))) >= expected)
        return list(scan(self.disk.store / "pages"))

    def continued(self, step: int, tokens: int = GOES_ON) -> tuple[list[int], int]:
        """What follows the first ``step`` tokens, and how many tokens of all before came from storage."""
        said = self.tokens[:step] if step else []
        reply = self.server.generate([*self.prompt, *said], max_new_tokens=tokens, ignore_eos=True)
        details = reply["meta_info"]["cached_tokens_details"] or {}
        return reply["output_ids"], details.get("storage", 0)


@pytest.fixture(scope="module")
def thought(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thought]:
    folder = tmp_path_factory.mktemp("thought")
    disk = Disk(folder, is_real=False, control=folder / "fault")
    wait_for_memory()
    flags = (*store_flags(disk.store), "--schedule-conservativeness", "0.05")
    with ServerProcess(*flags, model=reasoner_path(), env=fault_env(disk.control)) as server:
        server.expects_faults = True
        yield Thought(server, disk)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 4
    path.write_bytes(data)


def lose(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("damage", [flip, lose])
def test_a_page_that_is_wrong_or_lost(thought: Thought, damage: Callable[[Path], None], number: int) -> None:
    """What lies before it comes from storage; the rest of the thought so far is computed again."""
    draws = random.Random(f"{damage.__name__}/{number}")
    step = draws.randrange(200, THOUGHT_TOKENS - GOES_ON)
    page = draws.randrange(1, (len(thought.prompt) + step) // PAGE_TOKENS)
    flush(thought.server)
    kept = thought.pages[page].read_bytes()
    damage(thought.pages[page])
    try:
        tokens, stored = thought.continued(step)
    finally:
        thought.pages[page].write_bytes(kept)
    assert tokens == thought.tokens[step : step + GOES_ON]
    assert stored == page * PAGE_TOKENS


def test_pages_that_are_late(thought: Thought) -> None:
    late = count(thought.server, "missed_pages", reason="timeout")
    flush(thought.server)
    thought.disk.break_("hangs")
    try:
        tokens, stored = thought.continued(1200)
    finally:
        thought.disk.mend()
    assert tokens == thought.tokens[1200 : 1200 + GOES_ON]
    assert stored == 0
    assert count(thought.server, "missed_pages", reason="timeout") > late


def test_thoughts_that_retract_each_other(thought: Thought) -> None:
    """Three do not fit: one is retracted, goes on later, and its prompt has lost a page meanwhile."""
    tokens = (POOL_TOKENS - len(thought.prompt)) // 3 + 50

    flush(thought.server)
    lose(thought.pages[3])
    exchange = Exchange(tuple(thought.prompt), tuple(thought.tokens[:tokens]))
    together = ask_at_once(thought.server, [exchange] * 3)
    assert all(reply["output_ids"] == thought.tokens[:tokens] for reply in together)
    assert sum(reply["meta_info"]["num_retractions"] for reply in together) > 0
