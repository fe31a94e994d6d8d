"""The small operators of speculative decoding without sgl_kernel, in torch."""

from __future__ import annotations

import ctypes
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

from sglang_importance.cpu.shim import Shim


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Slots of positions ``start_offset`` to ``end_offset`` of each request, one request behind the other.

    Args:
        req_pool_indices: [num_requests] rows of ``req_to_token``.
        req_to_token: [max_requests, pool_len] slots.
        start_offset: [num_requests] first positions.
        end_offset: [num_requests] positions behind the last.
        out_cache_loc: written to, from its beginning.
        pool_len: length of a row.
    """
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    slots = torch.cat([req_to_token[request, start:end] for request, start, end in rows])
    out_cache_loc[: len(slots)] = slots


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """The other way round: ``out_cache_loc`` is written to these positions of each request."""
    taken = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for request, start, end in rows:
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[request, start:end] = slots.to(req_to_token.dtype)
        taken += end - start


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    speculative_num_steps: int,
) -> None:
    """As ``assign_extend_cache_locs_cpu``: the slots that drafts of each request are written to."""
    ends = seq_lens + topk * speculative_num_steps
    assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, seq_lens, ends, out_cache_loc, pool_len)


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, accept_stride: int
) -> None:
    """The last accepted token of each request, of ``accept_stride`` places in ``accept_tokens``."""
    first = torch.arange(len(accept_lens), device=accept_lens.device) * accept_stride
    bonus_tokens.copy_(accept_tokens.flatten()[first + accept_lens - 1])


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Slots of the accepted tokens, closed up; ``accept_index`` has -1 where none was accepted."""
    accepted = accept_index.flatten()
    accepted = accepted[accepted >= 0]
    accept_out_cache_loc[: len(accepted)] = out_cache_loc[accepted]


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    top_scores_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: int,
) -> None:
    """A chain of drafts, as a tree of one branch; ``tree_mask`` is [num_requests, drafts, drafts], flat.

    Raises:
        NotImplementedError: several branches.
    """
    if topk != 1:
        raise NotImplementedError("trees of drafts need an accelerator: use --speculative-eagle-topk 1")
    chain = torch.ones(num_verify_tokens, num_verify_tokens, dtype=torch.bool).tril_()
    tree_mask.copy_(chain.expand(len(seq_lens), -1, -1).flatten())
    links = (positions, retrieve_index, retrieve_next_token, retrieve_next_sibling)
    reconstruct_indices_from_tree_mask(tree_mask, seq_lens, *links, len(seq_lens), num_verify_tokens)


def reconstruct_indices_from_tree_mask(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Positions and links of trees of drafts. A draft stands behind its parent and its elder siblings.

    Args:
        tree_mask: [batch_size * draft_token_num ** 2] flat; whether a draft (row) sees another (column).
        verified_seq_len: [batch_size] tokens in front of the drafts.
        positions: [batch_size * draft_token_num], written to.
        retrieve_index: [batch_size, draft_token_num], written to: the number of a draft in the batch.
        retrieve_next_token: the same shape, written to: the first child in its own tree, or -1.
        retrieve_next_sibling: the same shape, written to: the next child of the same parent, or -1.
        batch_size: requests.
        draft_token_num: drafts of each.
    """
    seen = tree_mask.view(batch_size, draft_token_num, draft_token_num)
    order = torch.arange(draft_token_num)
    ancestors = seen & (order < order[:, None])
    parents = torch.where(ancestors, order, -1).amax(-1)
    positions.copy_((ancestors.sum(-1) + verified_seq_len[:, None]).flatten())
    retrieve_index.copy_(torch.arange(batch_size * draft_token_num).view(batch_size, draft_token_num))
    none = draft_token_num
    children = torch.where(ancestors, order[:, None], none).amin(-2)
    of_one = (parents[:, :, None] == parents[:, None, :]) & (order[:, None] > order)
    siblings = torch.where(of_one, order[:, None], none).amin(-2)
    retrieve_next_token.copy_(children.masked_fill(children == none, -1))
    retrieve_next_sibling.copy_(siblings.masked_fill((siblings == none) | (parents < 0), -1))


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Goes down each tree as long as a draft is what the model says itself.

    Args:
        predicts: [num_requests * drafts], written to: what follows each accepted draft.
        accept_index: [num_requests, depth] filled with -1, written to: the drafts that were accepted.
        accept_token_num: [num_requests], written to: how many, without the root.
        candidates: [num_requests, drafts] tokens, the root first.
        retrive_index: as ``reconstruct_indices_from_tree_mask`` writes it, and so the next two.
        retrive_next_token: first children.
        retrive_next_sibling: next siblings.
        target_predict: [num_requests, drafts] the model's own choice behind each draft.
    """
    for request, tokens in enumerate(candidates.tolist()):
        says = target_predict[request].tolist()
        path, child = [0], int(retrive_next_token[request, 0])
        while child >= 0 and len(path) < accept_index.shape[1]:
            if tokens[child] == says[path[-1]]:
                path.append(child)
                child = int(retrive_next_token[request, child])
            else:
                child = int(retrive_next_sibling[request, child])
        numbers = retrive_index[request, path]
        accept_index[request, : len(path)] = numbers.to(accept_index.dtype)
        predicts[numbers] = target_predict[request, path].to(predicts.dtype)
        accept_token_num[request] = len(path) - 1


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Copies slots of every buffer to others, as if all were read before the first is written.

    Args:
        data_ptrs: [num_buffers] addresses.
        strides: [num_buffers] bytes of a slot.
        tgt_loc: [num_slots] to where.
        src_loc: [num_slots] from where.
    """
    sources, targets = src_loc.tolist(), tgt_loc.tolist()
    for address, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + slot * size, size) for slot in sources]
        for slot, row in zip(targets, rows, strict=True):
            ctypes.memmove(address + slot * size, row, size)


OPERATORS = (
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    assign_draft_cache_locs_contiguous_cpu,
    fill_bonus_tokens_cpu,
    fill_accept_out_cache_loc_cpu,
    build_tree_kernel_efficient_cpu,
    verify_tree_greedy_cpu,
    copy_all_layer_kv_cache_cpu,
)


class SpeculationKernels(Shim):
    defect = (
        "speculative decoding imports operators of sgl_kernel on a CPU (kernels/ops/speculative/eagle.py:10, "
        "srt/speculative/ngram_worker.py:46), and its PyPI wheel is CUDA only"
    )

    def needed(self) -> bool:
        # Where another stands in for it, every name can be imported, and nothing called.
        kernels = sys.modules.get("sgl_kernel")
        return not hasattr(kernels, "__file__") and "sgl_kernel.speculative" not in sys.modules

    def apply(self) -> None:
        kernels = sys.modules["sgl_kernel"]
        for operator in OPERATORS:
            setattr(kernels, operator.__name__, operator)
        trees = ModuleType("sgl_kernel.speculative")
        trees.__spec__ = ModuleSpec("sgl_kernel.speculative", None)
        trees.__dict__["reconstruct_indices_from_tree_mask"] = reconstruct_indices_from_tree_mask
        sys.modules["sgl_kernel.speculative"] = trees
