"""Which pages there are: those of the checkout, and references that are built beside them."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = Path(__file__).with_name("templates")
GENERATED = Path("docs/generated")
"""Below the root, ignored by git."""


def committed_pages(root: Path = ROOT) -> list[Path]:
    """README, CONTRIBUTING and all of ``docs`` but what is built, and drafts in ``docs/new``."""
    apart = (root / GENERATED, root / "docs/new")
    docs = sorted(page for page in (root / "docs").rglob("*.md") if page.parent not in apart)
    return [root / "README.md", root / "CONTRIBUTING.md", *docs]
