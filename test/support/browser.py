"""A real headless Chromium for tests and pictures, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CURE = "run `bash scripts/setup.sh --with-browser`, or name a Chromium in CHROMIUM"


class NoBrowser(RuntimeError):
    """There is nothing to drive; the message says what is missing and the cure."""


def find_chromium() -> str | None:
    """The one in the variable CHROMIUM, or the system's; None where only Playwright may have one."""
    named = os.environ.get("CHROMIUM")
    return named or next((found for name in NAMES if (found := shutil.which(name))), None)


@contextmanager
def open_browser() -> Iterator[Any]:
    """A ``playwright.sync_api.Browser``.

    Raises:
        NoBrowser: Playwright or a Chromium is missing.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise NoBrowser(f"Playwright is not installed: {CURE}") from None
    with sync_playwright() as playwright:
        executable = find_chromium() or playwright.chromium.executable_path
        if not Path(executable).exists():
            raise NoBrowser(f"there is no Chromium: {CURE}")
        # Root has no sandbox to run in.
        browser = playwright.chromium.launch(executable_path=executable, chromium_sandbox=os.geteuid() != 0)
        try:
            yield browser
        finally:
            browser.close()
