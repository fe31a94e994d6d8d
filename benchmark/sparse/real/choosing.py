"""Next-token distributions behind a window where every layer reads chosen pages, beside exact attention."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from benchmark.sparse.real.windows import Task, Window
from sgl_importance.sparse.selection_rule import SINK_TOKENS, WINDOW_TOKENS, SelectionRule
from sgl_importance_kernels.sparse.layer_pages import LayerPages
from sgl_importance_kernels.sparse.page_choice import ChoiceRule, Contexts, choose_pages
from sgl_importance_kernels.sparse.selectors.selector import Selector
from sgl_importance_lab.trained_model.decoder import Decoder, Prefill

Grain = Literal["layer", "head"]
Estimates = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes scaled queries [tokens, heads, dimension] and int64 [pages]; returns [tokens * heads, pages]."""
Estimator = Callable[[int, torch.Tensor], Estimates]
"""Takes a layer and the keys of its pages, [pages, page size, KV heads, dimension]."""
Reads = Callable[[int, int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes a layer, a task, its queries [tokens, heads, dimension], the keys of its context [keys, KV heads,
dimension] and what was chosen, bool [tokens, KV heads, pages]; returns what is read, of the same shape."""

RULE = ChoiceRule(sink_tokens=SINK_TOKENS, window_tokens=WINDOW_TOKENS)


def of_selector(selector: Selector) -> Estimator:
    """The estimates that a server with this selector makes."""

    def prepare(layer: int, keys: torch.Tensor) -> Estimates:
        size = selector.kept_bytes(keys.shape[3])
        kept, units = (
            selector.keep(layer, keys) if size else (torch.empty(0, keys.shape[2], 0), torch.empty(0))
        )
        return lambda queries, pages: selector.logits(
            queries.contiguous(), LayerPages(layer, pages, kept, units, keys)
        )

    return prepare


@dataclass(frozen=True)
class Exact:
    """A task as exact attention sees it.

    Attributes:
        keys: of the tokens before the cue's last, [layers, tokens, KV heads, dimension].
        values: likewise.
        log_probabilities: where scored tokens are predicted, [scored, vocabulary].
    """

    keys: torch.Tensor
    values: torch.Tensor
    log_probabilities: torch.Tensor


@dataclass(frozen=True)
class Read:
    """What the scored tokens of a window read, summed over tokens and layers.

    Attributes:
        chosen: pages, mean over KV heads.
        union: pages that some KV head chose.
        fresh: of these, pages that no head had chosen for the token before.
        pages: of the contexts.
    """

    chosen: float
    union: int
    fresh: int
    pages: int


def exact_answers(decoder: Decoder, window: Window, prefill: Prefill) -> list[Exact]:
    """Every task behind a window's exact keys and values."""
    size, layers = len(window.tokens), decoder.shape.layers
    inputs = [torch.tensor([*task.cue, *task.scored[:-1]]) for task in window.tasks]
    kept: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in inputs]

    def attention(
        layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        outputs, sizes = [], [len(part) for part in inputs]
        for task, (q, k, v) in enumerate(
            zip(*(part.split(sizes) for part in (queries, keys, values)), strict=True)
        ):
            kept[task].append((k, v))
            context = torch.cat([prefill.keys[layer], k]), torch.cat([prefill.values[layer], v])
            outputs.append(_exactly(decoder, layer, q, *context))
        return torch.cat(outputs)

    positions = torch.cat([torch.arange(size, size + len(part)) for part in inputs])
    hidden = decoder.hidden(torch.cat(inputs), positions, attention)
    found = []
    for task, state, pairs in zip(window.tasks, hidden.split([len(i) for i in inputs]), kept, strict=True):
        assert len(pairs) == layers
        before = len(task.cue) - 1
        keys, values = (torch.stack([pair[which][:before] for pair in pairs]) for which in (0, 1))
        found.append(Exact(keys, values, decoder.log_probabilities(state[before:])))
    return found


def chosen_answers(
    decoder: Decoder,
    window: Window,
    prefill: Prefill,
    exact: Sequence[Exact],
    estimator: Estimator,
    *,
    grain: Grain,
    share: float,
    page_size: int,
    layers: Container[int] | None = None,
    reads: Reads | None = None,
) -> tuple[list[torch.Tensor], Read]:
    """Log probabilities of every task, [scored, vocabulary] each, and what was read for them.

    ``layers`` choose, the others read every page; None for all but those with a sliding window, which read
    that. ``reads`` says what is read of a choice; None: all of it.
    """
    size = len(window.tokens)
    choosing = [layer for layer in decoder.shape.whole_layers if layers is None or layer in layers]
    inputs = [torch.tensor([task.cue[-1], *task.scored[:-1]]) for task in window.tasks]
    starts = [size + len(task.cue) - 1 for task in window.tasks]
    sizes = [len(part) for part in inputs]
    count = _Count()

    def attention(
        layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        own = [
            (torch.cat([known.keys[layer], k]), torch.cat([known.values[layer], v]))
            for known, k, v in zip(exact, keys.split(sizes), values.split(sizes), strict=True)
        ]
        contexts = [
            (torch.cat([prefill.keys[layer], k]), torch.cat([prefill.values[layer], v])) for k, v in own
        ]
        if layer not in choosing:
            by_task = zip(queries.split(sizes), contexts, strict=True)
            return torch.cat([_exactly(decoder, layer, q, *context) for q, context in by_task])
        pool, of_task = _paged(prefill.keys[layer], [k for k, _ in own], page_size)
        estimates = estimator(layer, pool)
        outputs = []
        parts = zip(queries.split(sizes), starts, contexts, of_task, strict=True)
        for task, (q, start, context, pages) in enumerate(parts):
            position = torch.arange(start, start + len(q))
            chosen = _choice(q, estimates, pages, position, grain, share, page_size, decoder.shape.kv_heads)
            if reads is not None:
                chosen = reads(layer, task, q, context[0], chosen)
            count.add(chosen)
            length = len(context[0])
            allowed = chosen.repeat_interleave(page_size, dim=2)[:, :, :length]
            seen = decoder.shape.sees(layer, position, length)
            outputs.append(attend(q, *context, allowed & seen[:, None]))
        return torch.cat(outputs)

    positions = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, sizes, strict=True)])
    hidden = decoder.hidden(torch.cat(inputs), positions, attention)
    return [decoder.log_probabilities(state) for state in hidden.split(sizes)], count.read()


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Attention of [tokens, heads, dimension] to the allowed keys, bool [tokens, KV heads or 1, keys]."""
    tokens, heads, dim = q.shape
    kv_heads, count = k.shape[1], heads // k.shape[1]
    by_kv_head = q.view(tokens, kv_heads, count, dim).transpose(0, 1).flatten(1, 2)
    logits = by_kv_head @ k.permute(1, 2, 0) * dim**-0.5  # [KV heads, tokens * queries of each, keys]
    of_query = allowed.transpose(0, 1)[:, :, None].expand(-1, -1, count, -1).flatten(1, 2)
    outputs = logits.masked_fill_(~of_query, float("-inf")).softmax(dim=-1) @ v.transpose(0, 1)
    return outputs.unflatten(1, (tokens, count)).transpose(0, 1).flatten(1, 2)


def divergences(exact: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence of each token's distribution from the exact one, nats."""
    return (exact.exp() * (exact - chosen)).sum(dim=-1)


def finds(log_probabilities: torch.Tensor, task: Task) -> bool:
    """Whether the likeliest token is the scored one, everywhere: what greedy decoding would answer."""
    return log_probabilities.argmax(dim=-1).tolist() == list(task.scored)


def _exactly(
    decoder: Decoder, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Attention of a context's last tokens to all that a layer sees."""
    positions = torch.arange(len(keys) - len(queries), len(keys))
    return attend(queries, keys, values, decoder.shape.sees(layer, positions, len(keys))[:, None])


def _paged(
    prefill: torch.Tensor, own: Sequence[torch.Tensor], page_size: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Keys by page, the window's first and then the complete ones of each task, and each task's pages."""
    shared = torch.arange(len(prefill) // page_size)
    parts, of_task, at = [prefill], [], len(shared)
    for keys in own:
        complete = len(keys) // page_size
        parts.append(keys[: complete * page_size])
        of_task.append(torch.cat([shared, torch.arange(at, at + complete)]))
        at += complete
    return torch.cat(parts).unflatten(0, (-1, page_size)), of_task


def _choice(
    queries: torch.Tensor,
    estimates: Estimates,
    pages: torch.Tensor,
    positions: torch.Tensor,
    grain: Grain,
    share: float,
    page_size: int,
    kv_heads: int,
) -> torch.Tensor:
    """Which pages of the context each token and KV head reads, bool [tokens, KV heads, pages]."""
    tokens, heads, dim = queries.shape
    logits = estimates(queries * dim**-0.5, pages).view(tokens, heads, -1)
    contexts = (positions + 1).tolist()
    of_row = [size for size in contexts for _ in range(kv_heads if grain == "head" else 1)]
    num_pages = [-(-size // page_size) for size in of_row]
    is_before = torch.arange(len(pages)) < (torch.tensor(contexts)[:, None] - 1) // page_size
    logits = logits.masked_fill(~is_before[:, None], float("-inf"))
    if grain == "head":
        logits = logits.view(tokens * kv_heads, heads // kv_heads, -1)
    rule = SelectionRule(0, 0, share, page_size)
    budgets = [rule.max_pages(size) for size in of_row]
    of_context = Contexts.of(
        torch.arange(max(num_pages)).expand(len(of_row), -1), of_row, budgets, RULE, page_size
    )
    found, _ = choose_pages(logits, of_context, RULE)
    chosen = torch.zeros(len(of_row), max(num_pages) + 1, dtype=torch.bool)
    chosen.scatter_(1, torch.where(found < 0, max(num_pages), found), True)
    # The last page is always read.
    chosen.scatter_(1, torch.tensor(num_pages)[:, None] - 1, True)
    return chosen[:, :-1].view(tokens, -1, max(num_pages)).expand(-1, kv_heads, -1)


class _Count:
    def __init__(self) -> None:
        self._chosen, self._union, self._fresh, self._pages = 0.0, 0, 0, 0

    def add(self, chosen: torch.Tensor) -> None:
        union = chosen.any(dim=1)
        self._chosen += float(chosen.sum()) / chosen.shape[1]
        self._union += int(union.sum())
        self._fresh += int((union[1:] & ~union[:-1]).sum())
        self._pages += union.numel()

    def read(self) -> Read:
        return Read(self._chosen, self._union, self._fresh, self._pages)
