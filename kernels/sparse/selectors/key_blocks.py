"""``infllm``: blocks of 128 tokens that are read or left whole."""

from __future__ import annotations

from sgl_importance_kernels.sparse.selectors.representative_keys import RepresentativeKeys


class KeyBlocks(RepresentativeKeys):
    """As InfLLM (Xiao et al., 2024): a block is as good as the best of its representative keys.

    InfLLM represents a block by the keys that the queries of a local window liked best. Pages that come
    from storage have no queries any more, so here, too, the keys farthest from the mean of their page do.

    Args:
        page_size: tokens per page.
    """

    unit_tokens = 128

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size, count=max(1, 4 * page_size // self.unit_tokens))
