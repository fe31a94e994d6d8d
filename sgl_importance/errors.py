"""What every error of ours is."""

from __future__ import annotations


class ImportanceError(Exception):
    """Raised by this project on purpose; its message is one line that names the cure.

    An embedder who catches it catches whatever the project refuses, and nothing that is a fault in its code.
    """
