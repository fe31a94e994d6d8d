"""A lightning indexer (DeepSeek Sparse Attention, 2025) beside one layer of a dense model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

FP8 = torch.float8_e4m3fn
SCALE_BYTES = 4


@dataclass(frozen=True)
class IndexerShape:
    """
    Attributes:
        width: of a layer's input.
        heads: queries of a token; they share one key.
        dim: dimensions of each; a power of two.
        theta: of the rotation by position.
    """

    width: int
    heads: int
    dim: int
    theta: float

    @property
    def rotated(self) -> int:
        """Dimensions, the first ones, that are rotated by position."""
        return self.dim // 2

    @property
    def key_bytes(self) -> int:
        """Of a token in a layer: fp8, and a scale."""
        return self.dim + SCALE_BYTES


class Indexer(nn.Module):
    """Scores past tokens: the sum over heads of weight * relu(query * key).

    As sglang's (``layers/attention/dsa/dsa_indexer.py``): one normed key a token for all heads, the first
    dimensions rotated by position, weights of the heads out of the token itself. Queries come from the
    layer's input, since a model without latent attention has no compressed queries.
    """

    def __init__(self, shape: IndexerShape) -> None:
        super().__init__()
        self.shape = shape
        self.queries = nn.Linear(shape.width, shape.heads * shape.dim, bias=False)
        self.key = nn.Linear(shape.width, shape.dim, bias=False)
        self.norm = nn.LayerNorm(shape.dim)
        self.weights = nn.Linear(shape.width, shape.heads, bias=False)
        exponents = torch.arange(0, shape.rotated, 2, dtype=torch.float64) / shape.rotated
        self._frequencies = shape.theta**-exponents

    def keys_of(self, inputs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[tokens, dim] of a layer's inputs, [tokens, width], at int64 [tokens]."""
        return self._rotated(self.norm(self.key(inputs)), positions)

    def scores(self, inputs: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """[rows, tokens], larger where a query is expected to look.

        Args:
            inputs: of the layer at the queries, [rows, width].
            positions: int64 [rows].
            keys: of the tokens that are scored, [tokens, dim].
        """
        shape = self.shape
        queries = self.queries(inputs).unflatten(1, (shape.heads, shape.dim))
        queries = self._rotated(queries, positions[:, None])
        products = F.relu((queries.flatten(0, 1) @ keys.T).view(len(inputs), shape.heads, -1))
        weights = self.weights(inputs) * (shape.heads * shape.dim) ** -0.5
        return torch.einsum("rh,rht->rt", weights, products)

    def _rotated(self, vectors: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[..., None].double() * self._frequencies
        cos, sin = angles.cos().float(), angles.sin().float()
        turned, rest = vectors.split([self.shape.rotated, self.shape.dim - self.shape.rotated], dim=-1)
        first, second = turned.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def in_fp8(keys: torch.Tensor) -> torch.Tensor:
    """Keys [tokens, dim] as they come back out of a cache of fp8, with one scale a token.

    They are rotated first, as sglang does (Hadamard), which spreads outliers and leaves products as they are
    where queries are rotated, too; here the keys are rotated back in their place.
    """
    rotation = hadamard(keys.shape[1])
    turned = keys @ rotation
    scales = turned.abs().amax(dim=1, keepdim=True).clamp(min=1e-4) / torch.finfo(FP8).max
    return ((turned / scales).to(FP8).float() * scales) @ rotation.T


def hadamard(size: int) -> torch.Tensor:
    """The orthogonal matrix of Sylvester, [size, size], for a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return matrix / math.sqrt(size)
