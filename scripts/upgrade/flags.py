"""What this release says to each flag of an earlier one."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from sgl_importance.options.moved_flags import MOVED_FLAGS
from sglang_importance.launch.flags import add_flags

if TYPE_CHECKING:
    from upgrade.release import Release


def flag_rows(release: Release) -> list[dict[str, Any]]:
    """One row for each: ``known``, or the line with which it is refused; neither is a fault."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    known = {flag for action in parser._actions for flag in action.option_strings} - MOVED_FLAGS.keys()
    return [
        {"what": "flag", "name": flag, "known": flag in known, "said": MOVED_FLAGS.get(flag, "")}
        for flag in release.flags()
    ]
