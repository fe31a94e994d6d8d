"""Pins, ledger and pre-warm on the server: the decisions of `sgl_importance` about them, carried out."""
