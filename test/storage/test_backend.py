"""The HiCache backend on real host pools, without a server: ranks, weights, other backends under it."""

from __future__ import annotations

import errno
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang  # noqa: F401  # first: with it come the shims
import torch
from sglang.srt.managers.cache_controller import HiCacheController, PrefetchAck
from sglang.srt.mem_cache.hicache_storage import HiCacheFile

from sgl_importance.storage.pages import Page
from sglang_importance.storage.guards import _around_reduce_ack
from sglang_importance.storage.page_buffers import answers_of
from sglang_importance.storage.weights import WATCH, Weights, fingerprint, server_fingerprint

from support.host_pools import (
    KEYS,
    PAGE_TOKENS,
    PAGES,
    WEIGHTS,
    make_backend,
    make_pool,
    pages_of,
    slots,
)
from support.page_files import page_file

pytestmark = pytest.mark.usefixtures("watch")


@pytest.mark.parametrize("wrapped", [None, "file"])
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_pages_come_back_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, wrapped: str | None
) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "upstream"))
    pool = make_pool(layout)
    backend = make_backend(pool, tmp_path / "store", wrapped=wrapped)
    assert backend.batch_exists(KEYS) == 0
    assert backend.batch_set_v1(KEYS, slots(0)) == [True] * PAGES
    assert backend.batch_exists(KEYS) == PAGES
    assert backend.batch_get_v1(KEYS, slots(PAGES)) == [True] * PAGES
    for stored, fetched in zip(pages_of(pool, 0), pages_of(pool, PAGES), strict=True):
        assert torch.equal(stored, fetched)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_pages_of_a_quantized_cache_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    pool = make_pool("page_first", dtype=dtype)
    assert pool.dtype == torch.uint8
    assert 2 * pool.get_ksize_per_token() == make_pool("page_first").get_ksize_per_token()
    backend = make_backend(pool, tmp_path)
    assert backend.batch_set_v1(KEYS, slots(0)) == [True] * PAGES
    assert backend.batch_get_v1(KEYS, slots(PAGES)) == [True] * PAGES
    for stored, fetched in zip(pages_of(pool, 0), pages_of(pool, PAGES), strict=True):
        assert stored.count_nonzero() > 0
        assert torch.equal(stored, fetched)


@pytest.mark.parametrize("cut", [False, True])
def test_a_damaged_record_in_another_backend_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: bool
) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "upstream"))
    pool = make_pool("page_first")
    backend = make_backend(pool, tmp_path / "store", wrapped="file")
    for number, key in enumerate(KEYS):
        before = set((tmp_path / "upstream").iterdir())
        backend.batch_set_v1([key], slots(number, 1))
        if number == 3:
            (file,) = set((tmp_path / "upstream").iterdir()) - before
    data = file.read_bytes()
    file.write_bytes(data[:-1] if cut else data[:-1] + bytes([data[-1] ^ 1]))
    assert backend.batch_get_v1(KEYS, slots(PAGES)) == [True] * 3 + [False] * 5
    reason = "truncated" if cut else "body"
    assert WATCH.counters.values()["missed_pages", reason] == 1
    assert len(list((tmp_path / "store" / "quarantine").iterdir())) == 1
    assert backend.batch_exists(KEYS) == 3
    assert backend.batch_set_v1(KEYS, slots(0)) == [True] * PAGES
    assert backend.batch_get_v1(KEYS, slots(PAGES)) == [True] * PAGES
    assert torch.equal(pages_of(pool, 0)[3], pages_of(pool, PAGES)[3])


def test_a_read_that_the_system_refuses_gives_up_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "upstream"))

    def refused(*_: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    pool = make_pool("page_first")
    backend = make_backend(pool, tmp_path / "store", wrapped="file")
    assert backend.batch_set_v1(KEYS, slots(0)) == [True] * PAGES
    with monkeypatch.context() as full:
        full.setattr(HiCacheFile, "get", refused)
        assert backend.batch_get_v1(KEYS, slots(PAGES)) == [False] * PAGES
    assert WATCH.counters.values()["missed_pages", "io"] == 1
    assert WATCH.counters["quarantined_pages"] == 0
    assert backend.batch_get_v1(KEYS, slots(PAGES)) == [True] * PAGES


def test_a_record_that_cannot_be_read_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "upstream"))

    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    pool = make_pool("page_first")
    backend = make_backend(pool, tmp_path / "store", wrapped="file")
    backend.batch_set_v1(KEYS[:1], slots(0, 1))
    with monkeypatch.context() as bad_sector:
        bad_sector.setattr(HiCacheFile, "get", broken)
        assert backend.batch_get_v1(KEYS[:1], slots(PAGES, 1)) == [False]
    assert WATCH.counters.values()["missed_pages", "io"] == 1
    assert backend.batch_exists(KEYS[:1]) == 0
    assert backend.batch_set_v1(KEYS[:1], slots(0, 1)) == [True]
    assert backend.batch_get_v1(KEYS[:1], slots(PAGES, 1)) == [True]


def test_pages_get_no_identity_that_another_thread_computes_for_newer_weights(tmp_path: Path) -> None:
    """The weights change while a thread asks which pages it may write."""
    backend = make_backend(make_pool("page_first"), tmp_path)
    of_old = backend._current_identity(to_write=True)
    newer = Weights("newer", "1", "c", pages_match=True)

    class Replaced(Weights):
        """What is known of the old weights; whoever compares with it is overtaken."""

        def __eq__(self, other: object) -> bool:
            backend._identity = (newer, b"of newer weights")
            return other is WEIGHTS

        __hash__ = None

    backend._identity = (Replaced("w", "1", "c", pages_match=True), of_old)
    assert backend._current_identity(to_write=True) == of_old
    assert backend._identity[0] is newer, "nobody overtook"


OTHERS: dict[str, dict[str, Any]] = {
    "weights": {"weights": Weights("other", "1", "c", pages_match=True)},
    "version": {"weights": Weights("w", "2", "c", pages_match=True)},
    "configuration": {"weights": Weights("w", "1", "other", pages_match=True)},
    "rank": {"tp_rank": 1, "tp_size": 2},
    "number of ranks": {"tp_size": 2},
    "pipeline rank": {"pp_rank": 1, "pp_size": 2},
}


@pytest.mark.parametrize("other", OTHERS)
def test_pages_of_another_identity_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    pool = make_pool("page_first")
    make_backend(pool, tmp_path).batch_set_v1(KEYS, slots(0))
    changes = dict(OTHERS[other])
    if weights := changes.pop("weights", None):
        monkeypatch.setattr(WATCH, "current", weights)
    stranger = make_backend(pool, tmp_path, **changes)
    assert stranger.batch_exists(KEYS) == 0
    assert stranger.batch_get_v1(KEYS, slots(PAGES)) == [False] * PAGES


@pytest.mark.parametrize("wrapped", [None, "file"])
def test_a_storage_that_was_cleared_holds_nothing_and_takes_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrapped: str | None
) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "upstream"))
    backend = make_backend(make_pool("page_first"), tmp_path / "store", wrapped=wrapped)
    backend.batch_set_v1(KEYS, slots(0))
    backend.clear()
    assert backend.batch_exists(KEYS) == 0
    assert not list((tmp_path / "store").rglob("*.page"))
    assert backend.batch_set_v1(KEYS, slots(0)) == [True] * PAGES
    assert backend.batch_get_v1(KEYS, slots(PAGES)) == [True] * PAGES


def test_pages_of_another_layout_are_not_there(tmp_path: Path) -> None:
    make_backend(make_pool("page_first"), tmp_path).batch_set_v1(KEYS, slots(0))
    assert make_backend(make_pool("layer_first"), tmp_path).batch_exists(KEYS) == 0


def test_nothing_moves_while_weights_change_and_nothing_of_old_weights_is_stored(tmp_path: Path) -> None:
    backend = make_backend(make_pool("page_first"), tmp_path)
    backend.batch_set_v1(KEYS[:4], slots(0, 4))
    WATCH.changing()
    assert backend.batch_exists(KEYS) == 0
    assert backend.batch_get_v1(KEYS[:4], slots(PAGES, 4)) == [False] * 4
    assert backend.batch_set_v1(KEYS[4:], slots(4, 4)) == [False] * 4
    WATCH.current = Weights("w", "1", "c", pages_match=False)
    assert backend.batch_exists(KEYS) == 4
    assert backend.batch_set_v1(KEYS[4:], slots(4, 4)) == [False] * 4
    WATCH.cache_was_reset()
    assert backend.batch_set_v1(KEYS[4:], slots(4, 4)) == [True] * 4
    assert WATCH.counters.values()["unwritten_pages", "weights"] == 8


def test_pages_read_while_weights_change_are_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make_backend(make_pool("page_first"), tmp_path)
    backend.batch_set_v1(KEYS, slots(0))
    read = backend._transfer.read

    def read_meanwhile(*arguments: Any) -> Iterator[Page]:
        yield from read(*arguments)
        WATCH.current = Weights("other", "2", "c", pages_match=True)

    monkeypatch.setattr(backend._transfer, "read", read_meanwhile)
    assert backend.batch_get_v1(KEYS, slots(PAGES)) == [False] * PAGES


@pytest.mark.parametrize(
    ("answer", "flags"),
    [
        (None, [False, False]),
        (True, [True, True]),
        ([True, False], [True, False]),
        ([True, False, True, True], [False, True]),
        ([False, True, True, True], [False, True]),
    ],
)
def test_a_record_is_there_when_both_halves_are(answer: Any, flags: list[bool]) -> None:
    assert answers_of(answer, 2) == flags


def test_an_answer_for_another_number_of_records_is_an_error() -> None:
    with pytest.raises(OSError, match="3 pages instead of 2"):
        answers_of([True] * 3, 2)


def test_a_refused_update_changes_nothing_but_one_of_several_steps_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_memory = Weights("w", "1", "c", pages_match=False)
    monkeypatch.setattr(WATCH, "_read", lambda: in_memory)
    WATCH.changing()
    WATCH.changed()
    assert WATCH.current == WEIGHTS
    assert WATCH.counters["weight_updates"] == 0
    # To other weights and back, in a session in which requests were served.
    WATCH.changing()
    WATCH.changing()
    WATCH.changed()
    assert WATCH.current == in_memory
    assert WATCH.counters["weight_updates"] == 1
    in_memory = Weights("other", "1", "c", pages_match=False)
    WATCH.changing()
    WATCH.changed()
    assert WATCH.current == in_memory
    assert WATCH.counters["weight_updates"] == 2


def test_the_fingerprint_sees_every_single_change() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5)).to(torch.bfloat16)
    seen = {fingerprint(model)}
    assert fingerprint(model) in seen
    with torch.no_grad():
        for tensor in [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]:
            for index in range(tensor.numel()):
                before = tensor.view(-1)[index].clone()
                tensor.view(-1)[index] = before + 1
                seen.add(fingerprint(model))
                tensor.view(-1)[index] = before
        weight = model[0].weight
        weight[[0, 1]] = weight[[1, 0]]
        seen.add(fingerprint(model))
    assert len(seen) == 1 + 7 * 5 + 5 + 4 * 5 + 1


def test_adapters_of_the_same_name_and_other_weights_are_other_weights() -> None:
    """Upstream names pages of ``--lora-paths`` by the adapter's name and path."""

    def runner(**adapters: torch.Tensor) -> SimpleNamespace:
        loras = {
            name: SimpleNamespace(
                scaling=4.0,
                layers=[SimpleNamespace(weights={"q_proj.lora_A.weight": tensor})],
                embedding_layers={},
                added_tokens_embeddings={},
            )
            for name, tensor in adapters.items()
        }
        return SimpleNamespace(
            model=model, kv_cache_dtype=torch.float32, lora_manager=SimpleNamespace(loras=loras)
        )

    model = torch.nn.Linear(4, 4)
    alone = server_fingerprint(runner())
    assert alone == fingerprint(model)
    assert alone == server_fingerprint(SimpleNamespace(model=model, kv_cache_dtype=torch.float32))
    first, other = torch.ones(4, 4), torch.ones(4, 4) + torch.eye(4)
    seen = [alone, *(server_fingerprint(runner(one=each)) for each in (first, other))]
    seen += [server_fingerprint(runner(two=first)), server_fingerprint(runner(one=first, two=other))]
    assert len(set(seen)) == len(seen)
    assert server_fingerprint(runner(two=other, one=first)) == seen[-1]


def test_the_fingerprint_of_a_quantized_cache_names_its_format_and_its_scales() -> None:
    """In a pool both formats are uint8; scales out of a file are numbers on the layers."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))

    def seen(dtype: torch.dtype) -> str:
        return server_fingerprint(SimpleNamespace(model=model, kv_cache_dtype=dtype))

    prints = [seen(dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)]
    assert prints[0] == seen(torch.float32) == fingerprint(model)
    for value in (1.0, 0.5, torch.tensor(0.25)):
        model[1].k_scale = value
        prints.append(seen(torch.float8_e4m3fn))
    model[1].v_scale = 0.25
    prints.append(seen(torch.float8_e4m3fn))
    assert len(set(prints)) == len(prints)
    assert seen(torch.bfloat16) == prints[0]


def test_the_fingerprint_sees_whole_words_that_change_places() -> None:
    """Eight bytes, which are summed at once: the sum alone stays the same."""
    model = torch.nn.Linear(2, 3, bias=False)
    before = fingerprint(model)
    with torch.no_grad():
        model.weight[[0, 1]] = model.weight[[1, 0]]
    assert fingerprint(model) != before


# ---- several ranks ----

BAD_PAGE = {0: 5, 1: 3}


def run_rank(rank: int, folder: Path, rendezvous: str, results: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    WATCH.current = WEIGHTS
    pool = make_pool("page_first", seed=rank)
    backend = make_backend(pool, folder, tp_rank=rank, tp_size=2)
    backend.batch_set_v1(KEYS, slots(0))
    torch.distributed.barrier()
    identity = backend._current_identity(to_write=False)
    path = page_file(backend._pages, identity, KEYS[BAD_PAGE[rank]])
    path.write_bytes(path.read_bytes()[:-1])
    got = backend.batch_get_v1(KEYS, slots(PAGES))
    own = all(map(torch.equal, pages_of(pool, 0, got.count(True)), pages_of(pool, PAGES, got.count(True))))
    controller = SimpleNamespace(prefetch_completion_sync_groups=[torch.distributed.group.WORLD])
    controller._all_reduce = lambda *arguments: HiCacheController._all_reduce(controller, *arguments)
    ack = PrefetchAck("r", completed_tokens=got.count(True) * PAGE_TOKENS, operation=SimpleNamespace())
    _around_reduce_ack(HiCacheController._reduce_prefetch_ack, controller, ack)
    results.put((rank, got.count(True), ack.completed_tokens, own))
    torch.distributed.destroy_process_group()


def test_a_page_that_fails_on_one_rank_is_a_miss_on_all(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")  # spawned ones would spend 10 s importing sglang
    results = context.SimpleQueue()
    arguments = (tmp_path / "store", str(tmp_path / "rendezvous"), results)
    ranks = [context.Process(target=run_rank, args=(rank, *arguments)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    got = sorted(results.get() for _ in range(2))
    # Each rank served its own pages up to its own bad one; both use what both have.
    assert got == [(0, 5, 3 * PAGE_TOKENS, True), (1, 3, 3 * PAGE_TOKENS, True)]


# ---- launch ----
