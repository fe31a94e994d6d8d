"""The examples of docs/extend.md, run from the page."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from sgl_importance_kernels.sparse.representations import Representations

PAGE = (Path(__file__).parents[2] / "docs/extend.md").read_text()


def blocks_of(name: str) -> list[str]:
    blocks: list[str] = re.findall(rf"<!-- example: {name} -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert blocks, f"docs/extend.md has no example of a {name}"
    return blocks


def example(name: str) -> ModuleType:
    """The blocks of one example, as one module that can be imported by its name."""
    module = ModuleType(f"example_{name}")
    sys.modules[module.__name__] = module
    exec(compile("\n".join(blocks_of(name)), f"extend.md: {name}", "exec"), module.__dict__)
    return module


def test_policy(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints what the page says it prints."""
    module = example("policy")
    said = re.search(r"print\(hits\)  # (.*)", PAGE)
    assert said
    assert capsys.readouterr().out.strip() == said[1]
    assert module.hits["lru"] < module.hits["lru2"] <= module.hits["belady"]


def test_selector_finds_a_key_that_stands_out() -> None:
    selector = example("selector").LongestKey(page_size=8)
    keys = 0.1 * torch.randn(6, 8, 2, 16, generator=torch.Generator().manual_seed(0))
    keys[4, 3, 1] = 1.0
    representations = Representations(selector, (keys,), "cpu")
    found = selector.logits(torch.ones(1, 2, 16), representations.of(0, torch.arange(6)))
    assert int(found[1].argmax()) == 4
    torch.testing.assert_close(found[1, 4], torch.tensor(16.0))


def test_policy_in_object_level_replay() -> None:
    """O'Neil's point: one use, however recent, is worth less than two."""
    policy = example("policy").Lru2Policy(2)
    for block in (1, 2):
        policy.insert(block)
        policy.evictable(block)
    policy.access(1)
    assert [policy.victim(), policy.victim()] == [2, 1]


@pytest.mark.parametrize(("tokens", "page_size"), [(57, 8), (64, 16), (9, 16), (40, 1)])
def test_producer_agrees_with_the_definition(tokens: int, page_size: int) -> None:
    from sgl_importance_lab.conformance.page_scores import (
        attention_probabilities,
        combine_layers,
        layer_page_scores,
    )

    layers, heads, kv_heads, dim = 3, 4, 2, 8
    generator = torch.Generator().manual_seed(tokens)
    position = torch.tensor([tokens - 1])
    scores, probabilities = [], []
    for _ in range(layers):
        q = 3 * torch.randn(1, heads, dim, generator=generator)
        k = torch.randn(tokens, kv_heads, dim, generator=generator)
        probabilities.append(attention_probabilities(q, k, position, scale=0.5)[:, 0].numpy())
        scores.append(
            layer_page_scores(q, k, position, scale=0.5, page_size=page_size, sink_tokens=4, local_tokens=16)
        )
    expected = combine_layers(scores)
    signal = example("producer").block_importance(np.stack(probabilities), page_size)
    np.testing.assert_allclose(signal.mass, expected.mass[0], atol=1e-6)
    np.testing.assert_allclose(signal.peak, expected.peak[0], atol=1e-6)
    np.testing.assert_allclose(signal.body_mass, expected.body[0], atol=1e-5)
    assert (signal.body_mass.sum() > 0) == (tokens > 20)


def test_backend_under_the_verified_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sgl_importance.storage.store_counters import StoreCounters
    from sglang_importance.storage.weights import WATCH

    from support.host_pools import KEYS, PAGES, WEIGHTS, make_backend, make_pool, pages_of, slots

    module = example("backend")
    pool = make_pool("page_first")
    settings = {
        "backend_name": "memory",
        "module_path": module.__name__,
        "class_name": module.MemoryStorage.__name__,
    }
    monkeypatch.setattr(WATCH, "current", WEIGHTS)
    monkeypatch.setattr(WATCH, "counters", StoreCounters())
    verified = make_backend(pool, tmp_path, wrapped="dynamic", wrapped_config=settings)
    assert verified.batch_get_v1(KEYS, slots(PAGES)) == [False] * PAGES, "nothing is stored yet"
    assert verified.batch_set_v1(KEYS, slots(0)) == [True] * PAGES
    assert verified.batch_get_v1(KEYS, slots(PAGES)) == [True] * PAGES
    stored, read = pages_of(pool, 0), pages_of(pool, PAGES)
    assert all(map(torch.equal, stored, read))

    values = verified._pages._backend.values  # type: ignore[attr-defined]
    assert len(values) == PAGES
    for value in values.values():
        value[::64] ^= 1
    assert verified.batch_get_v1(KEYS, slots(PAGES)) == [False] * PAGES
    assert WATCH.counters["quarantined_pages"] >= 1


def test_connector_calls_fit_their_functions() -> None:
    """LMCache is no dependency of ours: the calls of docs/extend.md are bound, not made."""
    bound = []
    for statement in ast.walk(ast.parse("\n".join(blocks_of("connector")))):
        if isinstance(statement, ast.ImportFrom):
            assert statement.module is not None
            functions = {
                alias.name: getattr(import_module(statement.module), alias.name) for alias in statement.names
            }
        elif isinstance(statement, ast.Call):
            assert isinstance(statement.func, ast.Name)
            keywords = {str(keyword.arg): keyword.value for keyword in statement.keywords}
            inspect.signature(functions[statement.func.id]).bind(*statement.args, **keywords)
            bound.append(statement.func.id)
    assert bound == ["register", "watch_tokens"]
