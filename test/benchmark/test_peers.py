"""What benchmark/peers sends, and the slice of a model that it counts on."""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer

from benchmark.peers.recorded import coding, cut, service
from benchmark.peers.slices import first_layers
from benchmark.peers.workloads import LONGEST, PAGE, WORKLOADS, Sent, Texts, in_turns, unique_tokens


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory, probe_model: Path) -> Texts:
    """Recordings in the form of the public ones; the last turn of each coding agent is too long."""
    data = tmp_path_factory.mktemp("data")
    rng = Random(1)

    def words(count: int) -> str:
        return " ".join(rng.choice(("amber", "copper", "lantern", "marble")) for _ in range(count))

    (data / "agents" / "miniswe").mkdir(parents=True)
    for session in range(8):
        whole = words(14_000)
        rows = [{"timestamp": at, "input": whole[: 7 * size]} for at, size in enumerate((100, 300, 14_000))]
        file = data / "agents" / "miniswe" / f"{session}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    runs = [
        [{"role": role, "content": words(50)} for role in ("system", *("user", "assistant") * 3)]
        for _ in range(8)
    ]
    whole_runs = json.dumps([{"traj": messages} for messages in runs])
    (data / "agents" / "tau_bench_airline.json").write_text(whole_runs)
    (data / "prompts").mkdir()
    history = [{"user": words(40), "bot": words(60)} for _ in range(4)]
    (data / "prompts" / "mtbench101.jsonl").write_text((json.dumps({"history": history}) + "\n") * 40)
    return Texts(data, Tokenizer.from_file(str(probe_model / "tokenizer.json")))


def test_a_coding_agent_is_cut_at_the_turn_that_would_be_too_long(texts: Texts) -> None:
    sessions = texts.sessions(coding)
    assert len(sessions) == 8
    for session in sessions:
        assert session.left_out == 1
        shorter, longer = session.prompts
        assert len(longer) <= LONGEST
        assert longer[: len(shorter) - 1] == shorter[:-1]  # a turn may end within a token


def test_each_answer_of_a_service_is_asked_for_with_all_that_was_said(texts: Texts) -> None:
    for session in texts.sessions(service):
        assert session.left_out == 0
        first, second, third = session.prompts
        assert second[: len(first)] == first
        assert third[: len(second)] == second


@given(st.lists(st.integers(1, 9), max_size=6), st.integers(1, 9))
def test_nothing_of_a_session_comes_behind_its_cut(lengths: list[int], longest: int) -> None:
    session = cut([[0] * length for length in lengths], longest)
    kept = [len(prompt) for prompt in session.prompts]
    assert kept == lengths[: len(kept)]
    assert len(kept) + session.left_out == len(lengths)
    assert all(length <= longest for length in kept)
    assert not session.left_out or lengths[len(kept)] > longest


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


def test_a_slice_holds_the_first_layers_with_one_group_of_heads_and_all_else(
    probe_model: Path, tmp_path: Path
) -> None:
    folder = first_layers(probe_model, 1, tmp_path)
    whole_config, config = (json.loads((each / "config.json").read_text()) for each in (probe_model, folder))
    group = whole_config["num_attention_heads"] // whole_config["num_key_value_heads"]
    assert config["num_hidden_layers"] == config["num_key_value_heads"] == 1
    assert config["num_attention_heads"] == group
    head = config["head_dim"]
    widths = {"q": (group * head, None), "k": (head, None), "v": (head, None), "o": (None, group * head)}
    with (
        safe_open(probe_model / "model.safetensors", "pt") as whole,
        safe_open(folder / "model.safetensors", "pt") as part,
    ):
        assert set(part.keys()) == {name for name in whole.keys() if not re.search(r"layers\.[1-9]", name)}  # noqa: SIM118
        for name in part.keys():  # noqa: SIM118
            weight, rest = part.get_tensor(name), whole.get_tensor(name)
            projection = re.search(r"self_attn\.([qkvo])_proj", name)
            rows, columns = widths[projection[1]] if projection else (None, None)
            assert torch.equal(weight, rest[:rows, :columns] if weight.ndim > 1 else rest)
    assert first_layers(probe_model, 1, tmp_path) == folder
