"""Writes the golden cases of ``sgl_importance_lab/conformance``: from the reference and the per-page model.

They belong to version 1 of the specification: run it again only to add cases (``test/conformance`` of the
laboratory compares).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from sgl_importance.nodes.digests import chain_digests, root_digest
from sgl_importance_lab.conformance import cases
from sgl_importance_lab.conformance.cases import ConsumerCase, Observed, ProducerCase, ServedQuery
from sgl_importance_lab.conformance.memory import PageMemory
from sgl_importance_lab.conformance.producers import reference_producer

FOLDER = Path(cases.__file__).parent
STEPS = 64  # inputs are multiples of 1 / STEPS, which half precision holds

# name, kv_len, num_q, layers, heads, kv_heads, page_size, sinks, neighbourhood, logit cap, largest value
PRODUCERS = (
    ("one query token, one layer, one head", 8, 1, 1, 1, 1, 2, 1, 1, 0.0, 2),
    ("heads: mean for mass, maximum for peak", 24, 1, 1, 8, 8, 4, 2, 2, 0.0, 3),
    ("grouped query heads", 16, 1, 1, 6, 2, 4, 1, 1, 0.0, 2),
    ("layers: mean for mass, maximum for peak, body normalised once", 16, 1, 3, 2, 1, 4, 4, 4, 0.0, 3),
    ("several query tokens: causal, mean over tokens, maximum for peak", 20, 6, 2, 4, 2, 4, 2, 3, 0.0, 2),
    ("the last page is partial", 13, 2, 1, 2, 1, 4, 1, 2, 0.0, 2),
    ("sinks and neighbourhood end within pages", 22, 3, 1, 2, 2, 8, 5, 6, 0.0, 2),
    ("the page size is no power of two", 14, 1, 1, 2, 1, 3, 1, 1, 0.0, 2),
    ("one token per page", 9, 2, 1, 2, 1, 1, 2, 2, 0.0, 2),
    ("one page holds all", 5, 1, 1, 2, 1, 16, 1, 1, 0.0, 2),
    ("no body: all is sink and neighbourhood", 6, 2, 1, 2, 1, 2, 3, 4, 0.0, 2),
    ("a body for the later query tokens only", 8, 4, 1, 2, 1, 2, 3, 3, 0.0, 2),
    ("logit soft cap", 16, 2, 2, 4, 2, 4, 2, 2, 1.5, 3),
)


def producer_case(name: str, *shape: Any) -> ProducerCase:
    kv_len, num_q, layers, heads, kv_heads, page_size, sinks, neighbourhood, cap, largest = shape
    rng = np.random.default_rng(len(name))
    bound = largest * STEPS

    def values(*sizes: int) -> np.ndarray:
        return (rng.integers(-bound, bound, sizes) / STEPS).astype(np.float32)

    empty = np.zeros(0, dtype=np.float32)
    inputs = ProducerCase(
        name=name,
        q=values(layers, num_q, heads, 4),
        k=values(layers, kv_len, kv_heads, 4),
        scale=0.5,
        logit_cap=cap,
        page_size=page_size,
        sink_tokens=sinks,
        local_tokens=neighbourhood,
        mass=empty,
        body_mass=empty,
        peak=empty,
    )
    said = reference_producer(inputs)
    return ProducerCase(
        **{**_fields(inputs), "mass": said.mass, "body_mass": said.body_mass, "peak": said.peak}
    )


class Script:
    """A history and what the model answers."""

    def __init__(self, name: str, *, page_size: int = 4, half_life: float = 2.0) -> None:
        self.case = ConsumerCase(name, page_size, half_life, ghost_pages=64, steps=[])
        self.rows: list[dict[str, Any]] = []
        self._model = PageMemory(self.case)
        self._rng = random.Random(len(name))

    def observed(self, pages: int, *, total: int = STEPS) -> Observed:
        """Random masses in multiples of 1/64 that sum to ``total`` of them."""
        cuts = sorted(self._rng.randrange(total + 1) for _ in range(pages - 1))
        masses = np.diff([0, *cuts, total]) / STEPS
        peaks = [self._rng.randrange(STEPS) / STEPS for _ in range(pages)]
        return Observed(masses.astype(np.float32), np.array(peaks, dtype=np.float32))

    def serve(
        self,
        prompt: list[int],
        generated: list[int] | None = None,
        *,
        prefill: Observed | None = None,
        decode: Observed | None = None,
        salt: str | None = None,
        extra_key: str | None = None,
    ) -> None:
        query = ServedQuery(prompt, generated or [], extra_key, salt, prefill, decode)
        self._model.serve(query)
        self.rows.append(
            {
                "do": "serve",
                **{name: getattr(query, name) for name in ("prompt", "generated", "extra_key", "cache_salt")},
                "prefill": _plain(prefill),
                "decode": _plain(decode),
            }
        )

    def evict(self) -> None:
        self._model.evict_all()
        self.rows.append({"do": "evict"})

    def ask(self, tokens: list[int], *, salt: str | None = None, extra_key: str | None = None) -> None:
        for key in chain_digests(root_digest(extra_key, salt), tokens, self.case.page_size):
            self.ask_key(key)

    def ask_key(self, key: bytes) -> None:
        known = self._model.get_importance(key)
        answer = None if known is None else _rounded(asdict(known))
        self.rows.append({"do": "ask", "key": key.hex(), "expected": answer})

    def document(self) -> dict[str, Any]:
        case = self.case
        return {
            "name": case.name,
            "page_size": case.page_size,
            "half_life_queries": case.half_life_queries,
            "ghost_pages": case.ghost_pages,
            "steps": self.rows,
        }


def text(start: int, tokens: int) -> list[int]:
    return list(range(start, start + tokens))


def consumer_scripts() -> Iterator[Script]:
    script = Script("a query's own folds are self: halves at prefill and finish")
    script.serve(text(0, 16), text(100, 8), prefill=script.observed(4), decode=script.observed(6))
    script.ask(text(0, 16) + text(100, 8))
    yield script

    script = Script("later queries are cross, and each ages those before it once")
    for start in (0, 200, 300):
        script.serve(text(0, 16), text(start + 100, 8), prefill=script.observed(4), decode=script.observed(6))
        script.ask(text(0, 16))
    yield script

    script = Script("a page keeps its numbers when another prompt leaves in the middle")
    script.serve(text(0, 24), prefill=script.observed(6))
    script.serve(text(0, 12) + text(500, 8), prefill=script.observed(5))
    script.ask(text(0, 24))
    script.ask(text(0, 12) + text(500, 8))
    yield script

    script = Script("other salts and extra keys are other pages")
    script.serve(text(0, 8), prefill=script.observed(2), salt="tenant-a")
    script.serve(text(0, 8), prefill=script.observed(2), salt="tenant-b")
    script.serve(text(0, 8), prefill=script.observed(2), extra_key="adapter-7")
    script.ask(text(0, 8))
    script.ask(text(0, 8), salt="tenant-a")
    script.ask(text(0, 8), salt="tenant-b")
    script.ask(text(0, 8), extra_key="adapter-7")
    yield script

    script = Script("what left every tier stays known, and comes back without a creator")
    script.serve(text(0, 16), prefill=script.observed(4))
    script.serve(text(0, 16), prefill=script.observed(4))
    script.evict()
    script.ask(text(0, 16))
    script.serve(text(0, 16), prefill=script.observed(4))
    script.ask(text(0, 16))
    yield script

    script = Script("in the cache, and nobody looked")
    script.serve(text(0, 8))
    script.ask(text(0, 8))
    yield script

    script = Script("a key that nobody made is unknown, whatever its length")
    script.serve(text(0, 8), prefill=script.observed(2))
    for key in (b"", b"\0", bytes(16), bytes(range(64))):
        script.ask_key(key)
    script.ask(text(4, 8))  # the second page without the first
    yield script

    script = Script("pages beyond the observation get no mass, and its weight")
    script.serve(text(0, 16), text(100, 8), prefill=script.observed(4), decode=script.observed(4))
    script.ask(text(0, 16) + text(100, 8))
    yield script

    script = Script("an observation is normalised; one without a body is not folded")
    script.serve(text(0, 16), text(100, 8), prefill=script.observed(4, total=STEPS // 4))
    script.serve(
        text(0, 16), text(200, 8), prefill=script.observed(4, total=0), decode=script.observed(6, total=40)
    )
    script.ask(text(0, 16))
    yield script

    script = Script("one token per page", page_size=1, half_life=8.0)
    script.serve(text(0, 5), text(100, 3), prefill=script.observed(5), decode=script.observed(8))
    script.serve(text(0, 4) + text(300, 2), prefill=script.observed(6))
    script.ask(text(0, 5) + text(100, 3))
    yield script


def documents() -> dict[str, dict[str, Any]]:
    """Contents of both files by name."""
    producers = [_plain(producer_case(*row)) for row in PRODUCERS]
    consumers = [script.document() for script in consumer_scripts()]
    return {
        cases.PRODUCER_FILE: {"version": 1, "cases": producers},
        cases.CONSUMER_FILE: {"version": 1, "cases": consumers},
    }


def _fields(case: ProducerCase | Observed) -> dict[str, Any]:
    return {name: getattr(case, name) for name in case.__slots__}


def _plain(value: ProducerCase | Observed | None) -> dict[str, Any] | None:
    if value is None:
        return None
    return {
        name: np.round(each.astype(float), 9).tolist() if isinstance(each, np.ndarray) else each
        for name, each in _fields(value).items()
    }


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {name: round(each, 12) if isinstance(each, float) else each for name, each in values.items()}


if __name__ == "__main__":
    for name, document in documents().items():
        lines = ",\n".join(json.dumps(case) for case in document["cases"])
        (FOLDER / name).write_text(f'{{"version": {document["version"]}, "cases": [\n{lines}\n]}}\n')
        print(f"{FOLDER / name}: {len(document['cases'])} cases")
