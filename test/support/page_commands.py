"""The commands in the bash blocks of README and docs, one by one, as a reader would type them."""

from __future__ import annotations

import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path

from scripts.rendering.pages import committed_pages

ROOT = Path(__file__).parents[2]
PAGES = committed_pages()
DEFAULT_URL = "http://127.0.0.1:30000"


@dataclass(frozen=True, slots=True)
class PageCommand:
    """
    Attributes:
        page: name of the file.
        text: the command, with its continuation lines.
    """

    page: str
    text: str

    @property
    def words(self) -> list[str]:
        """Without comments, assignments before the program, and the folder of our environment."""
        lexer = shlex.shlex(self.text.replace("\\\n", " "), posix=True)
        lexer.whitespace_split, lexer.commenters = True, "#"
        words = [word.removeprefix(".venv/bin/") for word in lexer]
        while re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        return words

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.text.split())[:70]}"


def commands_of(page: Path) -> list[PageCommand]:
    found = []
    for block in re.findall(r"^ *```bash\n(.*?)^ *```$", page.read_text(), re.DOTALL | re.MULTILINE):
        pending = ""
        for line in textwrap.dedent(block).splitlines():
            pending += line + "\n"
            if is_whole(pending):
                if pending.strip():
                    found.append(PageCommand(page.name, pending.strip()))
                pending = ""
        assert not pending, f"{page.name}: a command does not end: {pending}"
    return found


def is_whole(text: str) -> bool:
    if text.endswith("\\\n"):
        return False
    try:
        words = shlex.split(text, comments=True)
    except ValueError:  # inside quotes
        return False
    return words.count("for") <= words.count("done")


def all_commands() -> list[PageCommand]:
    return [command for page in PAGES for command in commands_of(page)]
