"""Indexers that learn from a model's attention: what they learn from, whether they learn, what is asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import save_file

from benchmark.native_scores.estimators import of_indexer, page_estimates, shared
from benchmark.native_scores.indexer import Indexer, IndexerShape, hadamard, in_fp8
from benchmark.native_scores.placement import candidates_at, cuts, hits, top
from benchmark.native_scores.producers import Observed
from benchmark.native_scores.seen import Seen
from benchmark.native_scores.summary import LEAST_WINDOWS, placement_rows, verdict
from benchmark.native_scores.teacher import (
    WatchedDecoder,
    head_weights,
    is_choosable,
    read_lesson,
    shared_attention,
    write_lesson,
)
from benchmark.native_scores.texts import UNSEEN, judged_part, learned_part
from benchmark.native_scores.training import divergence, load_indexers, train, train_layer
from benchmark.sparse.real.choosing import chosen_answers, exact_answers
from benchmark.sparse.real.windows import Task, Window
from sgl_importance_lab.study.statistics import Estimate

LAYERS, HEADS, KV_HEADS, DIM, WIDTH, VOCABULARY = 2, 4, 2, 8, 32, 64
TOKENS, PAGE = 320, 16
SHAPE = IndexerShape(WIDTH, heads=4, dim=8, theta=10_000.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, large enough for attention that is not flat."""
    folder = tmp_path_factory.mktemp("model")
    config = {"model_type": "llama", "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    config |= {"num_key_value_heads": KV_HEADS, "head_dim": DIM, "hidden_size": WIDTH, "rms_norm_eps": 1e-5}
    config |= {"vocab_size": VOCABULARY, "max_position_embeddings": 1024, "rope_theta": 10_000.0}
    (folder / "config.json").write_text(json.dumps(config))
    draws = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draws) * 1.5 * shape[-1] ** -0.5

    weights = {"model.embed_tokens.weight": weight(VOCABULARY, WIDTH), "model.norm.weight": torch.ones(WIDTH)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}.{norm}.weight"] = torch.ones(WIDTH)
        for part, count in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            weights[f"{at}.self_attn.{part}_proj.weight"] = weight(count * DIM, WIDTH)
        weights[f"{at}.self_attn.o_proj.weight"] = weight(WIDTH, HEADS * DIM)
        weights[f"{at}.mlp.gate_proj.weight"] = weight(64, WIDTH)
        weights[f"{at}.mlp.up_proj.weight"] = weight(64, WIDTH)
        weights[f"{at}.mlp.down_proj.weight"] = weight(WIDTH, 64)
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def decoder(model: Path) -> WatchedDecoder:
    return WatchedDecoder(model)


@pytest.fixture(scope="module")
def lesson(decoder: WatchedDecoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lessons") / "some.safetensors"
    with torch.no_grad():
        write_lesson(decoder, tokens_of(0), torch.arange(256, TOKENS), path)
    return path


def tokens_of(seed: int, count: int = TOKENS) -> torch.Tensor:
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


def test_what_is_learned_from_and_what_is_judged_are_apart() -> None:
    text = "".join(map(chr, range(0x100, 0x500)))
    assert learned_part(text)
    assert judged_part(text)
    assert not set(learned_part(text)) & set(judged_part(text))
    assert UNSEEN


def test_a_lesson_is_the_attention_of_all_heads_over_what_may_be_left_out(
    decoder: WatchedDecoder, lesson: Path
) -> None:
    inputs, attention, rows = read_lesson(lesson, 1)
    assert inputs.shape == (TOKENS, WIDTH)
    assert attention.shape == (len(rows), TOKENS)
    assert attention.float().sum(dim=1) == pytest.approx(torch.ones(len(rows)), abs=2e-3)
    assert not attention[~is_choosable(rows, TOKENS)].any()
    queries, keys, _ = decoder.projected(1, inputs.float())
    assert queries.shape == (TOKENS, HEADS, DIM)
    assert keys.shape == (TOKENS, KV_HEADS, DIM)


def test_attention_of_single_queries_is_that_of_the_formula() -> None:
    queries, keys = torch.randn(1, 2, 4), torch.randn(3, 1, 4)
    weights = head_weights(queries, keys, torch.tensor([1]))
    for head in range(2):
        logits = (queries[0, head] @ keys[:2, 0].T) / 2
        assert weights[head, 0, :2].tolist() == pytest.approx(logits.softmax(dim=0).tolist(), abs=1e-6)
        assert weights[head, 0, 2] == 0
    assert shared_attention(weights, torch.tensor([1])).sum() == 0  # nothing to choose so early


def test_scores_are_those_of_the_formula() -> None:
    torch.manual_seed(0)
    indexer = Indexer(IndexerShape(6, heads=2, dim=4, theta=100.0)).requires_grad_(False)
    inputs, first = torch.randn(5, 6), torch.zeros(5, dtype=torch.int64)
    keys = indexer.keys_of(inputs, first)  # at position 0 nothing is rotated
    queries = indexer.queries(inputs).view(5, 2, 4)
    weights = indexer.weights(inputs)
    by_hand = [
        [
            sum(float(weights[t, h] * max(queries[t, h] @ keys[s], 0.0)) for h in range(2)) / 8**0.5
            for s in range(5)
        ]
        for t in range(5)
    ]
    assert indexer.scores(inputs, first, keys).tolist() == [pytest.approx(row, abs=1e-5) for row in by_hand]


def test_scores_hang_on_distance_alone() -> None:
    torch.manual_seed(0)
    indexer = Indexer(SHAPE).requires_grad_(False)
    inputs, positions = torch.randn(7, WIDTH), torch.arange(7)
    near, far = (
        indexer.scores(inputs, at, indexer.keys_of(inputs, at)) for at in (positions, positions + 500)
    )
    assert near.flatten().tolist() == pytest.approx(far.flatten().tolist(), abs=1e-4)
    turned = indexer.scores(inputs, positions + 3, indexer.keys_of(inputs, positions))
    assert (turned - near).abs().max() > 1e-3


def test_keys_in_fp8_are_nearly_the_keys() -> None:
    keys = torch.randn(50, 32)
    matrix = hadamard(32)
    assert (matrix @ matrix.T - torch.eye(32)).abs().max() < 1e-5
    error = (in_fp8(keys) - keys).norm(dim=1) / keys.norm(dim=1)
    assert 0 < error.max() < 0.05


def test_an_indexer_learns(lesson: Path) -> None:
    known = read_lesson(lesson, 0)
    torch.manual_seed(0)
    with torch.no_grad():
        before = divergence(Indexer(SHAPE), known).item()
        after = divergence(train(SHAPE, [known], steps=150, seed=0), known).item()
    assert 0 < after < 0.8 * before


def test_trained_layers_are_read_back_and_the_seed_decides(lesson: Path, tmp_path: Path) -> None:
    for folder in ("one", "other"):
        losses = [
            train_layer(SHAPE, layer, [lesson], [lesson], tmp_path / folder / "dim8", steps=3, seed=7)
            for layer in range(LAYERS)
        ]
        assert all(loss["before"] > 0 for loss in losses)
        rows = [{"layer": layer} | loss for layer, loss in enumerate(losses)]
        report = {"shape": vars(SHAPE), "layers": rows}
        (tmp_path / folder / "dim8/report.json").write_text(json.dumps(report))
    (one, other) = (load_indexers(tmp_path / name, ["dim8/sum", "bits"])["dim8"] for name in ("one", "other"))
    assert len(one.indexers) == LAYERS
    for first, second in zip(one.indexers.values(), other.indexers.values(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    with pytest.raises(FileNotFoundError, match=r"train\.py with --dim 16"):
        load_indexers(tmp_path / "one", ["dim16/max"])


def test_what_was_seen_once_is_read_again(decoder: WatchedDecoder, tmp_path: Path) -> None:
    path = tmp_path / "windows/some.safetensors"
    with torch.no_grad():
        first = Seen(decoder, tokens_of(1, 64), path)
        again = Seen(decoder, tokens_of(2, 64), path)  # the file, not the tokens
    for name in ("keys", "values", "queries", "inputs"):
        assert torch.equal(getattr(first, name), getattr(again, name))


def test_choosing_every_page_changes_nothing_and_each_task_is_scored_with_its_own_keys(
    decoder: WatchedDecoder, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    indexers = {layer: Indexer(SHAPE).requires_grad_(False) for layer in range(LAYERS)}
    tasks = (
        Task("plain", (5,), tuple(range(24))),
        Task("quoted", tuple(range(18)), (1, 2, 3)),
        Task("record", (9, 8), (7,)),
    )
    window = Window("text", 0, tokens_of(3, 256), tasks)
    with torch.no_grad():
        seen = Seen(decoder, window.tokens, tmp_path / "seen.safetensors")
        exact = exact_answers(decoder, window, seen)
        estimator = of_indexer(indexers, decoder, seen, tasks, list(decoder.inputs), "sum")
        for estimates in (estimator, shared("sum"), shared("max")):
            found, read = chosen_answers(
                decoder, window, seen, exact, estimates, grain="layer", share=0.999, page_size=PAGE
            )
            assert read.union < read.pages
            nothing, unread = chosen_answers(
                decoder, window, seen, exact, estimates, grain="layer", share=0.5, page_size=PAGE, layers=()
            )
            assert unread.pages == 0
            for own, known in zip(nothing, exact, strict=True):
                assert (own - known.log_probabilities).abs().max() < 1e-3
            for own, known in zip(found, exact, strict=True):
                assert own.shape == known.log_probabilities.shape
                assert (own.exp() - known.log_probabilities.exp()).abs().max() < 0.2


def test_pages_are_as_good_as_their_tokens() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0, 2.0]])
    assert page_estimates(scores, 2, "max").tolist() == [[3.0, 2.0]]
    assert page_estimates(scores, 2, "sum")[0].tolist() == pytest.approx([3.1269, 2.6931], abs=1e-4)


def test_producers_agree_where_one_page_has_it_all() -> None:
    """All keys are alike but those of page 2, which every query wants."""
    keys = torch.zeros(6 * PAGE, KV_HEADS, DIM)
    keys[2 * PAGE : 3 * PAGE] = 3.0
    rows = torch.arange(5 * PAGE, 6 * PAGE)
    observed = Observed(torch.ones(PAGE, HEADS, DIM), keys, rows, page_size=PAGE, candidates=slice(1, 4))
    for producer in (observed.mass, observed.peak, observed.quest):
        assert producer().argmax() == 1
        assert producer().shape == (3,)
    # BLASST leaves out what comes after the largest: what comes before has not been beaten yet.
    assert observed.blasst().tolist() == pytest.approx([1.0, 1.0, 0.0], abs=1e-3)
    torch.manual_seed(0)
    native = observed.native(Indexer(SHAPE).requires_grad_(False), torch.randn(6 * PAGE, WIDTH))
    assert native.sum(dim=1).tolist() == pytest.approx([1.0] * PAGE, abs=1e-5)


def test_placement_by_what_comes_is_best_and_by_chance_as_good_as_its_share(
    decoder: WatchedDecoder, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    indexers = {layer: Indexer(SHAPE).requires_grad_(False) for layer in range(LAYERS)}
    with torch.no_grad():
        seen = Seen(decoder, tokens_of(4, 512), tmp_path / "seen.safetensors")
        found = hits(seen, indexers, page_size=PAGE, seed=0)
    rates = {key: placed / wanted for key, (placed, wanted) in found.items()}
    assert rates["future", "layer", "exact"] == max(
        rate for (_, grain, reader), rate in rates.items() if (grain, reader) == ("layer", "exact")
    )
    assert 0.05 < rates["uniform", "layer", "exact"] < 0.45
    assert {reader for _, _, reader in rates} == {"exact", "native"}
    assert all(candidates_at(cut, PAGE).stop * PAGE + 64 <= cut for cut in cuts(512))


def test_the_best_are_counted_by_their_share() -> None:
    assert top(torch.tensor([[1.0, 4.0, 3.0, 2.0]]), 0.5).tolist() == [[False, True, True, False]]
    assert top(torch.tensor([2.0, 1.0]), 0.1).tolist() == [True, False]


def test_verdicts_ask_for_windows() -> None:
    assert verdict(Estimate(0.9, 0.85, 0.95, LEAST_WINDOWS)) == "supported"
    assert verdict(Estimate(0.7, 0.65, 0.75, LEAST_WINDOWS)) == "refuted"
    assert verdict(Estimate(0.8, 0.75, 0.85, LEAST_WINDOWS)) == "undecided"
    assert verdict(Estimate(0.9, 0.85, 0.95, LEAST_WINDOWS - 1)).startswith("none")


def test_hits_become_rates_beside_the_native_ones() -> None:
    counts = [["native", "layer", "exact", 5, 10], ["mass", "layer", "exact", 4, 10]]
    rows = [
        {"measure": "placement", "arm": "dim8", "source": "a", "number": n, "tokens": 64, "counts": counts}
        for n in range(LEAST_WINDOWS)
    ]
    native, mass = placement_rows(rows)
    assert native["hit_rate"]["value"] == 0.5
    assert mass["of_native"]["value"] == pytest.approx(0.8)
    assert (mass["verdict"], "verdict" in native) == ("supported", False)
