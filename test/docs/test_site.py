"""The site: every page has a place, every link leads somewhere, and it builds without a warning."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.render_docs import write_references
from scripts.rendering.pages import GENERATED, TEMPLATES, committed_pages

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REFERENCES = ROOT / GENERATED
PAGES = committed_pages()


def nav_pages(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    children = entry.values() if isinstance(entry, dict) else entry
    return [page for child in children for page in nav_pages(child)]


def test_every_page_is_in_the_nav_once() -> None:
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.BaseLoader)  # knows no objects of mkdocs
    there = [str(page.relative_to(DOCS)) for page in PAGES if DOCS in page.parents]
    built = [f"{REFERENCES.name}/{template.name}" for template in TEMPLATES.glob("*.md")]
    assert sorted(nav_pages(settings["nav"])) == sorted([*there, *built]), "each page belongs into mkdocs.yml"


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """As Python-Markdown's toc and GitHub make them of our headings."""
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text()), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.fixture(scope="module")
def references() -> list[Path]:
    """Built where mkdocs reads them."""
    write_references(REFERENCES)
    return sorted(REFERENCES.glob("*.md"))


def test_links_of_references_lead_somewhere(references: list[Path]) -> None:
    assert {page.name: broken for page in references if (broken := broken_links(page))} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def broken_links(page: Path) -> list[str]:
    """Those to nothing, to what is not on the site, and those of a committed page to what is built."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
        elif page.parent != REFERENCES and target.resolve().parent == REFERENCES:
            broken.append(f"{link}: not in a checkout")
        elif DOCS in page.parents and name and DOCS not in target.resolve().parents:
            broken.append(f"{link}: not on the site")
    return broken


def test_readme_is_short() -> None:
    """A stranger reads it to the end: long tables belong into docs."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


def test_guides_are_short() -> None:
    """All of `docs` but evidence, decisions, what other engines build from and what is made of docstrings.

    Counted as by ``wc -w``, with tables and markers: what a page gains, another one lets go.
    """
    words = {
        page.stem: len(page.read_text().split())
        for page in DOCS.glob("*.md")
        if page.name not in ("spec.md", "reference.md")
    }
    assert sum(words.values()) <= 25_000, words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_begins_with_its_name_and_a_sentence(page: Path) -> None:
    title, empty, first = page.read_text().splitlines()[:3]
    assert title.startswith("# ")
    assert empty == ""
    assert first[:1].isalnum() or first.startswith(("**", "`")), (
        f"no first sentence under {title!r}: {first!r}"
    )


EVIDENCE = [page for page in PAGES if page.parent == DOCS / "evidence" and page.name != "index.md"]
OPENING = re.compile(
    r"\A# [^\n]+\n\n\*\*Asked\*\*: .+?"
    r"\n\n\*\*Answer\*\*: (?P<answer>.+?)"
    r"\n\n\*\*Rests on\*\*: (?P<rests>.+?)\n(?:\n|\Z)",
    re.DOTALL,
)


def words_of_opening(text: str) -> tuple[int, int]:
    """Of the answer, and of what it rests on, as a reader sees them: with numbers, without their comments."""
    opening = OPENING.match(re.sub(r"<!-- .*? -->", "", text))
    assert opening, "a page of evidence begins with its title, **Asked**:, **Answer**: and **Rests on**:"
    return len(opening["answer"].split()), len(opening["rests"].split())


def test_words_of_an_opening_are_those_that_a_reader_sees() -> None:
    filled_in = '<!-- {{ "%.2f" % over("LRU") }} -->0.87 (0.85 to 0.88)<!-- end -->'
    answer = f"yes: {filled_in} times.\nOr so.\n\n- More."
    opening = f"# A\n\n**Asked**: b?\n\n**Answer**: {answer}\n\n**Rests on**: one c.\n"
    assert words_of_opening(opening) == (10, 2)
    assert words_of_opening(f"{opening}\nWhat stands below.\n") == (10, 2)


@pytest.mark.parametrize("page", EVIDENCE, ids=lambda page: page.name)
def test_evidence_begins_with_an_answer_of_three_lines(page: Path) -> None:
    """Who reads no further knows what came out, losses included; what else was found has a place below."""
    answer, rests = words_of_opening(page.read_text())
    assert answer <= 75, f"the answer has {answer} words, 75 at most: move what is no answer into a section"
    assert rests <= 60, f"what it rests on has {rests} words, 60 at most: move the rest into a section"


def test_pins_hold_what_the_extra_asks_for() -> None:
    """One list of versions: whatever the extra names is pinned, and pinned exactly."""
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = (ROOT / "scripts/pins-docs.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert {re.split(r"[\[>=]", wish)[0] for wish in extras["docs"]} <= set(pins)


def builder() -> str | None:
    """A Python that has mkdocs: ours, or the one of scripts/docs.sh."""
    if importlib.util.find_spec("mkdocs") and importlib.util.find_spec("mkdocstrings"):
        return sys.executable
    own = ROOT / ".cache/docs/bin/python"
    return str(own) if own.exists() else None


@pytest.mark.usefixtures("references")
def test_it_builds_without_a_warning(tmp_path: Path) -> None:
    python = builder()
    if python is None:
        pytest.skip("mkdocs is not installed: run scripts/docs.sh once, or install the extra docs")
    # Without --quiet, which also keeps warnings from being counted.
    command = [python, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr
    reference = (tmp_path / "site/reference.html").read_text()
    for name in ("BlockImportance", "get_importance", "EvictionPolicy", "ImportancePolicy"):
        assert f">{name}<" in reference
