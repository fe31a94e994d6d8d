"""Questions about records that were planted in text, and where each layer of a model looks for the answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from sgl_importance.options.observation_options import SignalOptions
from sgl_importance_lab.conformance.page_scores import PageScores, combine_layers, layer_page_scores
from sgl_importance_lab.trained_model.decoder import Decoder, Prefill
from sgl_importance_lab.workload.real_text import Asked, Documents
from sgl_importance_lab.workload.workload_request import WorkloadError

PAGE = 16
SHARE = 0.1
"""Of a prompt's pages, the best: the answer's page is found where it is among them."""
SIGNAL = SignalOptions()
MOST_OBSERVED = SIGNAL.window
"""Tokens at the end of a prompt that are looked at."""


@dataclass(frozen=True)
class Question:
    """A question, as the model read it.

    Attributes:
        is_answered: whether greedy decoding gives the record's number.
        page: of the prompt, where that number begins.
        scores: of the last ``MOST_OBSERVED`` tokens of the prompt, by layer; of layers that see everything.
    """

    is_answered: bool
    page: int
    scores: Mapping[int, PageScores]

    def is_found_by(self, layers: Sequence[int], window: int) -> bool:
        """Whether the best pages by body mass hold the answer, over these layers and the last tokens."""
        body = combine_layers([self.scores[layer] for layer in layers]).body[-window:].sum(dim=0)
        best = body.argsort(descending=True, stable=True)[: max(1, round(SHARE * len(body)))]
        return self.page in best.tolist()


def ask_document(
    decoder: Decoder, tokenizer: Tokenizer, documents: Documents, number: int
) -> Iterator[Question]:
    """Asks for every record of a document; what the prompts share is computed once.

    Raises:
        WorkloadError: prompts are longer than what the model was made for.
    """
    questions = documents.all_records(number)
    prompts = [tokenizer.encode(asked.prompt) for asked in questions]
    longest = max(len(prompt.ids) for prompt in prompts)
    if longest > decoder.shape.context:
        raise WorkloadError(
            f"a prompt has {longest} tokens, and the model was made for {decoder.shape.context}: "
            "lower --document-tokens"
        )
    shared = _shared([prompt.ids for prompt in prompts])
    prefill = Prefill(decoder, torch.tensor(prompts[0].ids[:shared]), keeps_queries=True)
    for asked, prompt in zip(questions, prompts, strict=True):
        at = prompt.char_to_token(asked.stands_at)
        answer = _answer(tokenizer, asked, len(prompt.ids))
        yield _ask(decoder, prefill, prompt.ids[shared:], answer, at // PAGE)


def _ask(decoder: Decoder, prefill: Prefill, asked: list[int], answer: list[int], page: int) -> Question:
    """Asked and answer in tokens behind what was computed."""
    before, num_asked = prefill.keys.shape[1], len(asked)
    size = before + num_asked
    scores = {}

    def attention(
        layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        all_keys = torch.cat([prefill.keys[layer], keys])
        all_values = torch.cat([prefill.values[layer], values])
        if decoder.shape.windows[layer] is None:
            known = torch.cat([prefill.queries[layer], queries[:num_asked]])[-MOST_OBSERVED:]
            scores[layer] = layer_page_scores(
                known,
                all_keys[:size],
                torch.arange(size - len(known), size),
                scale=decoder.shape.dim**-0.5,
                page_size=PAGE,
                sink_tokens=SIGNAL.sink_tokens,
                local_tokens=SIGNAL.local_tokens,
            )
        seen = decoder.shape.sees(layer, torch.arange(before, len(all_keys)), len(all_keys))
        q, k, v = (part.transpose(0, 1)[None] for part in (queries, all_keys, all_values))
        outputs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return outputs[0].transpose(0, 1)

    tokens = torch.tensor([*asked, *answer[:-1]])
    hidden = decoder.hidden(tokens, torch.arange(before, before + len(tokens)), attention)
    likeliest = decoder.log_probabilities(hidden[num_asked - 1 :]).argmax(dim=-1).tolist()
    return Question(likeliest == answer, page, scores)


def _answer(tokenizer: Tokenizer, asked: Asked, num_tokens: int) -> list[int]:
    return list(tokenizer.encode(asked.prompt + asked.answer).ids[num_tokens:])


def _shared(prompts: Sequence[Sequence[int]]) -> int:
    """First tokens that all prompts have alike, and at least one less than the shortest."""
    for at, tokens in enumerate(zip(*prompts, strict=False)):
        if len(set(tokens)) > 1:
            return at
    return min(map(len, prompts)) - 1
