"""Placement on the server: moves what `sgl_importance.placement` decides."""
