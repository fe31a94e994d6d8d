"""Requests of a workload through a trained model's own arithmetic, recorded as a server would record them.

One pass over the prompts serves any number of settings of the signal: scores are taken of every layer and of
the prompts' last tokens, by the reference's definition. Answers are the right ones, whatever the model would
have said.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmark.sparse.real.choosing import RULE, Estimator
from sgl_importance.observe.trace.record_writer import RecordWriter
from sgl_importance.observe.trace.records import (
    FORMAT_VERSION,
    SCHEMA,
    Detail,
    Fold,
    Header,
    PageLists,
    Record,
    RequestAdmitted,
    RequestFinished,
    Step,
    Vector,
)
from sgl_importance.observe.trace.token_sequence import TokenSequence
from sgl_importance.observe.trace.writer import NO_PAGES
from sgl_importance.options.observation_options import SignalOptions
from sgl_importance.sparse.selection_rule import SelectionRule
from sgl_importance_kernels.sparse.page_choice import Contexts, choose_pages
from sgl_importance_lab.conformance.page_scores import (
    PageScores,
    attention_probabilities,
    combine_layers,
    layer_page_scores,
    pages_of,
)
from sgl_importance_lab.trained_model.decoder import Decoder, Prefill
from sgl_importance_lab.workload.workload_request import WorkloadRequest

PAGE = 16
LISTED = 0.2
"""Of a context's pages, those that are listed as wanted."""
LAYER_STEP = 6
"""From one layer whose pages are listed to the next, where a model has more than ``FEW_LAYERS``."""
FEW_LAYERS = 8
SIGNAL = SignalOptions()
NAMESPACE = (None, None)
POOL_TOKENS = 1 << 20  # so large that nothing is evicted
# What is kept and what is computed anew, of SmolLM2-135M in float32 on a CPU. Other models have it as well:
# nothing but their attention tells their findings apart.
COST = {
    "prefill_seconds_per_token": 5e-3,
    "prefill_seconds_per_token_pair": 1e-6,
    "bytes_per_token": 46_080,
    "host_bytes_per_second": 1e10,
    "storage_bytes_per_second": 1e9,
}


@dataclass(frozen=True)
class Setting:
    """Which attention is observed: of which layers, from how many last tokens of a prompt."""

    layers: tuple[int, ...]
    window: int = SIGNAL.window


@dataclass(frozen=True)
class Lists:
    """Pages that a token wants and those that a selector chose, as ``PageLists`` has them."""

    seq_len: int
    pages: Vector
    mass: Vector
    num_read: tuple[int, ...]
    read: Vector
    shares: Vector


@dataclass(frozen=True)
class Observed:
    """A request as the model read it.

    Attributes:
        request: of the workload.
        prompt: tokens.
        answer: tokens.
        computed: of the prompt, by a server that keeps everything.
        layers: whose pages are listed: those that see the whole context.
        scores: by setting; rows are the prompt's last tokens, then those of the answer but the last.
        lists: of the prompt's last token and those of the answer but the last.
    """

    request: WorkloadRequest
    prompt: list[int]
    answer: list[int]
    computed: int
    layers: tuple[int, ...]
    scores: Mapping[str, PageScores]
    lists: Sequence[Lists]


def by_document(requests: Sequence[WorkloadRequest]) -> dict[str, list[int]]:
    """Places of the requests about each document; ids are "kind/document/number"."""
    found: dict[str, list[int]] = defaultdict(list)
    for at, request in enumerate(requests):
        found[request.id.split("/")[1]].append(at)
    return found


def observe(
    decoder: Decoder,
    tokenizer: Tokenizer,
    requests: Sequence[WorkloadRequest],
    settings: Mapping[str, Setting],
    selector: Estimator | None,
    share: float,
) -> list[Observed]:
    """Requests about one document in order; what their prompts share is computed once.

    Args:
        decoder: the model.
        tokenizer: its own.
        requests: with answers.
        settings: by name.
        selector: whose choices are listed; None: every page was read.
        share: of the pages that it reads.
    """
    prompts = [tokenizer.encode(request.prompt).ids for request in requests]
    shared = _shared(prompts)
    prefill = Prefill(decoder, torch.tensor(prompts[0][:shared]), keeps_queries=True)
    earlier: list[list[int]] = []
    found = []
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.answer is not None
        whole = tokenizer.encode(request.prompt + " " + request.answer).ids
        answer = list(whole[len(prompt) :])[: request.max_tokens]
        computed = len(prompt) - max((_cached(prompt, known) for known in earlier), default=0)
        earlier.append([*prompt, *answer[:-1]])
        reader = _Reader(decoder, prefill, len(prompt), selector, share)
        reader.read(prompt[shared:], answer)
        scores = {name: reader.scores(setting) for name, setting in settings.items()}
        layers = decoder.shape.whole_layers
        found.append(Observed(request, prompt, answer, computed, layers, scores, reader.lists()))
    return found


class _Reader:
    """Reads the end of a prompt and its answer behind what was computed, and looks at every layer that sees
    the whole context."""

    def __init__(
        self, decoder: Decoder, prefill: Prefill, prompt_tokens: int, selector: Estimator | None, share: float
    ) -> None:
        self._decoder, self._prefill = decoder, prefill
        self._size, self._selector, self._share = prompt_tokens, selector, share
        self._layers: dict[int, PageScores] = {}
        self._wanted: list[torch.Tensor] = []
        self._chosen: list[list[tuple[torch.Tensor, torch.Tensor]]] = []

    def read(self, asked: Sequence[int], answer: Sequence[int]) -> None:
        before = self._prefill.keys.shape[1]
        tokens = torch.tensor([*asked, *answer[:-1]])
        self._decoder.hidden(tokens, torch.arange(before, before + len(tokens)), self._attention)

    def scores(self, setting: Setting) -> PageScores:
        return combine_layers([self._layers[layer] for layer in setting.layers])

    def lists(self) -> list[Lists]:
        """Of the prompt's last token, which read all pages, and of the answer's."""
        wanted = torch.stack(self._wanted)  # [layers, KV heads, tokens, pages]
        found = []
        for row in range(wanted.shape[2]):
            seq_len = self._size + row
            num_pages = -(-seq_len // PAGE)
            mass, pages = wanted[:, :, row, :num_pages].topk(max(1, int(LISTED * num_pages)), dim=2)
            read = [layer[row - 1] for layer in self._chosen] if row and self._chosen else []
            found.append(
                Lists(
                    seq_len,
                    pages.numpy().astype(np.uint16).reshape(-1),
                    mass.numpy().astype(np.float16).reshape(-1),
                    tuple(len(each) for each, _ in read) or (-1,) * len(wanted),
                    _joined([each for each, _ in read], np.uint16),
                    _joined([shares for _, shares in read], np.float32),
                )
            )
        return found

    def _attention(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        prefill = self._prefill
        all_keys = torch.cat([prefill.keys[layer], keys])
        all_values = torch.cat([prefill.values[layer], values])
        if self._decoder.shape.windows[layer] is None:
            self._look(layer, torch.cat([prefill.queries[layer], queries]), all_keys)
        behind = torch.arange(len(prefill.keys[layer]), len(all_keys))
        seen = self._decoder.shape.sees(layer, behind, len(all_keys))
        q, k, v = (part.transpose(0, 1)[None] for part in (queries, all_keys, all_values))
        outputs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return outputs[0].transpose(0, 1)

    def _look(self, layer: int, queries: torch.Tensor, all_keys: torch.Tensor) -> None:
        size, scale = self._size, self._decoder.shape.dim**-0.5
        first = max(0, size - SIGNAL.window)
        known = queries[first:]
        positions = torch.arange(first, len(all_keys))
        self._layers[layer] = layer_page_scores(
            known,
            all_keys,
            positions,
            scale=scale,
            page_size=PAGE,
            sink_tokens=SIGNAL.sink_tokens,
            local_tokens=SIGNAL.local_tokens,
        )
        generated = slice(size - 1 - first, None)  # the prompt's last token yields the answer's first
        probabilities = attention_probabilities(known[generated], all_keys, positions[generated], scale=scale)
        by_kv_head = probabilities.unflatten(0, (all_keys.shape[1], -1)).mean(dim=1)
        self._wanted.append(pages_of(by_kv_head, PAGE))
        if self._selector is not None:
            self._chosen.append(self._choices(layer, known[generated][1:] * scale, all_keys))

    def _choices(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pages of every query and their estimated shares, the selector's of a layer."""
        assert self._selector is not None
        complete = len(keys) // PAGE
        estimates = self._selector(layer, keys[: complete * PAGE].unflatten(0, (-1, PAGE)))
        logits = estimates(queries, torch.arange(complete)).view(len(queries), queries.shape[1], -1)
        sizes = list(range(self._size + 1, self._size + 1 + len(queries)))
        is_before = torch.arange(complete) < (torch.tensor(sizes)[:, None] - 1) // PAGE
        logits = logits.masked_fill(~is_before[:, None], float("-inf"))
        rule = SelectionRule(0, 0, self._share, PAGE)
        contexts = Contexts.of(
            torch.arange(complete).expand(len(sizes), -1),
            sizes,
            [rule.max_pages(n) for n in sizes],
            RULE,
            PAGE,
        )
        pages, shares = choose_pages(logits, contexts, RULE)
        return [(row[row >= 0], of_row[row >= 0]) for row, of_row in zip(pages, shares, strict=True)]


def write_recording(
    folder: Path, model: str, name: str, setting: Setting, observed: Sequence[Observed], *, lists: bool
) -> None:
    """Writes what was observed under a setting, in the order of the requests."""
    options = {"policy": "observe", "g": "off", "source": "reference", "interval": 1}
    options |= {"window": setting.window, "half_life_queries": SIGNAL.half_life_queries}
    options |= {"sink_tokens": SIGNAL.sink_tokens, "local_tokens": SIGNAL.local_tokens}
    header = Header(
        version=FORMAT_VERSION,
        run=name,
        segment=0,
        schema=SCHEMA,
        created=0.0,
        page_size=PAGE,
        digest="",
        model=model,
        layers=setting.layers,
        options=options,
        capacity_tokens={"device": POOL_TOKENS},
        cost=COST,
        detail=Detail.STEPS,
    )
    writer = RecordWriter(folder, header, max_bytes=1 << 32)
    forward_pass = 0
    for number, each in enumerate(observed):
        for record, tokens in _records(number, each, each.scores[name], setting.window):
            digests = None if tokens is None else TokenSequence(NAMESPACE, tokens).digests(PAGE)
            writer.write(record, digests)
        for at, of_token in enumerate(each.lists if lists else ()):
            forward_pass += 1
            new_tokens = each.computed if at == 0 else 1
            writer.write(_page_lists(number, forward_pass, of_token, each.layers, new_tokens), None)
        end = RequestFinished(number, number + 1, number, "length", len(each.answer), NO_PAGES)
        sequence = TokenSequence(NAMESPACE, [*each.prompt, *each.answer[:-1]])
        writer.write(end, sequence.digests(PAGE))
    writer.flush()
    writer.close()


def _records(
    number: int, each: Observed, scores: PageScores, window: int
) -> Iterator[tuple[Record, list[int] | None]]:
    size, serial = len(each.prompt), number + 1
    cached = {"device": size - each.computed}
    admitted = RequestAdmitted(number, each.request.id, serial, number, 0, size, cached, NO_PAGES)
    yield admitted, each.prompt
    observed = scores.body.shape[0] - (len(each.answer) - 1)
    asked = slice(max(0, observed - window), observed)
    yield _step(number, "prefill", size, asked, scores), None
    yield _fold(number, serial, 0.5, asked, scores, size), None
    for at in range(1, len(each.answer)):
        row = slice(observed + at - 1, observed + at)
        yield _step(number, "decode", size + at, row, scores), None
    answered = slice(observed, None)
    yield _fold(number, serial, 0.5, answered, scores, size + len(each.answer) - 1), None


def _step(number: int, phase: str, seq_len: int, rows: slice, scores: PageScores) -> Step:
    pages = -(-seq_len // PAGE)
    mass, body, peak = scores.mass[rows, :pages], scores.body[rows, :pages], scores.peak[rows, :pages]
    vectors = (part.numpy().astype(np.float16) for part in (mass.mean(0), body.mean(0), peak.amax(0)))
    return Step(number, phase, seq_len, len(mass), *vectors)


def _fold(number: int, serial: int, weight: float, rows: slice, scores: PageScores, seq_len: int) -> Fold:
    pages = -(-seq_len // PAGE)
    body = scores.body[rows, :pages].sum(dim=0)
    peak = scores.peak[rows, :pages].amax(dim=0)
    vectors = (part.numpy().astype(np.float32) for part in (body / body.sum(), peak))
    return Fold(number, serial, serial, weight, rows.stop is not None, *vectors)


def _page_lists(
    number: int, forward_pass: int, lists: Lists, layers: tuple[int, ...], new_tokens: int
) -> PageLists:
    step = LAYER_STEP if len(layers) > FEW_LAYERS else 1
    wanted = max(1, int(LISTED * -(-lists.seq_len // PAGE)))
    pages, mass = (part.reshape(len(layers), -1, wanted)[::step] for part in (lists.pages, lists.mass))
    ends = np.cumsum([max(0, count) for count in lists.num_read]).tolist()
    parts = zip(ends, lists.num_read, strict=True)
    chosen = [slice(end - max(0, count), end) for end, count in parts][::step]
    return PageLists(
        number,
        forward_pass,
        lists.seq_len,
        new_tokens,
        layers[::step],
        pages.shape[1],
        pages.reshape(-1),
        mass.reshape(-1),
        lists.num_read[::step],
        np.concatenate([lists.read[part] for part in chosen]),
        np.concatenate([lists.shares[part] for part in chosen]),
    )


def _joined(parts: Sequence[torch.Tensor], dtype: Any) -> Vector:
    return torch.cat([*parts]).numpy().astype(dtype) if parts else np.zeros(0, dtype)


def _shared(prompts: Sequence[Sequence[int]]) -> int:
    """First tokens that all prompts have alike, and at least one less than the shortest."""
    for at, tokens in enumerate(zip(*prompts, strict=False)):
        if len(set(tokens)) > 1:
            return at
    return min(map(len, prompts)) - 1


def _cached(prompt: Sequence[int], known: Sequence[int]) -> int:
    """Tokens of a prompt but its last that stand in whole pages of an earlier sequence."""
    same = 0
    for own, other in zip(prompt[:-1], known, strict=False):
        if own != other:
            break
        same += 1
    return same // PAGE * PAGE
