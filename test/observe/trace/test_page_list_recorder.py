"""Real servers that record page lists: of full residency, and with pages that a selector chose."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from sgl_importance.observe.trace import open_trace
from sgl_importance.observe.trace.records import RequestAdmitted, Step
from sgl_importance_lab.probe.tasks import make_document
from sgl_importance_lab.probe.tokenizer import encode
from sgl_importance_lab.replay.residency.page_replay import Selection, run_policy
from sgl_importance_lab.replay.residency.page_steps import PageRecording, RequestEnd, load_page_steps

from support.config_file import config_flags
from support.servers import ServerProcess
from support.waiting import wait_until

pytestmark = pytest.mark.server

PAGE_SIZE = 16
ANSWER_TOKENS = 40
COMMON = ("--page-size", str(PAGE_SIZE), "--max-total-tokens", "4096")


def make_prompts() -> list[list[int]]:
    """Questions about three documents, which come back."""
    documents = [make_document(600, seed) for seed in range(3)]
    names = [list(document.records) for document in documents]
    return [encode(documents[at].messages(names[at][turn])) for turn in range(2) for at in range(3)]


def ask(server: ServerProcess) -> list[list[int]]:
    """One request after the other, each when the server is done with the one before."""
    answers = []
    sampling = {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True}
    for number, prompt in enumerate(make_prompts()):
        body = {"rid": f"asked/{number}", "input_ids": prompt, "sampling_params": sampling}
        answers.append(server.post("/generate", body)["output_ids"])
        server.metrics()  # answers when the step behind the last token has run
    return answers


def load_when_written(directory: Path, requests: int) -> PageRecording:
    def is_written() -> bool:
        if not any(directory.iterdir()):
            return False
        recording = load_page_steps(directory)
        ends = [event.request for event in recording.events if isinstance(event, RequestEnd)]
        return [recording.requests[end].kind for end in ends].count("asked") == requests

    wait_until(is_written, look_every=0.1)
    return load_page_steps(directory)


def test_a_server_records_what_every_token_attends_to(probe_model: Path, tmp_path: Path) -> None:
    """Beside the page scores of the same steps, which are summed over heads and layers elsewhere."""
    flags = ("--kv-policy", "observe", *COMMON)
    signal, trace = {"interval": 1}, {"pages": 1, "detail": "steps"}
    recorded = ("--kv-importance-trace", str(tmp_path), *config_flags(signal=signal, trace=trace))
    with ServerProcess(*flags, *config_flags(signal=signal), model=probe_model) as server:
        plain = ask(server)
    with ServerProcess(*flags, *recorded, model=probe_model) as server:
        assert ask(server) == plain
        recording = load_when_written(tmp_path, len(plain))
    names = {
        record.request: record.rid for record in open_trace(tmp_path) if isinstance(record, RequestAdmitted)
    }
    scores = {
        (names[record.request], record.seq_len): record.mass
        for record in open_trace(tmp_path)
        if isinstance(record, Step) and record.phase == "decode" and record.request in names
    }
    by_request = defaultdict(list)
    compared = 0
    # The server's own first request is among them.
    asked = [step for step in recording.steps if recording.requests[step.request].kind == "asked"]
    for step in asked:
        pages = -(-step.seq_len // PAGE_SIZE)
        assert step.wanted.shape == (4, 2, pages)
        assert (np.sort(step.wanted, axis=-1) == np.arange(pages)).all()
        assert (np.diff(step.mass, axis=-1) <= 0).all()
        np.testing.assert_allclose(step.mass.sum(axis=-1), 1, atol=5e-3)
        assert step.read == (None,) * 4
        by_request[step.request].append(step)
        if step.is_generated:
            mass = np.zeros((4, 2, pages))
            np.put_along_axis(mass, step.wanted, step.mass.astype(float), axis=-1)
            expected = scores[recording.requests[step.request].rid, step.seq_len].astype(float)
            np.testing.assert_allclose(mass.mean(axis=(0, 1)), expected, atol=2e-3)
            compared += 1
    assert compared > 200
    assert len(by_request) == len(plain) == 6
    for request, steps in by_request.items():
        prompt = recording.requests[request].input_tokens
        generated = [step.seq_len for step in steps if not step.is_behind]
        assert generated == list(range(prompt, prompt + ANSWER_TOKENS))
        assert [step.is_generated for step in steps] == [False] + [True] * (len(steps) - 1)
    pages_of = {recording.requests[request].rid: recording.requests[request].pages for request in by_request}
    for at in range(3):
        assert len(np.intersect1d(pages_of[f"asked/{at}"], pages_of[f"asked/{at + 3}"])) > 30


def test_a_replay_of_chosen_pages_loads_what_the_server_loaded(probe_model: Path, tmp_path: Path) -> None:
    flags = (
        *("--kv-policy", "importance", "--kv-residency", "tiered", "--kv-device-tokens", "1400", *COMMON),
        *("--max-running-requests", "1"),
        *("--kv-sparse-selector", "bits", "--kv-sparse-budget", "0.2", "--kv-sparse-min-context", "64"),
        *("--kv-importance-trace", str(tmp_path)),
        *config_flags(trace={"pages": 0.4}),
    )
    with ServerProcess(*flags, model=probe_model) as server:
        before = server.get("/kv_importance?limit=1")["pages"]
        answers = ask(server)
        after = server.get("/kv_importance?limit=1")["pages"]
        recording = load_when_written(tmp_path, len(answers))
    chosen = [each for step in recording.steps for each in step.read if each is not None]
    assert len(chosen) > 4 * 6 * (ANSWER_TOKENS - 2)
    slots = before["device_tokens_per_layer"] // PAGE_SIZE - 1
    asked = [request.kind == "asked" for request in recording.requests]  # not the server's own first one
    loaded = after["loaded"] - before["loaded"]
    counts = run_policy(recording, "lru", slots, Selection(share=0))
    assert counts.loaded[asked].sum() > 100
    assert (counts.loaded + counts.streamed)[asked].sum() == loaded
    other = run_policy(recording, "lfu", slots, Selection(share=0))
    assert (other.loaded + other.streamed)[asked].sum() != loaded
    # Exact attention of the same queries is known, too.
    wanted = run_policy(recording, "lru", slots, Selection(share=0.2))
    assert 0.2 < wanted.mass.sum() / wanted.heads.sum() <= 1
