"""Kernels of page scores, compiled ahead of a server that is to launch them."""
