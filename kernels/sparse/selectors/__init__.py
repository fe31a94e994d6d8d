"""Selectors: which pages of a context a query reads. One file for each way of estimating."""
