"""Page scores on a CPU, compiled: one pass over the data where eager torch needs one per quantity.

Functions are compiled, or loaded from numba's cache, when this module is imported and not in somebody's
request: their types are given. Sums may be taken in any order, without which no loop over the tokens of a
page is vectorised.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_importance_kernels.jit import njit

FloatArray = npt.NDArray[np.float32]

_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": {"reassoc", "nsz", "contract"}}
_ADD_QUERIES = (
    "void(float32[:,:,::1], float32[:,:,::1], int32[::1], float32[::1], float32, float32, int64, int64, "
    "int64, float32[::1], float32[::1], float32[:,::1])"
)


@njit(**_OPTIONS)
def _add_head(
    row: FloatArray,
    factor: float,
    share: float,
    page_size: int,
    body_start: int,
    body_end: int,
    mass: FloatArray,
    peak: FloatArray,
    body: FloatArray,
) -> None:
    """Adds the probabilities ``factor * row`` of one head, which counts as ``share``, to their pages."""
    for page in range(len(mass)):
        start = page * page_size
        stop = start + page_size
        total = np.float32(0.0)
        for column in range(start, stop):
            total += row[column]
        inner = total
        if start < body_start or stop > body_end:
            inner = np.float32(0.0)
            for column in range(max(start, body_start), min(stop, body_end)):
                inner += row[column]
        total *= factor
        mass[page] += share * total
        peak[page] = max(peak[page], total)
        body[page] += share * factor * inner


@njit("void(float32[:,:,::1], int64, int64, int64, float32[::1], float32[::1], float32[:,::1])", **_OPTIONS)
def add_probabilities(
    probabilities: FloatArray,
    page_size: int,
    body_start: int,
    first_body_end: int,
    mass: FloatArray,
    peak: FloatArray,
    body: FloatArray,
) -> None:
    """Adds the probabilities of consecutive query tokens in one layer to the scores of their pages, in place.

    Args:
        probabilities: 0 where a token sees nothing; float32 [heads, tokens, pages * page_size].
        page_size: tokens per page.
        body_start: first column of the body.
        first_body_end: first column behind the body of the first token; each next token's is one further.
        mass: sum over tokens of the mean over heads; float32 [pages].
        peak: maximum over tokens and heads; float32 [pages].
        body: mean over heads of what lies in the body; float32 [tokens, pages].
    """
    num_heads, num_tokens, _ = probabilities.shape
    share = np.float32(1.0) / np.float32(num_heads)
    one = np.float32(1.0)
    for token in range(num_tokens):
        for head in range(num_heads):
            _add_head(
                probabilities[head, token],
                one,
                share,
                page_size,
                body_start,
                first_body_end + token,
                mass,
                peak,
                body[token],
            )


@njit(**_OPTIONS)
def _exponentials(row: FloatArray, exponents: npt.NDArray[np.int32], logit_cap: float, sink: float) -> Any:
    """Replaces each logit x of the row by exp(x - max), after the soft cap; returns their sum and the sink's.

    ``math.exp`` is a call per number; this is vectorised: 2**n from the bits of a float, the rest, of at most
    ln(2) / 2, from a polynomial. Relative error below 1e-6 near the maximum.
    """
    if logit_cap > 0:
        for column in range(len(row)):
            row[column] = logit_cap * math.tanh(row[column] / logit_cap)
    top = max(row[0], sink)
    for column in range(1, len(row)):
        top = max(top, row[column])
    for column in range(len(row)):
        octaves = max(row[column] - top, np.float32(-87.0)) * np.float32(1.4426950408889634)
        whole = np.floor(octaves + np.float32(0.5))
        rest = (octaves - whole) * np.float32(0.6931471805599453)
        series = np.float32(1 / 120) + rest * np.float32(1 / 720)
        series = np.float32(1 / 24) + rest * series
        series = np.float32(1 / 6) + rest * series
        series = np.float32(0.5) + rest * series
        row[column] = np.float32(1.0) + rest * (np.float32(1.0) + rest * series)
        exponents[column] = (np.int32(whole) + np.int32(127)) << np.int32(23)
    powers = exponents.view(np.float32)
    total = np.float32(math.exp(sink - top))
    for column in range(len(row)):
        row[column] *= powers[column]
        total += row[column]
    return total


@njit(_ADD_QUERIES, **_OPTIONS)
def add_queries(
    queries: FloatArray,
    keys: FloatArray,
    locations: npt.NDArray[np.int32],
    sinks: FloatArray,
    scale: float,
    logit_cap: float,
    page_size: int,
    body_start: int,
    local_tokens: int,
    mass: FloatArray,
    peak: FloatArray,
    body: FloatArray,
) -> None:
    """Adds the last query tokens of a sequence in one layer to the scores of its pages, in place.

    Args:
        queries: after positional encoding; float32 [tokens, heads, head_dim].
        keys: the pool, read where it lies; float32 [slots, kv_heads, head_dim].
        locations: slot of each token of the sequence; int32 [seq_len].
        sinks: learnt logit of each head that takes part in its softmax, minus infinity for none;
            float32 [heads].
        scale: factor on the dot product.
        logit_cap: soft cap of the scaled logits; 0 means none.
        page_size: tokens per page.
        body_start: first token of the body.
        local_tokens: last tokens seen by a query token, itself included, outside its body.
        mass: sum over tokens of the mean over heads; float32 [pages].
        peak: maximum over tokens and heads; float32 [pages].
        body: mean over heads of what lies in the body; float32 [tokens, pages].
    """
    num_tokens, num_heads, head_dim = queries.shape
    seq_len = len(locations)
    group = num_heads // keys.shape[1]
    share = np.float32(1.0) / np.float32(num_heads)
    columns = np.empty((head_dim, seq_len), dtype=np.float32)
    row = np.empty(len(mass) * page_size, dtype=np.float32)
    exponents = np.empty(seq_len, dtype=np.int32)
    for kv_head in range(keys.shape[1]):
        for column in range(seq_len):
            key = keys[locations[column], kv_head]
            for i in range(head_dim):
                columns[i, column] = key[i]
        for token in range(num_tokens):
            visible = seq_len - num_tokens + token + 1
            for head in range(kv_head * group, (kv_head + 1) * group):
                row[:] = np.float32(0.0)
                for i in range(head_dim):
                    factor = queries[token, head, i] * scale
                    line = columns[i]
                    for column in range(visible):
                        row[column] += factor * line[column]
                _add_head(
                    row,
                    np.float32(1.0)
                    / _exponentials(row[:visible], exponents[:visible], logit_cap, sinks[head]),
                    share,
                    page_size,
                    body_start,
                    visible - local_tokens,
                    mass,
                    peak,
                    body[token],
                )


@njit(_ADD_QUERIES, **_OPTIONS)
def add_query(
    queries: FloatArray,
    keys: FloatArray,
    locations: npt.NDArray[np.int32],
    sinks: FloatArray,
    scale: float,
    logit_cap: float,
    page_size: int,
    body_start: int,
    local_tokens: int,
    mass: FloatArray,
    peak: FloatArray,
    body: FloatArray,
) -> None:
    """``add_queries`` for one query token, without the copy of the keys that pays off with more of them."""
    query = queries[0]
    num_heads, head_dim = query.shape
    seq_len = len(locations)
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    logits = np.zeros((num_heads, len(mass) * page_size), dtype=np.float32)
    for column in range(seq_len):
        location = locations[column]
        for kv_head in range(num_kv_heads):
            key = keys[location, kv_head]
            for head in range(kv_head * group, (kv_head + 1) * group):
                dot = np.float32(0.0)
                for i in range(head_dim):
                    dot += query[head, i] * key[i]
                logits[head, column] = dot * scale
    share = np.float32(1.0) / np.float32(num_heads)
    exponents = np.empty(seq_len, dtype=np.int32)
    for head in range(num_heads):
        factor = np.float32(1.0) / _exponentials(logits[head, :seq_len], exponents, logit_cap, sinks[head])
        body_end = seq_len - local_tokens
        _add_head(logits[head], factor, share, page_size, body_start, body_end, mass, peak, body[0])


@njit("float32[:,::1](float32[::1], float32[::1], float32[:,::1], int64, float32)", **_OPTIONS)
def normalised(
    mass: FloatArray, peak: FloatArray, body: FloatArray, num_layers: int, empty_body: float
) -> FloatArray:
    """Means over layers; the body of each token divided by its total, or 0 where that is hardly more than 0.

    Args:
        mass: sum over layers and tokens; float32 [pages].
        peak: maximum over layers and tokens; float32 [pages].
        body: sum over layers; float32 [tokens, pages].
        num_layers: layers that were added.
        empty_body: mean over layers up to which a token's body is empty.

    Returns:
        Mass, body mass and peak over the tokens: sum, sum and maximum; float32 [3, pages].
    """
    scores = np.zeros((3, len(mass)), dtype=np.float32)
    for token in range(len(body)):
        total = np.float32(0.0)
        for page in range(len(mass)):
            total += body[token, page]
        if total / num_layers > empty_body:
            for page in range(len(mass)):
                scores[1, page] += body[token, page] / total
    for page in range(len(mass)):
        scores[0, page] = mass[page] / num_layers
        scores[2, page] = peak[page]
    return scores
