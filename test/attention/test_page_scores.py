"""The reference against a naive oracle, and the eager producer against the reference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sgl_importance_kernels.eager as eager
from sgl_importance_kernels.eager import PageScoreAccumulator
from sgl_importance_lab.conformance.page_scores import (
    PageScores,
    attention_probabilities,
    combine_layers,
    layer_page_scores,
)

HEAD_DIM = 4


@dataclass(frozen=True)
class Case:
    """Random layers of one sequence whose last ``num_q`` tokens are queries."""

    q: list[torch.Tensor]
    k: list[torch.Tensor]
    scale: float
    logit_cap: float
    page_size: int
    sink_tokens: int
    local_tokens: int
    learnt_sinks: list[torch.Tensor] | None = None

    @property
    def sinks(self) -> list[torch.Tensor | None]:
        return [None] * len(self.q) if self.learnt_sinks is None else list(self.learnt_sinks)

    @property
    def num_q(self) -> int:
        return self.q[0].shape[0]

    @property
    def kv_len(self) -> int:
        return self.k[0].shape[0]

    @property
    def positions(self) -> torch.Tensor:
        return torch.arange(self.kv_len - self.num_q, self.kv_len)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv_len = draw(st.integers(1, 40))
    num_q = draw(st.integers(1, min(kv_len, 6)))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 4]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    sharpness = draw(st.sampled_from([0.1, 1.0, 6.0]))
    layers = range(draw(st.integers(1, 3)))
    return Case(
        q=[sharpness * torch.randn(num_q, heads, HEAD_DIM, generator=generator) for _ in layers],
        k=[torch.randn(kv_len, kv_heads, HEAD_DIM, generator=generator) for _ in layers],
        scale=draw(st.sampled_from([0.3, 1.0])),
        logit_cap=draw(st.sampled_from([0.0, 2.5])),
        page_size=draw(st.sampled_from([1, 2, 7, 16, 64])),
        sink_tokens=draw(st.sampled_from([0, 1, 4, 15, 16, 17, 50])),
        local_tokens=draw(st.sampled_from([0, 1, 5, 16, 50])),
        learnt_sinks=[3 * torch.randn(heads, generator=generator) for _ in layers]
        if draw(st.booleans())
        else None,
    )


def reference_scores(case: Case) -> PageScores:
    return combine_layers(
        [
            layer_page_scores(
                q,
                k,
                case.positions,
                scale=case.scale,
                logit_cap=case.logit_cap,
                sinks=sinks,
                page_size=case.page_size,
                sink_tokens=case.sink_tokens,
                local_tokens=case.local_tokens,
            )
            for q, k, sinks in zip(case.q, case.k, case.sinks, strict=True)
        ]
    )


def naive_scores(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mass, peak and body mass by loops over tokens in double precision."""
    num_pages = math.ceil(case.kv_len / case.page_size)
    mass, peak, body = (np.zeros((case.num_q, num_pages)) for _ in range(3))
    for t in range(case.num_q):
        position = case.kv_len - case.num_q + t
        for q, k, sinks in zip(case.q, case.k, case.sinks, strict=True):
            heads, kv_heads = q.shape[1], k.shape[1]
            for head in range(heads):
                kv_head = head * kv_heads // heads
                logits = []
                for i in range(position + 1):
                    dot = sum(float(q[t, head, d]) * float(k[i, kv_head, d]) for d in range(HEAD_DIM))
                    logit = case.scale * dot
                    if case.logit_cap:
                        logit = case.logit_cap * math.tanh(logit / case.logit_cap)
                    logits.append(logit)
                top = max(logits)
                weights = [math.exp(logit - top) for logit in logits]
                total = sum(weights) + (0.0 if sinks is None else math.exp(float(sinks[head]) - top))
                on_page = np.zeros(num_pages)
                for i, weight in enumerate(weights):
                    probability = weight / total
                    on_page[i // case.page_size] += probability
                    mass[t, i // case.page_size] += probability / heads / len(case.q)
                    if case.sink_tokens <= i <= position - case.local_tokens:
                        body[t, i // case.page_size] += probability / heads / len(case.q)
                peak[t] = np.maximum(peak[t], on_page)
        if body[t].sum() > 0:
            body[t] /= body[t].sum()
    return mass, peak, body


def eager_sums(
    case: Case,
    accumulator_type: type[PageScoreAccumulator] = PageScoreAccumulator,
) -> np.ndarray:
    accumulator = accumulator_type(
        seq_len=case.kv_len,
        num_q=case.num_q,
        page_size=case.page_size,
        sink_tokens=case.sink_tokens,
        local_tokens=case.local_tokens,
    )
    for q, k, sinks in zip(case.q, case.k, case.sinks, strict=True):
        padded = torch.full((accumulator.padded_len, *k.shape[1:]), math.nan)
        padded[: case.kv_len] = k
        accumulator.add_layer(
            q,
            padded,
            torch.arange(len(padded), dtype=torch.int32),
            scale=case.scale,
            logit_cap=case.logit_cap,
            sinks=sinks,
        )
    return accumulator.sums().numpy()


@given(cases())
def test_reference_agrees_with_naive_oracle(case: Case) -> None:
    scores = reference_scores(case)
    mass, peak, body = naive_scores(case)
    np.testing.assert_allclose(scores.mass, mass, atol=2e-6)
    np.testing.assert_allclose(scores.peak, peak, atol=2e-6)
    # Renormalising multiplies the rounding error of a body that holds little.
    np.testing.assert_allclose(scores.body, body, atol=2e-6, rtol=1e-4)


@given(cases())
def test_scores_of_a_query_token_add_up(case: Case) -> None:
    scores = reference_scores(case)
    mass = scores.mass.sum(dim=1)
    if case.learnt_sinks is None:
        np.testing.assert_allclose(mass, 1.0, atol=1e-5)
    else:  # they take their share
        assert (mass <= 1 + 1e-5).all()
    visible = case.positions + 1
    has_body = (visible - case.local_tokens > case.sink_tokens).numpy()
    np.testing.assert_allclose(scores.body.sum(dim=1), has_body, atol=1e-5)
    assert (scores.peak >= scores.mass - 1e-6).all()
    assert (scores.peak <= 1 + 1e-5).all()


@given(cases(), st.sampled_from([1, 50, 1 << 24]), st.sampled_from([0, 1 << 24]))
def test_eager_agrees_with_reference(case: Case, block_logits: int, compiled_products: int) -> None:
    scores = reference_scores(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager, "BLOCK_LOGITS", block_logits)
        patch.setattr(eager, "COMPILED_PRODUCTS", compiled_products)
        mass, body, peak = eager_sums(case)
    np.testing.assert_allclose(mass, scores.mass.sum(dim=0), atol=1e-5)
    np.testing.assert_allclose(body, scores.body.sum(dim=0), atol=1e-5, rtol=1e-4)
    np.testing.assert_allclose(peak, scores.peak.amax(dim=0), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_scored_in_float32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 64, generator=generator).to(dtype)
    k = torch.randn(32, 1, 64, generator=generator).to(dtype)
    half = attention_probabilities(q, k, torch.tensor([31]), scale=0.125)
    single = attention_probabilities(q.float(), k.float(), torch.tensor([31]), scale=0.125)
    assert half.dtype == torch.float32
    assert torch.equal(half, single)


def test_a_page_on_the_border_of_the_body_counts_with_its_inner_tokens() -> None:
    # Uniform attention over 8 tokens; the body is tokens 3, 4, 5 of pages {0-3} and {4-7}.
    scores = combine_layers(
        [
            layer_page_scores(
                torch.zeros(1, 1, HEAD_DIM),
                torch.zeros(8, 1, HEAD_DIM),
                torch.tensor([7]),
                scale=1.0,
                page_size=4,
                sink_tokens=3,
                local_tokens=2,
            )
        ]
    )
    np.testing.assert_allclose(scores.body, [[1 / 3, 2 / 3]], rtol=1e-6)
    np.testing.assert_allclose(scores.mass, [[0.5, 0.5]], rtol=1e-6)


def test_a_layer_that_looks_at_sinks_has_little_say_in_the_body_mass() -> None:
    def layer(mass: list[float], body: list[float]) -> PageScores:
        return PageScores(mass=torch.tensor([mass]), peak=torch.tensor([mass]), body=torch.tensor([body]))

    combined = combine_layers([layer([0.98, 0.02, 0.0], [0.0, 0.02, 0.0]), layer([0, 0, 1.0], [0, 0, 0.98])])
    np.testing.assert_allclose(combined.body, [[0.0, 0.02, 0.98]], rtol=1e-6)
    np.testing.assert_allclose(combined.peak, [[0.98, 0.02, 1.0]], rtol=1e-6)


def test_a_body_below_float32_precision_is_empty_not_noise() -> None:
    k = torch.zeros(8, 1, HEAD_DIM)
    k[0, 0, 0] = 200.0  # The sink takes everything: the others get exp(-200), below float32.
    scores = layer_page_scores(
        torch.ones(1, 1, HEAD_DIM),
        k,
        torch.tensor([7]),
        scale=1.0,
        page_size=2,
        sink_tokens=1,
        local_tokens=0,
    )
    combined = combine_layers([scores])
    assert float(combined.body.sum()) == 0.0
    np.testing.assert_allclose(combined.mass, [[1.0, 0, 0, 0]], atol=1e-30)


FIXED = Case(
    q=[torch.randn(3, 4, HEAD_DIM, generator=torch.Generator().manual_seed(1)) * 2],
    k=[torch.randn(40, 2, HEAD_DIM, generator=torch.Generator().manual_seed(2))],
    scale=1.0,
    logit_cap=0.0,
    page_size=8,
    sink_tokens=4,
    local_tokens=6,
)


class OnePageOff(PageScoreAccumulator):
    def add_layer(self, q: torch.Tensor, keys: torch.Tensor, locations: torch.Tensor, **kwargs: Any) -> None:
        super().add_layer(q, keys, locations.roll(self.page_size), **kwargs)


class HeadsSwapped(PageScoreAccumulator):
    def add_layer(self, q: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        super().add_layer(q[:, [0, 2, 1, 3]], *args, **kwargs)


class NotCausal(PageScoreAccumulator):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._first_hidden = self.seq_len  # every token sees what the last one does


@pytest.mark.parametrize("compiled_products", [1 << 24, 0])
@pytest.mark.parametrize("broken", [OnePageOff, HeadsSwapped, NotCausal])
def test_a_broken_producer_is_told_from_the_reference(
    broken: type[PageScoreAccumulator],
    compiled_products: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if broken is NotCausal and compiled_products:
        pytest.skip("there the mask is no part of the accumulator")
    monkeypatch.setattr(eager, "COMPILED_PRODUCTS", compiled_products)
    scores = reference_scores(FIXED)
    expected = np.stack([scores.mass.sum(dim=0), scores.body.sum(dim=0), scores.peak.amax(dim=0)])
    np.testing.assert_allclose(eager_sums(FIXED), expected, atol=1e-5)
    for quantity, broken_quantity in zip(expected, eager_sums(FIXED, broken), strict=True):
        assert np.abs(quantity - broken_quantity).max() > 1e-2
