"""Imported first by the fork server of ``warm_start``: what it imports next stays, and need not be walked."""

import gc

gc.disable()
