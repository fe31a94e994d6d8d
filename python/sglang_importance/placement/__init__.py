"""Pins, ledger and pre-warm on the server: what `sgl_importance` decides about them is carried out here."""
