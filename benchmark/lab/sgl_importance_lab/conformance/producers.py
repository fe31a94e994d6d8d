"""The definition as a producer, to try the kit with: ``producers:reference`` of this folder."""

from __future__ import annotations

import numpy as np

from sgl_importance.interface import BlockImportance
from sgl_importance_lab.conformance.cases import Floats, ProducerCase
from sgl_importance_lab.conformance.check import Producer


def reference() -> Producer:
    return reference_producer


def reference_producer(case: ProducerCase) -> BlockImportance:
    """``sgl_importance_lab.conformance.page_scores`` over all query tokens of a case; needs torch."""
    import torch

    from sgl_importance_lab.conformance.page_scores import combine_layers, layer_page_scores

    kv_len, num_q = case.k.shape[1], case.q.shape[1]
    scores = combine_layers(
        [
            layer_page_scores(
                torch.from_numpy(q),
                torch.from_numpy(k),
                torch.arange(kv_len - num_q, kv_len),
                scale=case.scale,
                logit_cap=case.logit_cap,
                page_size=case.page_size,
                sink_tokens=case.sink_tokens,
                local_tokens=case.local_tokens,
            )
            for q, k in zip(case.q, case.k, strict=True)
        ]
    )
    return BlockImportance(
        mass=_array(scores.mass.mean(dim=0)),
        body_mass=_array(scores.body.mean(dim=0)),
        peak=_array(scores.peak.amax(dim=0)),
        page_size=case.page_size,
        query_tokens=num_q,
    )


def _array(values: object) -> Floats:
    return np.asarray(values, dtype=np.float32)
