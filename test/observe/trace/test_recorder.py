"""A real server that records: same tokens, and a recording that agrees with what the server itself says."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl_importance.nodes.digests import chain_digests, root_digest
from sgl_importance.observe.trace import TraceReader, open_trace
from sgl_importance.observe.trace.records import (
    EventKind,
    Fold,
    Record,
    RequestAdmitted,
    RequestFinished,
    Step,
    TreeEvent,
)
from sgl_importance_lab.probe.tasks import make_document
from sgl_importance_lab.probe.tokenizer import encode

from support.config_file import config_flags
from support.recordings import wait_until_recorded
from support.servers import ServerProcess

pytestmark = pytest.mark.server

PAGE_SIZE = 16
POOL_TOKENS = 2048
HALF_LIFE = 3.0
ANSWER_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a recording server answered and wrote.

    Attributes:
        prompts: as sent, one after the other.
        replies: of the server that records.
        snapshot: ``/kv_importance`` when the last answer had come.
    """

    prompts: list[list[int]]
    replies: list[dict[str, Any]]
    snapshot: dict[str, Any]
    reader: TraceReader
    records: list[Record]

    def of(self, kind: type) -> list[Any]:
        return [record for record in self.records if isinstance(record, kind)]

    def requests(self) -> dict[int, int]:
        """Position of our prompts by number of the request; without the server's own health checks."""
        rids = {reply["meta_info"]["id"]: i for i, reply in enumerate(self.replies)}
        return {r.request: rids[r.rid] for r in self.of(RequestAdmitted) if r.rid in rids}


def make_prompts() -> list[list[int]]:
    """Questions about five documents: more than the device holds, and each comes back at two distances."""
    documents = [make_document(500, seed) for seed in range(5)]
    order = [0, 0, 1, 1, 0, 2, 2, 3, 3, 2, 4, 4, 0, 1, 2, 0, 3, 4, 1]
    asked: Counter[int] = Counter()
    prompts = []
    for i in order:
        name = list(documents[i].records)[asked[i]]
        asked[i] += 1
        prompts.append(encode(documents[i].messages(name)))
    return prompts


def ask_all(server: ServerProcess, prompts: list[list[int]]) -> list[dict[str, Any]]:
    return [server.generate(p, max_new_tokens=ANSWER_TOKENS, ignore_eos=True) for p in prompts]


FLAGS = (
    *("--kv-policy", "importance", "--page-size", str(PAGE_SIZE), "--max-total-tokens", str(POOL_TOKENS)),
    *("--enable-hierarchical-cache", "--hicache-ratio", "1.3"),
)
SIGNAL = {"half_life_queries": HALF_LIFE, "interval": 1}


@pytest.fixture(scope="module")
def recorded(probe_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    directory = tmp_path_factory.mktemp("trace")
    prompts = make_prompts()
    options = config_flags(signal=SIGNAL, trace={"detail": "steps"})
    tracing = ("--kv-importance-trace", str(directory), *options)
    with ServerProcess(*FLAGS, *tracing, model=probe_model) as server:
        replies = ask_all(server, prompts)
        snapshot = server.get("/kv_importance", limit=1000)
        wait_until_recorded(directory, [reply["meta_info"]["id"] for reply in replies])
    reader = open_trace(directory)
    return Recorded(prompts, replies, snapshot, reader, list(reader))


@pytest.mark.nightly  # By day test_families.py has the tokens of stock from a server that records.
def test_recording_changes_neither_tokens_nor_hits(recorded: Recorded, probe_model: Path) -> None:
    with ServerProcess(*FLAGS, *config_flags(signal=SIGNAL), model=probe_model) as plain:
        plain_replies = ask_all(plain, recorded.prompts)

    def seen(reply: dict[str, Any]) -> tuple[Any, ...]:
        return reply["output_ids"], reply["meta_info"]["cached_tokens"]

    assert list(map(seen, recorded.replies)) == list(map(seen, plain_replies))


def test_the_header_says_what_was_recorded(recorded: Recorded) -> None:
    header = recorded.reader.header
    assert (header.page_size, header.model, header.layers) == (PAGE_SIZE, "checkpoint", (0, 1, 2, 3))
    assert header.options["half_life_queries"] == HALF_LIFE
    assert header.capacity_tokens["device"] == POOL_TOKENS
    assert header.schema["Step"][:3] == ("request", "phase", "seq_len")


def test_requests_are_those_that_were_sent(recorded: Recorded) -> None:
    position = recorded.requests()
    assert sorted(position.values()) == list(range(len(recorded.prompts)))
    for record in recorded.of(RequestAdmitted):
        if record.request not in position:
            continue
        i = position[record.request]
        meta = recorded.replies[i]["meta_info"]
        assert record.input_tokens == meta["prompt_tokens"] == len(recorded.prompts[i])
        assert sum(record.cached_tokens.values()) == meta["cached_tokens"]
        details = meta["cached_tokens_details"] or {"device": 0, "host": 0}
        assert record.cached_tokens["host"] == details["host"]
        digests = chain_digests(root_digest(None, None), recorded.prompts[i], PAGE_SIZE)
        assert [recorded.reader.digest(page) for page in record.pages] == digests
    assert any(record.cached_tokens["host"] for record in recorded.of(RequestAdmitted))
    times = [record.microseconds for record in recorded.of(RequestAdmitted)]
    assert times == sorted(times)
    for record in recorded.of(RequestFinished):
        if record.request in position:
            reply = recorded.replies[position[record.request]]
            assert (record.reason, record.output_tokens) == ("length", len(reply["output_ids"]))
            sequence = recorded.prompts[position[record.request]] + reply["output_ids"]
            assert len(record.pages) == len(sequence) // PAGE_SIZE


def test_every_decode_step_is_there_and_steps_add_up_to_folds(recorded: Recorded) -> None:
    position = recorded.requests()
    for request in position:
        steps = [s for s in recorded.of(Step) if s.request == request]
        prefill = [s for s in steps if s.phase == "prefill"]
        decode = [s for s in steps if s.phase == "decode"]
        prompt = len(recorded.prompts[position[request]])
        # Under overlap scheduling one step runs behind the last token.
        lengths = [step.seq_len for step in decode]
        assert lengths == list(range(prompt + 1, prompt + 1 + len(lengths)))
        assert len(lengths) in (ANSWER_TOKENS - 1, ANSWER_TOKENS)
        folds = [fold for fold in recorded.of(Fold) if fold.request == request]
        assert [(fold.weight, fold.first) for fold in folds] == [(0.5, True), (0.5, False)]
        for fold, phase in zip(folds, (prefill, decode), strict=True):
            body = np.zeros(len(fold.body))
            for step in phase:
                assert step.mass.astype(float).sum() == pytest.approx(1, abs=0.01)
                body[: len(step.body)] += step.query_tokens * step.body.astype(float)
            np.testing.assert_allclose(fold.body, body / body.sum(), atol=2e-3)
            np.testing.assert_allclose(fold.peak.max(), max(s.peak.max() for s in phase), rtol=2e-3)


def test_page_scores_agree_with_the_servers_own_account(recorded: Recorded) -> None:
    """Folds of the recording, weighted as the definition says, give the body mass that the server reports."""
    decay = 0.5 ** (1 / HALF_LIFE)
    paths = {record.request: record.pages for record in recorded.of(RequestFinished)}
    prompts = {record.request: record.pages for record in recorded.of(RequestAdmitted)}
    mass: Counter[int] = Counter()
    weight: Counter[int] = Counter()
    for fold in recorded.of(Fold):
        # At prefill end the path ends with the prompt's last whole page.
        path = prompts[fold.request] if fold.first else paths[fold.request]
        for page, body in zip(path.tolist(), fold.body.tolist(), strict=False):
            factor = decay if fold.first else 1.0
            mass[page] = mass[page] * factor + fold.weight * body
            weight[page] = weight[page] * factor + fold.weight
    numbers = {recorded.reader.digest(page): page for page in mass}
    ancestors: dict[int, np.ndarray] = {}
    for path in paths.values():
        for i, page in enumerate(path.tolist()):
            ancestors.setdefault(page, path[: i + 1])
    last_event = {event.node: event for event in recorded.of(TreeEvent)}
    compared = 0
    for node in recorded.snapshot["nodes"]:
        event = last_event[node["id"]]
        page = numbers.get(event.digest)
        # Pages beyond the last whole page of a fold were never looked at.
        if page is None or not weight[page] or node["tokens"] % PAGE_SIZE:
            continue
        pages = ancestors[page][-node["tokens"] // PAGE_SIZE :].tolist()
        expected = sum(mass[p] / weight[p] for p in pages if weight[p])
        assert node["body_mass"] == pytest.approx(expected, rel=1e-4, abs=1e-6), node
        compared += 1
    assert compared >= 5


def test_tree_events_account_for_the_tree_that_is_left(recorded: Recorded) -> None:
    events = recorded.of(TreeEvent)
    counts = Counter((event.kind, event.tier) for event in events)
    for kind, tier in [
        (EventKind.INSERT, "device"),
        (EventKind.HIT, "device"),
        (EventKind.SPLIT, "device"),
        (EventKind.EVICT, "device"),
        (EventKind.EVICT, "host"),
        (EventKind.BACK_UP, "host"),
        (EventKind.LOAD_BACK, "device"),
        (EventKind.REMOVE, "device"),
    ]:
        assert counts[kind, tier] > 0, (kind, tier)
    alive: set[int] = set()
    for event in events:
        match event.kind:
            case EventKind.INSERT:
                alive.add(event.node)
            case EventKind.SPLIT:
                assert event.node not in alive
                alive.add(event.node)
            case EventKind.REMOVE:
                alive.remove(event.node)
            case EventKind.RESET:
                alive.clear()
            case _:
                assert event.node in alive, event
    assert alive == {node["id"] for node in recorded.snapshot["nodes"]}
    pages = {record.request: len(record.pages) for record in recorded.of(RequestFinished)}
    for event in events:
        if event.kind is EventKind.INSERT and event.request in pages:
            assert event.depth_pages + event.num_pages <= pages[event.request]
