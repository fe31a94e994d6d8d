"""Could every step know, without reading them, that the pages it left out hold little attention?

    python benchmark/sparse/bounds.py

Bounding boxes (Quest, Tang et al., 2024) give the largest logit that any key of a page can have, and with it
an upper bound on the attention that a choice missed. Here it stands beside the true share, for the step that
answers a question about a document; embedded model, pages of 16, each layer. Means over heads and questions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from torch.nn.functional import scaled_dot_product_attention

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]
# ruff: noqa: E402
from sglang_importance.cpu.imports import TorchvisionOperators

if (shim := TorchvisionOperators()).needed():  # else transformers cannot be imported beside a CPU's torch
    shim.apply()
from transformers import AttentionInterface, LlamaForCausalLM

from benchmark.results import print_rows, write_results
from sgl_importance.embedded_model import checkpoint_path
from sgl_importance.sparse.selection_rule import SINK_TOKENS, WINDOW_TOKENS
from sgl_importance_kernels.sparse.page_choice import ChoiceRule, Contexts, choose_pages
from sgl_importance_lab.probe.tasks import make_document
from sgl_importance_lab.probe.tokenizer import encode

PAGE = 16
RULE = ChoiceRule(SINK_TOKENS, WINDOW_TOKENS)

Layer = tuple[torch.Tensor, torch.Tensor]
"""The last token's queries, scaled, [heads, dimension], and all keys, [heads, tokens, dimension]."""


def layers_of(model: LlamaForCausalLM, tokens: list[int]) -> Iterator[Layer]:
    """What each layer's attention sees of a prompt."""
    seen: list[Layer] = []

    def attention(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        scaling: float,
        **__: Any,
    ) -> tuple[torch.Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        keys = key.repeat_interleave(groups, dim=1)
        seen.append((query[0, :, -1] * scaling, keys[0]))
        output = scaled_dot_product_attention(
            query, keys, value.repeat_interleave(groups, dim=1), is_causal=True, scale=scaling
        )
        return output.transpose(1, 2).contiguous(), None

    AttentionInterface.register("seen", attention)
    model.set_attn_implementation("seen")
    with torch.inference_mode():
        model(torch.tensor([tokens]), logits_to_keep=1)
    yield from seen


def missed(queries: torch.Tensor, keys: torch.Tensor, budget: float) -> tuple[float, float]:
    """Share of attention outside the pages that the boxes choose, and the bound on it; means over heads."""
    num_complete = keys.shape[1] // PAGE
    pages = keys[:, : num_complete * PAGE].unflatten(1, (num_complete, PAGE))
    logits = torch.einsum("hd,hnd->hn", queries, keys)
    low, high = pages.amin(dim=2), pages.amax(dim=2)
    bounds = torch.maximum(queries[:, None] * low, queries[:, None] * high).sum(dim=-1)
    contexts = Contexts.of(
        torch.arange(num_complete)[None], [num_complete * PAGE], [int(budget * num_complete)], RULE, PAGE
    )
    (chosen,), _ = choose_pages(bounds[None], contexts, RULE)
    is_left_out = torch.ones(num_complete, dtype=torch.bool)
    is_left_out[chosen[chosen >= 0]] = is_left_out[-1] = False  # the last page is read whatever it is
    by_page = logits[:, : num_complete * PAGE].unflatten(1, (num_complete, PAGE)).logsumexp(dim=2)
    rest = logits[:, num_complete * PAGE :]
    read = torch.cat([by_page[:, ~is_left_out], rest], dim=1).logsumexp(dim=1)
    true, bound = (
        (left_out.logsumexp(dim=1) - read).sigmoid().mean()
        for left_out in (by_page[:, is_left_out], bounds[:, is_left_out] + torch.tensor(PAGE).log())
    )
    return float(true), float(bound)


def main(
    lengths: Annotated[str, typer.Option(help="Tokens of a document, separated by commas.")] = "2048,8192",
    budget: Annotated[float, typer.Option(help="Share of the pages that is read.")] = 0.05,
    n: Annotated[int, typer.Option(help="Questions of a length.")] = 20,
    out: Annotated[Path | None, typer.Option(help="Write the JSON there.")] = None,
) -> None:
    model = LlamaForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.float32)
    rows = []
    for length in map(int, lengths.split(",")):
        document = make_document(length, seed=0)
        found = []
        for name in track(list(document.records)[:n], description=f"{length} tokens"):
            layers = layers_of(model, encode(document.messages(name)))
            found.append([missed(*layer, budget) for layer in layers])
        for layer, pairs in enumerate(torch.tensor(found).unbind(dim=1)):
            true, bound = pairs.unbind(dim=1)
            row = {
                "length": length,
                "layer": layer,
                "missed_mass": float(true.mean()),
                "bound": float(bound.mean()),
            }
            rows.append({**row, "least_bound": float(bound.min()), "n": len(found)})
    write_results("pages_bounds", rows, out=out)
    print_rows("What was missed, and what boxes can say of it", rows)


if __name__ == "__main__":
    typer.run(main)
