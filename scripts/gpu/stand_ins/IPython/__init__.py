"""Stands in for IPython, from which sglang imports how a notebook shows what a program asked."""
