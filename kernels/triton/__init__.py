"""Triton kernels that score KV pages; tested against ``sgl_importance_lab.conformance.page_scores``."""
