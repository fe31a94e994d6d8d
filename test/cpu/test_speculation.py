"""Speculative decoding in torch, against what upstream derives on the host and against plain attention."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.speculative.ngram_worker import _derive_tree_links

from sglang_importance.cpu import speculation
from sglang_importance.cpu.attention import extended
from sglang_importance.cpu.request_attention import attend_requests
from sglang_importance.cpu.speculation import SpeculationKernels
from sglang_importance.cpu.verified_drafts import DraftsInTorch, VerifiedDrafts, verify_drafts


@st.composite
def trees(draw: st.DrawFn) -> np.ndarray:
    """Masks [requests, drafts, drafts] of trees whose nodes stand behind their parents."""
    requests, drafts = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    masks = np.zeros((requests, drafts, drafts), dtype=bool)
    for mask in masks:
        for node in range(drafts):
            if node:
                mask[node] = mask[draw(st.integers(0, node - 1))]
            mask[node, node] = True
    return masks


def links(masks: np.ndarray, lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
    requests, drafts, _ = masks.shape
    positions = torch.empty(requests * drafts, dtype=torch.int64)
    numbers, children, siblings = (torch.empty(requests, drafts, dtype=torch.int64) for _ in range(3))
    speculation.reconstruct_indices_from_tree_mask(
        torch.from_numpy(masks).flatten(), lengths, positions, numbers, children, siblings, requests, drafts
    )
    return positions, numbers, children, siblings


def test_each_shim_looks_for_the_defect_itself() -> None:
    assert not VerifiedDrafts().needed()  # ours are in place
    assert not SpeculationKernels().needed()
    assert not DraftsInTorch().needed()


@given(trees())
def test_links_are_those_that_upstream_derives_on_the_host(masks: np.ndarray) -> None:
    requests, drafts, _ = masks.shape
    lengths = torch.arange(10, 10 + requests)
    positions, numbers, children, siblings = links(masks, lengths)
    first_child, next_sibling = _derive_tree_links(masks, requests, drafts)
    assert torch.equal(children, first_child)
    assert torch.equal(siblings, next_sibling)
    assert numbers.flatten().tolist() == list(range(requests * drafts))
    depth = torch.from_numpy(masks.sum(-1) - 1)
    assert torch.equal(positions.view(requests, drafts), lengths[:, None] + depth)


@given(trees(), st.randoms(use_true_random=False))
def test_what_is_accepted_is_what_the_model_says_itself(masks: np.ndarray, rng) -> None:
    requests, drafts, _ = masks.shape
    _, numbers, children, siblings = links(masks, torch.zeros(requests, dtype=torch.int64))
    tokens = torch.tensor([[rng.randrange(2) for _ in range(drafts)] for _ in range(requests)])
    says = torch.tensor([[rng.randrange(2) for _ in range(drafts)] for _ in range(requests)])
    predicts = torch.zeros(requests * drafts, dtype=torch.int32)
    accepted = torch.full((requests, drafts), -1, dtype=torch.int32)
    counts = torch.empty(requests, dtype=torch.int32)
    speculation.verify_tree_greedy_cpu(predicts, accepted, counts, tokens, numbers, children, siblings, says)
    for request, mask in enumerate(masks):
        path = [int(each) - request * drafts for each in accepted[request] if each >= 0]
        assert len(path) == counts[request] + 1
        assert path[0] == 0
        ancestors = [node for node in range(drafts) if mask[path[-1], node]]
        assert path == ancestors, "a branch of the tree, from its root"
        assert all(tokens[request, node] == says[request, before] for before, node in pairwise(path))
        below = [node for node in range(drafts) if mask[node].sum() == len(path) + 1 and mask[node, path[-1]]]
        assert all(tokens[request, node] != says[request, path[-1]] for node in below), "and it ends there"
        assert [int(predicts[request * drafts + node]) for node in path] == says[request, path].tolist()


def test_drafts_in_a_chain_see_what_a_prompt_that_goes_on_sees() -> None:
    rng = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(40, 2, 8, generator=rng) for _ in range(2))
    slots = torch.stack([torch.randperm(40, generator=rng)[:20] for _ in range(2)])
    lengths, drafts = torch.tensor([9, 5]), 4
    query = torch.randn(2 * drafts, 4, 8, generator=rng)
    rows = (slots, torch.arange(2))
    chain = torch.ones(2, drafts, drafts, dtype=torch.bool).tril()
    verified = verify_drafts(query, torch.empty_like(query), keys, values, *rows, lengths, chain, scaling=0.3)
    new = torch.full((2,), drafts)
    batch = extended(rows[1], lengths + new, new)
    goes_on = attend_requests(query, torch.empty_like(query), keys, values, slots, batch, scaling=0.3)
    torch.testing.assert_close(verified, goes_on)
    alone = torch.eye(drafts, dtype=torch.bool).expand(2, -1, -1)
    other = verify_drafts(query, torch.empty_like(query), keys, values, *rows, lengths, alone, scaling=0.3)
    torch.testing.assert_close(other[::drafts], verified[::drafts])  # the roots
    assert not torch.allclose(other, verified)


def test_slots_of_requests_go_both_ways() -> None:
    table = torch.zeros(3, 8, dtype=torch.int32)
    requests, start, end = torch.tensor([2, 0]), torch.tensor([1, 4]), torch.tensor([3, 7])
    slots = torch.tensor([11, 12, 13, 14, 15])
    speculation.assign_req_to_token_pool_cpu(requests, table, start, end, slots, 8)
    assert table[2, 1:3].tolist() == [11, 12]
    assert table[0, 4:7].tolist() == [13, 14, 15]
    assert int(table.count_nonzero()) == 5
    out = torch.zeros(6, dtype=torch.int64)
    speculation.assign_extend_cache_locs_cpu(requests, table, start, end, out, 8)
    assert out.tolist() == [*slots.tolist(), 0]
    drafts = torch.zeros(4, dtype=torch.int64)
    speculation.assign_draft_cache_locs_contiguous_cpu(requests, table, start, drafts, 8, 1, 2)
    assert drafts.tolist() == [11, 12, 13, 14]


def test_accepted_tokens_close_up() -> None:
    accepted = torch.tensor([[0, 2, -1], [3, -1, -1]])
    slots = torch.zeros(6, dtype=torch.int64)
    speculation.fill_accept_out_cache_loc_cpu(accepted, torch.tensor([10, 11, 12, 13, 14, 15]), slots)
    assert slots.tolist() == [10, 12, 13, 0, 0, 0]
    bonus = torch.zeros(2, dtype=torch.int64)
    tokens = torch.tensor([[5, 6, 0], [7, 0, 0]])
    speculation.fill_bonus_tokens_cpu(tokens, torch.tensor([2, 1]), bonus, 3)
    assert bonus.tolist() == [6, 7]


def test_slots_are_read_before_they_are_written() -> None:
    buffers = [torch.arange(12, dtype=torch.float32).view(6, 2) + 100 * layer for layer in range(2)]
    wanted = [buffer.clone() for buffer in buffers]
    for buffer in wanted:
        buffer[[1, 2]] = buffer[[2, 4]]
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    speculation.copy_all_layer_kv_cache_cpu(
        addresses, torch.tensor([8, 8]), torch.tensor([1, 2]), torch.tensor([2, 4])
    )
    assert all(torch.equal(*pair) for pair in zip(buffers, wanted, strict=True))


def test_a_chain_of_drafts_is_a_tree_of_one_branch() -> None:
    lengths = torch.tensor([7, 3])
    mask = torch.zeros(2 * 3 * 3, dtype=torch.bool)
    positions = torch.empty(6, dtype=torch.int64)
    numbers, children, siblings = (torch.full((2, 3), -1) for _ in range(3))
    parents = top = torch.zeros(2, 2, dtype=torch.int64)
    built = (parents, top, lengths, mask, positions, numbers, children, siblings)
    speculation.build_tree_kernel_efficient_cpu(*built, 1, 2, 3, 1)
    assert mask.view(2, 3, 3).tolist() == torch.ones(2, 3, 3).tril().bool().tolist()
    assert positions.tolist() == [7, 8, 9, 3, 4, 5]
    assert children.tolist() == [[1, 2, -1]] * 2
    assert siblings.tolist() == [[-1] * 3] * 2
    with pytest.raises(NotImplementedError, match="--speculative-eagle-topk 1"):
        speculation.build_tree_kernel_efficient_cpu(*built, 2, 2, 3, 1)
