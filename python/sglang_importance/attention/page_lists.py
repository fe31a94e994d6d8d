"""Which pages each generated token attends to, by layer and KV head, beside any attention backend."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_importance_kernels.page_lists import best_first, page_masses
from sglang_importance.attention.layers import full_attention_layers
from sglang_importance.attention.sampling import PADDING_SLOT, on_host
from sglang_importance.attention.score_sources import LISTED_BACKEND
from sglang_importance.attention.source import refuse_unsupported, request_table
from sglang_importance.observe.observed_pages import Chosen, ObservedPages

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


class Listener(Protocol):
    def __call__(self, rid: str, lists: ObservedPages) -> None:
        """Takes the lists of one request in one pass."""


@dataclass(slots=True)
class _Token:
    """The last token of a request in a pass.

    Attributes:
        row: of the batch's query tensor.
        locations: in the pool, of all tokens that it sees; int64 [seq_len].
        pages, mass, chosen: of the layers that have run, in their order.
    """

    rid: str
    row: int
    seq_len: int
    new_tokens: int
    locations: torch.Tensor
    pages: list[torch.Tensor] = field(default_factory=list)
    mass: list[torch.Tensor] = field(default_factory=list)
    chosen: list[Chosen | None] = field(default_factory=list)


class PageListProbe:
    """Lists pages by attention mass behind every layer that sees the whole sequence, of every pass.

    Attention is computed once more from the keys in the pool, so a backend that reads chosen pages shows
    both: what it read, and what exact attention of the same queries wants. The backend's own outputs are not
    touched, and an exception costs the lists of its pass, not the pass.

    Args:
        backend: upstream's or ours; its methods are wrapped on this instance.
        model_runner: whose pools are read.
        share: of a context's pages that a list holds.

    Raises:
        ValueError: the model's queries are not multiplied with the keys in the pool.
    """

    def __init__(self, backend: AttentionBackend, model_runner: ModelRunner, share: float) -> None:
        refuse_unsupported(model_runner)
        self._listener: Listener | None = None
        self._on_fault: Callable[[Exception], None] | None = None
        self._share = share
        self._layers = tuple(full_attention_layers(model_runner.model))
        self._pool = model_runner.token_to_kv_pool
        self._table = request_table(model_runner.req_to_token_pool)
        self._page_size = model_runner.page_size or 1
        self._pass = 0
        self._tokens: list[_Token] = []
        wrapped: Any = backend
        wrapped.init_forward_metadata = self._before_pass(backend.init_forward_metadata)
        wrapped.forward_extend = self._behind_layer(backend.forward_extend)
        wrapped.forward_decode = self._behind_layer(backend.forward_decode)
        if hasattr(backend, "on_choice"):  # attention over tiered pages
            wrapped.on_choice = self._attempted(self._chose)
        logger.info(
            "KV importance: Page lists of layers %s: %g of the pages of each context",
            list(self._layers),
            self._share,
        )

    def attach(self, listener: Listener, on_fault: Callable[[Exception], None]) -> None:
        """Begins to list pages.

        Args:
            listener: takes the lists.
            on_fault: is told of exceptions of this object and of ``listener``.
        """
        self._listener, self._on_fault = listener, on_fault

    def _attempted(self, work: Callable[..., None]) -> Callable[..., None]:
        def attempt(*args: Any) -> None:
            if self._on_fault is None:
                return
            try:
                work(*args)
            except Exception as error:
                self._tokens = []
                self._on_fault(error)

        return attempt

    # ---- before a pass ----

    def _before_pass(self, upstream: Callable[..., None]) -> Callable[..., None]:
        open_pass = self._attempted(self._open)

        @wraps(upstream)
        def init_forward_metadata(forward_batch: ForwardBatch, *args: Any, **kwargs: Any) -> None:
            upstream(forward_batch, *args, **kwargs)
            open_pass(forward_batch)

        return init_forward_metadata

    def _open(self, forward_batch: ForwardBatch) -> None:
        self._pass += 1
        self._tokens = []
        mode, rids = forward_batch.forward_mode, forward_batch.rids
        if rids is None or mode not in (ForwardMode.EXTEND, ForwardMode.DECODE):
            return
        lengths = on_host(forward_batch, "seq_lens")
        is_decode = mode == ForwardMode.DECODE
        new = [1] * len(lengths) if is_decode else on_host(forward_batch, "extend_seq_lens")
        end = 0
        # Padding follows the requests.
        slots = on_host(forward_batch, "req_pool_indices")
        for rid, slot, seq_len, new_tokens in zip(rids, slots, lengths, new, strict=False):
            end += new_tokens
            if slot != PADDING_SLOT and new_tokens:
                locations = self._table[slot, :seq_len].long()
                self._tokens.append(_Token(rid, end - 1, seq_len, new_tokens, locations))

    # ---- behind each layer ----

    def _chose(
        self,
        rows: slice,
        layer: RadixAttention,
        context: torch.Tensor,
        pages: torch.Tensor,
        shares: torch.Tensor,
    ) -> None:
        """A selector chose: ``pages`` of ``context``, both numbers in the pool in the sequence's order."""
        for token in self._tokens:
            if rows.start <= token.row < rows.stop:
                positions = torch.isin(context, pages).nonzero().flatten()
                token.chosen.append((positions.numpy(force=True), shares.float().numpy(force=True)))

    def _behind_layer(self, upstream: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        list_pages = self._attempted(self._list)

        @wraps(upstream)
        def forward(
            q: torch.Tensor, k: Any, v: Any, layer: RadixAttention, *args: Any, **kwargs: Any
        ) -> torch.Tensor:
            output = upstream(q, k, v, layer, *args, **kwargs)
            if self._tokens:
                list_pages(q, layer, kwargs.get("sinks"))
            return output

        return forward

    @torch.inference_mode()
    def _list(self, q: torch.Tensor, layer: RadixAttention, sinks: torch.Tensor | None) -> None:
        if layer.layer_id not in self._layers:
            return
        keys = self._pool.get_key_buffer(layer.layer_id)
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        for token in self._tokens:
            masses = page_masses(
                queries[token.row],
                keys,
                token.locations,
                self._page_size,
                scale=layer.scaling,
                logit_cap=layer.logit_cap,
                sinks=sinks,
            )
            pages, mass = best_first(masses, math.ceil(self._share * masses.shape[-1]))
            token.pages.append(pages)
            token.mass.append(mass)
            if len(token.chosen) < len(token.pages):
                token.chosen.append(None)
        if layer.layer_id == self._layers[-1]:
            self._hand_over()

    def _hand_over(self) -> None:
        assert self._listener is not None
        for token in self._tokens:
            assert len(token.pages) == len(token.chosen) == len(self._layers), "a layer did not run"
            self._listener(
                token.rid,
                ObservedPages(
                    forward_pass=self._pass,
                    seq_len=token.seq_len,
                    new_tokens=token.new_tokens,
                    layers=self._layers,
                    pages=torch.stack(token.pages).numpy(force=True).astype(np.int64),
                    mass=torch.stack(token.mass).numpy(force=True).astype(np.float32),
                    chosen=tuple(token.chosen),
                ),
            )
        self._tokens = []


def install_page_lists(share: float) -> None:
    """Makes this process list pages beside ``LISTED_BACKEND``, whichever variant of it was registered."""
    create = ATTENTION_BACKENDS[LISTED_BACKEND]

    @wraps(create)
    def create_probed(model_runner: ModelRunner) -> Any:
        backend: Any = create(model_runner)
        if not model_runner.is_draft_worker:
            backend.page_lists = PageListProbe(backend, model_runner, share)  # the cache looks for it there
        return backend

    ATTENTION_BACKENDS[LISTED_BACKEND] = create_probed
