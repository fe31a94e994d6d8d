"""The embedded reasoning model: a small Llama that writes long thoughts which are right only if it looks back."""

from __future__ import annotations
