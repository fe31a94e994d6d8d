"""A launch that must stop, and how it stops: one line per reason, no traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import NoReturn

from sgl_importance.errors import ImportanceError
from sgl_importance.options.importance_options import name_of

PINNED_VERSION = "0.5.21"
"""The release of sglang that ``scripts/setup.sh`` installs."""
TESTED_VERSIONS = ("0.5.21", "0.5.22", "0.5.23")
"""Releases of sglang beside which ``scripts/versions.sh`` passes, oldest first; others are admitted with a
warning."""
WITHOUT_POLICY = "use --kv-policy default"

REFUSED_EXIT_CODE = 2
# The launcher learns from this code that a scheduler has already said why it stopped.
SCHEDULER_REFUSED_EXIT_CODE = 78


def cure(otherwise: str = WITHOUT_POLICY) -> str:
    """The cure where sglang is not as we expect it; ``otherwise``: how to go on with it as it is."""
    return f"install sglang=={PINNED_VERSION} or {otherwise}"


class LaunchRefused(ImportanceError):
    """The launch must stop; each reason is one line that ends with its cure."""

    def __init__(self, reasons: Iterable[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("\n".join(self.reasons))


def cannot_record(directory: str, error: OSError) -> LaunchRefused:
    """For a directory of ``--kv-importance-trace`` in which nothing can be written."""
    reason = f"cannot record in {directory} ({error.strerror})"
    return LaunchRefused([f"{reason}: give {name_of('trace.directory')} a writable directory"])


def report(refused: LaunchRefused) -> None:
    """Writes the reasons to stderr, as argparse writes its errors."""
    sys.stderr.write("".join(f"sgl-importance: error: {reason}\n" for reason in refused.reasons))
    sys.stderr.flush()


def exit_refused(refused: LaunchRefused) -> NoReturn:
    """Ends a command line."""
    report(refused)
    raise SystemExit(REFUSED_EXIT_CODE) from None
