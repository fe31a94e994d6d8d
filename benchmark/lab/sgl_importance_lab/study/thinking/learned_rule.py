"""A rule that learns from other thoughts which pages will be wanted soon: logistic regression."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sgl_importance_lab.study.thinking.keep_rules import Scores
from sgl_importance_lab.study.thinking.page_features import PAGE_FEATURES, Features, page_features
from sgl_importance_lab.study.thinking.wants import Wants

HORIZON = 10
"""Steps within which a want counts."""
SAMPLED_EVERY = 7
"""Of the steps of a request: what two neighbouring steps say of a page is nearly the same."""
PENALTY = 1e-4
ITERATIONS = 60


@dataclass(frozen=True, slots=True)
class LearnedRule:
    """Logit of the chance that a page is wanted within 10 steps.

    Attributes:
        weights: of the features and their squares, standardised; float32 [features].
        bias: constant.
        mean, deviation: of the features that it was fitted to.
    """

    weights: Features
    bias: float
    mean: Features
    deviation: Features

    def __call__(self, wants: Wants) -> Iterator[Scores]:
        for features in page_features(wants):
            standard = (expanded(features) - self.mean) / self.deviation
            yield (standard @ self.weights + self.bias).astype(np.float64)

    def named_weights(self) -> dict[str, float]:
        """Of the features that are not heads, largest first; a square's name ends with it."""
        names = [*PAGE_FEATURES, *(f"{name}, squared" for name in PAGE_FEATURES)]
        weights = dict(zip(names, self.weights.tolist(), strict=False))
        return dict(sorted(weights.items(), key=lambda item: -abs(item[1])))


def expanded(features: Features) -> Features:
    """The features with the squares of those that are not heads before the heads; [..., more features]."""
    count = len(PAGE_FEATURES)
    return np.concatenate([features[..., :count], features[..., :count] ** 2, features[..., count:]], axis=-1)


def fit_rule(requests: Sequence[Wants]) -> LearnedRule:
    """Fits to thoughts of other requests than those that it will judge; deterministic.

    Every 7th step is taken, with all its pages and heads. L-BFGS as torch has it, an L2 penalty of 1e-4.
    """
    # The core is imported without torch.
    import torch
    from torch.nn import functional as F

    assert requests
    rows, wanted = zip(*(examples(wants) for wants in requests), strict=True)
    table, target = expanded(np.concatenate(rows)), np.concatenate(wanted)
    mean, deviation = table.mean(0), np.maximum(table.std(0), 1e-3)
    inputs = torch.from_numpy((table - mean) / deviation)
    targets = torch.from_numpy(target.astype(np.float32))
    weights = torch.zeros(inputs.shape[1], requires_grad=True)
    bias = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.LBFGS([weights, bias], max_iter=ITERATIONS, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = F.binary_cross_entropy_with_logits(inputs @ weights + bias, targets)
        value = value + PENALTY * weights.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return LearnedRule(weights.detach().numpy(), float(bias.detach()), mean, deviation)


def examples(wants: Wants) -> tuple[Features, Features]:
    """Features of pages at sampled steps, [examples, features], and whether each is wanted soon."""
    rows, targets = [], []
    for step, features in enumerate(page_features(wants)):
        if step % SAMPLED_EVERY or step + HORIZON >= wants.num_steps:
            continue
        num_pages = int(wants.num_pages[step])
        soon = wants.wanted[step + 1 : step + 1 + HORIZON, :, :num_pages].any(0)
        rows.append(features[:, :num_pages].reshape(-1, features.shape[-1]))
        targets.append(soon.ravel().astype(np.float32))
    return np.concatenate(rows), np.concatenate(targets)
