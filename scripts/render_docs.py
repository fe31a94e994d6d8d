"""Fills in what README and docs take from measurements and from the code, and builds the references.

    python scripts/render_docs.py            # rewrites pages that are out of date, and docs/generated
    python scripts/render_docs.py --check    # writes nothing; ends with 1 where a page is out of date

References (flags, commands, metrics, routes, what was tested) are made whole from the code and the results,
by the templates in ``scripts/rendering/templates``; git ignores them.

A page names what it wants in a comment that no reader sees, and holds what it got up to the next one:

    it hits <!-- {{ "%.2f" % over_lru("importance") }} -->1.44<!-- end --> times as much

Between the braces stands an expression of Jinja; the names in it are the functions of ``scripts/rendering``.
Where the first comment has a line of its own, as ahead of a table, so has what follows it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from jinja2 import Environment, StrictUndefined

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "python"), str(ROOT / "test")]
from scripts.rendering import (  # noqa: E402
    adversarial_tables,
    agents_tables,
    agents_trials,
    aiperf_tables,
    attention_tables,
    bench_tables,
    estimator_tables,
    eviction_tables,
    figures,
    fleet_tables,
    gpu_tables,
    heads_tables,
    leaf_tables,
    miss_tables,
    native_tables,
    peers_tables,
    published_tables,
    random_turns_tables,
    real_model_tables,
    reasoning_tables,
    reference,
    residency_tables,
    routes,
    side_by_side_tables,
    sparse_tables,
    state_tables,
    status,
    tables,
    tested,
    thinking_tables,
    tier_tables,
    tree_tables,
)
from scripts.rendering.pages import GENERATED, TEMPLATES, committed_pages  # noqa: E402

MARKED = re.compile(r"<!-- \{\{(?P<expression>[^\n]+?)\}\} -->(?P<shown>.*?)<!-- end -->", re.DOTALL)


def functions_of(*modules: ModuleType) -> dict[str, Callable[..., Any]]:
    """What pages may call, by name."""
    found: dict[str, Callable[..., Any]] = {}
    for module in modules:
        for name, value in vars(module).items():
            if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__:
                assert name not in found, f"{module.__name__} has a function {name} of another module"
                found[name] = value
    return found


NAMES = functions_of(
    adversarial_tables,
    agents_tables,
    agents_trials,
    aiperf_tables,
    attention_tables,
    bench_tables,
    estimator_tables,
    eviction_tables,
    figures,
    fleet_tables,
    gpu_tables,
    heads_tables,
    miss_tables,
    leaf_tables,
    native_tables,
    peers_tables,
    published_tables,
    random_turns_tables,
    real_model_tables,
    reasoning_tables,
    reference,
    residency_tables,
    routes,
    side_by_side_tables,
    sparse_tables,
    state_tables,
    status,
    tables,
    tested,
    thinking_tables,
    tier_tables,
    tree_tables,
)


class BadPage(Exception):
    """What of a page cannot be filled in, with the line."""


def render(text: str, names: Mapping[str, Callable[..., Any]] = NAMES) -> str:
    """The page with every expression's present value.

    Raises:
        BadPage: an expression fails, or stands where Markdown would end the paragraph.
    """
    environment = Environment(undefined=StrictUndefined, autoescape=False)
    environment.globals = dict(names)

    if len(MARKED.findall(text)) != text.count("<!-- {{"):
        raise BadPage("an expression has no '<!-- end -->' behind it")

    def value(marked: re.Match[str]) -> str:
        is_block = marked["shown"].startswith("\n")
        line = text.count("\n", 0, marked.start()) + 1
        if not is_block and text[: marked.start()].endswith(("\n", "\n- ")):
            raise BadPage(
                f"line {line}: a line of text must not begin with a comment, put a word ahead of it"
            )
        try:
            shown = environment.from_string(f"{{{{{marked['expression']}}}}}").render()
        except Exception as error:
            raise BadPage(
                f"line {line}: {marked['expression'].strip()}: {type(error).__name__}: {error}"
            ) from error
        opening = marked[0].partition("-->")[0]
        return f"{opening}-->" + (f"\n{shown}\n" if is_block else shown) + "<!-- end -->"

    return MARKED.sub(value, text)


def out_of_date(root: Path = ROOT) -> dict[Path, str]:
    """The pages that rendering changes, and what it makes of them.

    Raises:
        BadPage: names the page and the line.
    """
    changed = {}
    for page in committed_pages(root):
        text = page.read_text()
        try:
            rendered = render(text)
        except BadPage as problem:
            raise BadPage(f"{page.relative_to(root)}, {problem}") from problem
        if rendered != text:
            changed[page] = rendered
    return changed


def references() -> dict[str, str]:
    """The references, by the names of their files.

    Raises:
        BadPage: names the template and the line.
    """
    built = {}
    for template in sorted(TEMPLATES.glob("*.md")):
        try:
            built[template.name] = render(template.read_text())
        except BadPage as problem:
            raise BadPage(f"{template.relative_to(ROOT)}, {problem}") from problem
    return built


def write_references(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in references().items():
        (folder / name).write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; end with 1 where a page is out of date"
    )
    check = parser.parse_args().check
    try:
        changed = out_of_date()
        if not check:
            write_references(ROOT / GENERATED)
    except BadPage as problem:
        sys.exit(f"error: {problem}")
    for page, rendered in changed.items():
        if not check:
            page.write_text(rendered)
        print(f"{'out of date' if check else 'rendered'}: {page.relative_to(ROOT)}")
    if check and changed:
        sys.exit("error: run python scripts/render_docs.py")


if __name__ == "__main__":
    main()
