"""The kit passes what keeps the specification, and fails each way of breaking it that we could think of."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from sgl_importance.interface import BlockImportance, Importance, SignalKind
from sgl_importance_kernels.eager import PageScoreAccumulator
from sgl_importance_lab.conformance import cases
from sgl_importance_lab.conformance.cases import ConsumerCase, ProducerCase, consumer_cases, producer_cases
from sgl_importance_lab.conformance.check import check_accumulator, check_producer
from sgl_importance_lab.conformance.cli import app
from sgl_importance_lab.conformance.memory import PageMemory
from sgl_importance_lab.conformance.producers import reference_producer

FOLDER = Path(cases.__file__).parent
SCRIPT = Path(__file__).parents[2] / "scripts" / "make_conformance_cases.py"


def cpu_producer(case: ProducerCase) -> BlockImportance:
    """The arithmetic of the torch-native backend, without a server."""
    kv_len, num_q = case.k.shape[1], case.q.shape[1]
    scores = PageScoreAccumulator(
        seq_len=kv_len,
        num_q=num_q,
        page_size=case.page_size,
        sink_tokens=case.sink_tokens,
        local_tokens=case.local_tokens,
    )
    for q, k in zip(torch.from_numpy(case.q), torch.from_numpy(case.k), strict=True):
        padded = torch.full((scores.padded_len, *k.shape[1:]), 9.0)
        padded[:kv_len] = k
        scores.add_layer(
            q,
            padded,
            torch.arange(len(padded), dtype=torch.int32),
            scale=case.scale,
            logit_cap=case.logit_cap,
        )
    mass, body, peak = scores.sums().numpy()
    return BlockImportance(
        mass=mass / np.float32(num_q),
        body_mass=body / np.float32(num_q),
        peak=peak,
        page_size=case.page_size,
        query_tokens=num_q,
    )


@pytest.mark.parametrize("producer", [reference_producer, cpu_producer])
def test_our_producers_conform(producer: Callable[[ProducerCase], BlockImportance]):
    verdicts = check_producer(producer, tolerance=1e-6)
    assert [verdict for verdict in verdicts if not verdict.passed] == []
    assert len(verdicts) == len(producer_cases()) >= 12


def off_by_one_page(case: ProducerCase) -> BlockImportance:
    said = reference_producer(case)
    return replace(said, **{name: np.roll(getattr(said, name), 1) for name in ("mass", "body_mass", "peak")})


def mean_and_maximum_swapped(case: ProducerCase) -> BlockImportance:
    said = reference_producer(case)
    return replace(said, mass=said.peak / said.peak.sum(), peak=said.mass)


def not_normalised(case: ProducerCase) -> BlockImportance:
    said = reference_producer(case)
    return replace(said, mass=said.mass * np.float32(case.q.shape[2]))


def doubles(case: ProducerCase) -> BlockImportance:
    said = reference_producer(case)
    return replace(said, peak=said.peak.astype(np.float64))


def not_causal(case: ProducerCase) -> BlockImportance:
    """Every query token sees the whole sequence."""
    last = replace(case, q=case.q[:, -1:])
    said = [reference_producer(replace(last, q=case.q[:, n : n + 1])) for n in range(case.q.shape[1])]
    return replace(
        said[0],
        mass=np.mean([each.mass for each in said], axis=0, dtype=np.float32),
        body_mass=np.mean([each.body_mass for each in said], axis=0, dtype=np.float32),
        peak=np.max([each.peak for each in said], axis=0),
        query_tokens=case.q.shape[1],
    )


def without(**changes: float) -> Callable[[ProducerCase], BlockImportance]:
    def producer(case: ProducerCase) -> BlockImportance:
        return reference_producer(replace(case, **changes))

    return producer


def raising(case: ProducerCase) -> BlockImportance:
    raise MemoryError("no room")


@pytest.mark.parametrize(
    ("twin", "failing", "says"),
    [
        (off_by_one_page, "one query token, one layer, one head", "mass of page"),
        (mean_and_maximum_swapped, "heads: mean for mass, maximum for peak", "mass of page"),
        (not_normalised, "grouped query heads", "mass sums to"),
        (doubles, "one token per page", "peak: float64, not float32"),
        (not_causal, "several query tokens: causal, mean over tokens, maximum for peak", "of page"),
        (without(sink_tokens=0), "sinks and neighbourhood end within pages", "body_mass of page"),
        (without(logit_cap=0.0), "logit soft cap", "of page"),
        (lambda case: None, "one page holds all", "gave NoneType"),
        (raising, "one page holds all", "raised MemoryError: no room"),
    ],
)
def test_a_broken_producer_fails_where_it_is_broken(
    twin: Callable[[ProducerCase], BlockImportance], failing: str, says: str
):
    verdicts = {verdict.case: verdict for verdict in check_producer(twin)}
    problem = verdicts[failing].problem
    assert problem is not None
    assert says in problem


def test_of_a_proxy_only_the_form_is_checked():
    def proxy(case: ProducerCase) -> BlockImportance:
        said = reference_producer(case)
        return replace(said, mass=said.mass * 7, kind=SignalKind.PROXY)

    def shapeless(case: ProducerCase) -> BlockImportance:
        said = proxy(case)
        return replace(said, mass=said.mass * np.float32("nan"))

    assert all(verdict.passed for verdict in check_producer(proxy))
    assert not any(verdict.passed for verdict in check_producer(shapeless))


class Raising(PageMemory):
    def get_importance(self, key: bytes) -> Importance | None:
        known = super().get_importance(key)
        if known is None:
            raise KeyError(key)
        return known


class ZeroForUnknown(PageMemory):
    def get_importance(self, key: bytes) -> Importance | None:
        return super().get_importance(key) or Importance(0.0, 0.0, 0.0, 0.0, 0, 0.0)


class OffByOnePage(PageMemory):
    def _fold(self, pages, observed, weight, *, is_first):
        rolled = replace(observed, body_mass=np.roll(observed.body_mass, 1))
        super()._fold(pages, rolled, weight, is_first=is_first)


class AgesWithEveryFold(PageMemory):
    def _fold(self, pages, observed, weight, *, is_first):
        super()._fold(pages, observed, weight, is_first=True)


class ForgetsAtEviction(PageMemory):
    def evict_all(self) -> None:
        self._pages.clear()


class OneNamespace(PageMemory):
    def serve(self, query):
        super().serve(replace(query, cache_salt=None))


class OneOrigin(PageMemory):
    def _fold(self, pages, observed, weight, *, is_first):
        for page in pages:
            page.creator = None
        super()._fold(pages, observed, weight, is_first=is_first)


class Slow(PageMemory):
    """Answers only the third time: it catches up, as a source may."""

    calls = 0

    def get_importance(self, key: bytes) -> Importance | None:
        self.calls += 1
        return super().get_importance(key) if self.calls % 3 == 0 else None


def problems(make: Callable[[ConsumerCase], PageMemory]) -> str:
    return "\n".join(verdict.problem for verdict in check_accumulator(make) if verdict.problem)


@pytest.mark.parametrize("good", [PageMemory, Slow])
def test_the_model_conforms_to_its_own_cases(good: type[PageMemory]):
    assert problems(good) == ""
    assert len(consumer_cases()) >= 10


@pytest.mark.parametrize(
    ("twin", "says"),
    [
        (Raising, "get_importance raised KeyError"),
        (ZeroForUnknown, "something for a page that it never saw"),
        (OffByOnePage, "body_mass is"),
        (AgesWithEveryFold, "body_mass is"),
        (ForgetsAtEviction, "None for a page it holds"),
        (OneNamespace, "something for a page that it never saw"),
        (OneOrigin, "cross_body_mass is"),
    ],
)
def test_a_broken_accumulator_fails(twin: type[PageMemory], says: str):
    assert says in problems(twin)


def test_the_committed_cases_are_those_of_the_reference():
    made = runpy.run_path(str(SCRIPT))["documents"]()
    for name, document in made.items():
        committed = json.loads((FOLDER / name).read_text(encoding="utf-8"))
        assert _approximately(committed) == _approximately(document), name


def _approximately(value):
    """Numbers to six places: another torch may round the last bit differently."""
    if isinstance(value, float):
        return round(value, 6) + 0.0
    if isinstance(value, list):
        return [_approximately(each) for each in value]
    if isinstance(value, dict):
        return {key: _approximately(each) for key, each in value.items()}
    return value


def test_the_command_reports_each_case_and_fails_with_one():
    run = CliRunner().invoke(app, ["consumer", "sgl_importance_lab.conformance.memory:model"])
    assert (run.exit_code, "10 of 10 cases pass" in run.output) == (0, True), run.output
    run = CliRunner().invoke(app, ["producer", "conformance.test_kit:off_by_one"])
    assert run.exit_code == 1
    assert "FAIL  one query token, one layer, one head: mass of page" in run.output


def off_by_one() -> Callable[[ProducerCase], BlockImportance]:
    return off_by_one_page


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("nothing", "give MODULE:FACTORY"),
        ("..producers:reference", "give MODULE:FACTORY"),
        ("no_such_module:x", "cannot import no_such_module"),
        ("sgl_importance.interface:no_such_name", "has no no_such_name"),
        ("conformance.test_kit:off_by_one_page", "raised TypeError"),
        ("os:getpid", "returned int"),
    ],
)
def test_a_wrong_target_is_told_in_one_line(target: str, says: str):
    run = CliRunner().invoke(app, ["producer", target])
    assert run.exit_code == 2
    assert run.output.startswith("error: ")
    assert says in run.output
    assert run.output.count("\n") == 1
