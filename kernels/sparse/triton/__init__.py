"""Triton kernels of tiered pages: the scan, copies between the tiers, attention to pages where they lie."""
