"""What benchmark/peers sends, and the slice of a model that it counts on."""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer

from benchmark.peers.slices import first_layers
from benchmark.peers.workloads import LONGEST, PAGE, WORKLOADS, Sent, Texts, in_turns, unique_tokens


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory, probe_model: Path) -> Texts:
    """Recordings in the form of the public ones; the longest session passes the limit at its last turn."""
    data = tmp_path_factory.mktemp("data")
    rng = Random(1)

    def words(count: int) -> str:
        return " ".join(rng.choice(("amber", "copper", "lantern", "marble")) for _ in range(count))

    for kind, sizes in (("miniswe", (100, 300, 5000)), ("taubench", (30, 60, 90))):
        (data / "agents" / kind).mkdir(parents=True)
        for session in range(8):
            whole = words(sizes[-1])
            rows = [{"timestamp": at, "input": whole[: 7 * size]} for at, size in enumerate(sizes)]
            file = data / "agents" / kind / f"{session}.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    (data / "prompts").mkdir()
    history = [{"user": words(40), "bot": words(60)} for _ in range(4)]
    (data / "prompts" / "mtbench101.jsonl").write_text((json.dumps({"history": history}) + "\n") * 40)
    return Texts(data, Tokenizer.from_file(str(probe_model / "tokenizer.json")))


def test_a_session_is_cut_at_the_turn_that_would_be_too_long(texts: Texts) -> None:
    sessions = texts.sessions("miniswe")
    assert len(sessions) == 8
    for prompts in sessions:
        assert len(prompts) == 2  # of three
        assert max(map(len, prompts)) <= LONGEST
        shorter, longer = prompts
        assert longer[: len(shorter) - 1] == shorter[:-1]  # a turn may end within a token


@pytest.mark.parametrize("name", WORKLOADS)
def test_prompts_fit_and_the_same_seed_sends_the_same(texts: Texts, name: str) -> None:
    def first(seed: int) -> list[Sent]:
        return list(islice(WORKLOADS[name](texts, Random(seed)), 12))

    requests = first(1)
    assert requests == first(1)
    assert requests != first(2)
    assert all(0 < len(request.ids) <= LONGEST for request in requests)


@given(st.lists(st.lists(st.integers(0, 1), max_size=4 * PAGE), max_size=4))
def test_unique_tokens_are_those_of_different_whole_beginnings(prompts: list[list[int]]) -> None:
    beginnings = {tuple(ids[:end]) for ids in prompts for end in range(1, len(ids) + 1) if end % PAGE == 0}
    assert unique_tokens([Sent(0, ids) for ids in prompts]) == PAGE * len(beginnings)


def test_turns_of_a_session_stay_in_order() -> None:
    sessions = iter([[[number, turn] for turn in range(3)] for number in range(50)])
    seen: dict[int, list[int]] = {}
    for request in islice(in_turns(sessions, 4, Random(3)), 60):
        number, turn = request.ids
        seen.setdefault(number, []).append(turn)
        assert sum(len(turns) < 3 for turns in seen.values()) <= 4
    assert all(turns == list(range(len(turns))) for turns in seen.values())


def test_a_slice_holds_the_first_layers_and_all_else(probe_model: Path, tmp_path: Path) -> None:
    folder = first_layers(probe_model, 1, tmp_path)
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 1
    with safe_open(probe_model / "model.safetensors", "pt") as whole:
        wanted = {name for name in whole.keys() if not re.search(r"layers\.[1-9]", name)}  # noqa: SIM118
    with safe_open(folder / "model.safetensors", "pt") as part:
        assert set(part.keys()) == wanted
    assert first_layers(probe_model, 1, tmp_path) == folder
