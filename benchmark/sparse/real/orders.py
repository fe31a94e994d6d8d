"""What a step reads where the pages of its choice are copied behind other work, and not waited for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from benchmark.sparse.real.choosing import RULE
from sgl_importance_lab.conformance.page_scores import pages_of

Order = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes a layer, a task, what was chosen and what is read whatever the budget, bool [tokens, pages]; returns
what is read. The first token reads its choice: no step was before it."""


def forced(start: int, tokens: int, pages: int, page_size: int) -> torch.Tensor:
    """Sinks, window and the page that is being filled, bool [tokens, pages], for tokens from ``start`` on."""
    last = torch.arange(start, start + tokens)[:, None]
    page = torch.arange(pages)
    recent = page >= (last + 1 - RULE.window_tokens).clamp(min=0) // page_size
    return ((page < RULE.num_sinks(page_size)) | recent) & (page <= last // page_size)


def exact(_layer: int, _task: int, chosen: torch.Tensor, _always: torch.Tensor) -> torch.Tensor:
    """Copies are waited for."""
    return chosen


def last_step(_layer: int, _task: int, chosen: torch.Tensor, always: torch.Tensor) -> torch.Tensor:
    """What the step before chose in this layer: a whole step to copy it in."""
    return _behind(chosen, torch.cat([chosen[:1], chosen[:-1]]) | always)


def _behind(chosen: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
    return torch.cat([chosen[:1], read[1:]])


class LastLayer:
    """What the layer before chose in this step: its attention and what follows to copy it in."""

    def __init__(self) -> None:
        self._before: dict[int, torch.Tensor] = {}

    def __call__(self, _layer: int, task: int, chosen: torch.Tensor, always: torch.Tensor) -> torch.Tensor:
        read = self._before.get(task, chosen)
        self._before[task] = chosen
        return _behind(chosen, read | always)


@dataclass
class Resident:
    """What of its choice is on the device, by LRU; the rest is copied for the next step.

    Attributes:
        slots: pages of a layer that the device holds.
        missing: pages chosen that were not there, of tokens behind the first.
        named: of these, chosen by the layer before in the same step.
        chosen: pages chosen by these tokens.
    """

    slots: int
    missing: int = field(default=0, init=False)
    named: int = field(default=0, init=False)
    chosen: int = field(default=0, init=False)
    _before: dict[int, torch.Tensor] = field(default_factory=dict, init=False)

    def __call__(self, _layer: int, task: int, chosen: torch.Tensor, always: torch.Tensor) -> torch.Tensor:
        before = self._before.get(task, torch.zeros_like(chosen))
        self._before[task] = chosen
        pages = chosen.shape[1]
        read_at = torch.arange(pages) - pages  # a prompt leaves its last pages there
        read = chosen.clone()
        for step in range(len(chosen)):
            known = read_at.masked_fill(torch.arange(pages) > int(always[step].nonzero().max()), -2 * pages)
            resident = always[step].clone()
            resident[known.topk(min(self.slots, pages)).indices] = True
            if step:
                read[step] &= resident
                missing = chosen[step] & ~resident
                self.missing += int(missing.sum())
                self.named += int((missing & before[step]).sum())
                self.chosen += int(chosen[step].sum())
            read_at[chosen[step]] = step + 1
        return read


class Ordered:
    """An order as ``chosen_answers`` asks for it.

    Args:
        order: what is read.
        starts: position of each task's first token.
        page_size: tokens per page.
    """

    def __init__(self, order: Order, starts: list[int], page_size: int) -> None:
        self._order, self._starts, self._page_size = order, starts, page_size

    def __call__(
        self, layer: int, task: int, _queries: torch.Tensor, _keys: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        tokens, kv_heads, pages = chosen.shape
        always = forced(self._starts[task], tokens, pages, self._page_size)
        read = self._order(layer, task, chosen[:, 0], always)
        return read[:, None].expand(-1, kv_heads, -1)


class Covered:
    """Reads everything, and counts what each order would have covered of the attention.

    Args:
        orders: by name.
        starts: position of each task's first token.
        page_size: tokens per page.

    Attributes:
        mass: attention on what an order reads, by name; of tokens behind the first, summed over layers and
            tokens, mean over heads.
        total: the same of all pages: tokens times layers.
        chosen: pages chosen but for those that are always read.
        again: of these, chosen by the step before or, always read, on the device.
    """

    def __init__(self, orders: dict[str, Order], starts: list[int], page_size: int) -> None:
        self._orders, self._starts, self._page_size = orders, starts, page_size
        self.mass = dict.fromkeys(orders, 0.0)
        self.total, self.chosen, self.again = 0.0, 0, 0

    def __call__(
        self, layer: int, task: int, queries: torch.Tensor, keys: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        tokens, _, pages = chosen.shape
        always = forced(self._starts[task], tokens, pages, self._page_size)
        of_layer = chosen[:, 0]
        mass = self._page_mass(queries, keys, self._starts[task])
        for name, order in self._orders.items():
            self.mass[name] += float((mass * order(layer, task, of_layer, always))[1:].sum())
        self.total += float(mass[1:].sum())
        free = of_layer[1:] & ~always[1:]
        self.chosen += int(free.sum())
        self.again += int((free & (of_layer[:-1] | always[:-1])).sum())
        return torch.ones_like(chosen)

    def _page_mass(self, queries: torch.Tensor, keys: torch.Tensor, start: int) -> torch.Tensor:
        """[tokens, pages], mean over heads."""
        tokens, heads, dim = queries.shape
        by_head = keys.permute(1, 2, 0).repeat_interleave(heads // keys.shape[1], dim=0)
        logits = queries.transpose(0, 1) @ by_head * dim**-0.5
        unseen = torch.arange(len(keys)) > torch.arange(start, start + tokens)[:, None]
        probabilities = logits.masked_fill(unseen, float("-inf")).softmax(dim=-1)
        return pages_of(probabilities.mean(dim=0), self._page_size)
