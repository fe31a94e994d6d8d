"""Programmatic dependent launch is for the binaries' kernels."""


def is_arch_support_pdl() -> bool:
    return False
