"""Right replies of a decoder, token for token, with all attention or with a limited one.

Greedy generation follows the right reply as long as every token of it is the most likely one, so one pass
over the right reply tells whether generation would write it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from decoder_training.decoder import Decoder
from torch import Tensor

from reasoner_training.training_data import ReasoningSequence
from sgl_importance_lab.probe.word_tokenizer import PAD
from sgl_importance_lab.reasoner.tokenizer import reasoner_tokenizer


@dataclass(frozen=True)
class Batch:
    """Padded sequences: ids and positions are int64 [batch, tokens], `is_reply` is bool of that shape."""

    ids: Tensor
    positions: Tensor
    is_reply: Tensor


def to_batch(sequences: Sequence[ReasoningSequence]) -> Batch:
    longest = max(len(sequence.ids) for sequence in sequences)
    pad = reasoner_tokenizer().ids[PAD]
    ids = torch.full((len(sequences), longest), pad)
    positions = torch.zeros_like(ids)
    is_reply = torch.zeros_like(ids, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        length = len(sequence.ids)
        ids[row, :length] = torch.tensor(sequence.ids)
        positions[row, :length] = torch.tensor(sequence.positions)
        is_reply[row, sequence.reply_start : length] = True
    return Batch(ids, positions, is_reply)


def window_mask(sequences: Sequence[ReasoningSequence], window: int) -> Tensor:
    """Keys that a query sees if it sees the prompt and its last `window` tokens alone, itself included.

    bool [batch, 1, tokens, tokens].
    """
    longest = max(len(sequence.ids) for sequence in sequences)
    index = torch.arange(longest)
    ago = index[:, None] - index[None, :]
    prompts = torch.tensor([sequence.reply_start for sequence in sequences])
    seen = (ago < window)[None] | (index[None, None, :] < prompts[:, None, None])
    return ((ago >= 0)[None] & seen)[:, None]


@torch.inference_mode()
def right_tokens(decoder: Decoder, sequence: ReasoningSequence, window: int | None = None) -> Tensor:
    """Whether each token of the reply is the most likely one behind those before it: bool [reply tokens]."""
    batch = to_batch([sequence])
    mask = None if window is None else window_mask([sequence], window)
    hidden = decoder(batch.ids, batch.positions, mask)[0, sequence.reply_start - 1 : -1]
    return decoder.lm_head(hidden).argmax(-1) == batch.ids[0, sequence.reply_start :]
