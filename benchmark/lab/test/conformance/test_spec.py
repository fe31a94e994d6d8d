"""The numbers that docs/spec.md prints are those of the reference and of our keys."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch

from sgl_importance.interface import SCHEMA_VERSION, BlockImportance, Importance
from sgl_importance.nodes.digests import DIGEST_BYTES, chain_digests, root_digest
from sgl_importance_lab.conformance.page_scores import (
    attention_probabilities,
    combine_layers,
    layer_page_scores,
    pages_of,
)

SPEC = (Path(__file__).parents[4] / "docs" / "spec.md").read_text(encoding="utf-8")
KEY_WEIGHTS = ([4, 1, 2, 2, 1], [1, 1, 6, 1, 1])
QUERIES = ([1.0, 0.0], [0.0, 1.0])


def rows(section: str) -> list[list[str]]:
    """Cells of the table behind a marker, without its head."""
    text = SPEC.split(f"<!-- {section} -->")[1]
    lines = text.strip().split("\n\n")[0].splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:] if line.startswith("|")
    ]


def computed_example() -> dict[str, list[float]]:
    position = torch.tensor([4])
    numbers, layers = {}, []
    for layer, (weights, heads) in enumerate(zip(KEY_WEIGHTS, QUERIES, strict=True)):
        k = torch.tensor(weights).log().reshape(5, 1, 1)
        q = torch.tensor(heads).reshape(1, 2, 1)
        by_head = pages_of(attention_probabilities(q, k, position, scale=1.0), 2)
        for head in range(2):
            numbers[f"layer {layer}, head {head}"] = by_head[head, 0].tolist()
        layers.append(
            layer_page_scores(q, k, position, scale=1.0, page_size=2, sink_tokens=1, local_tokens=1)
        )
    combined = combine_layers(layers)
    body = torch.stack([layer.body for layer in layers]).mean(dim=0)
    numbers |= {"mass": combined.mass[0].tolist(), "peak": combined.peak[0].tolist()}
    numbers |= {"body": body[0].tolist(), "body mass": combined.body[0].tolist()}
    return numbers


def test_the_worked_example_is_the_reference_s():
    printed = {name: [float(cell) for cell in cells] for name, *cells in rows("example")}
    expected = computed_example()
    assert printed.keys() == expected.keys()
    for name, values in printed.items():
        assert values == pytest.approx(expected[name], abs=1e-6), name


def test_the_printed_keys_are_ours():
    printed = rows("keys")
    assert len(printed) >= 4
    for tokens, page_size, extra_key, cache_salt, key in printed:
        namespace = [None if name == "none" else name for name in (extra_key, cache_salt)]
        digests = chain_digests(root_digest(*namespace), [int(t) for t in tokens.split()], int(page_size))
        assert digests[-1].hex() == key.strip("`")
        assert len(digests[-1]) == DIGEST_BYTES


def test_an_empty_name_of_a_namespace_is_none():
    assert "absent and an empty name of a namespace are the same" in SPEC
    assert root_digest("", "") == root_digest(None, None)
    assert root_digest("a", "") == root_digest("a", None) != root_digest("", "a") == root_digest(None, "a")


def test_every_field_and_the_version_are_specified():
    assert SPEC.startswith(f"# BlockImportance, version {SCHEMA_VERSION}\n")
    for field in (*fields(BlockImportance), *fields(Importance)):
        assert f"`{field.name}`" in SPEC, field.name
