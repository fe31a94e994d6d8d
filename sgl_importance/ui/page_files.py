"""The files of a page, which hold no data, and the headers under which they are sent."""

from __future__ import annotations

from pathlib import Path

SHARED = Path(__file__).parent
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def parts_in(*folders: Path) -> dict[str, Path]:
    """Every file that a page asks for, by its name; the pages themselves are left out."""
    files = (file for folder in folders for file in folder.iterdir())
    return {file.name: file for file in files if file.suffix in MEDIA_TYPES and file.suffix != ".html"}
