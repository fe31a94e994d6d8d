"""Numbers and reference in README and docs are those of the results and of the code as they are now."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def renderer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render_docs", ROOT / "scripts/render_docs.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_page_is_out_of_date(renderer: Any) -> None:
    stale = [page.name for page in renderer.out_of_date()]
    assert stale == [], "run python scripts/render_docs.py"


def test_a_number_that_somebody_typed_is_found(renderer: Any, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, tmp_path)
    readme = tmp_path / "README.md"
    typed = re.sub(r"(first_token\(\)\[0\] \}\} -->)[\d.]+", r"\g<1>1.99", readme.read_text())
    readme.write_text(typed)
    assert renderer.out_of_date(tmp_path)[readme] == (ROOT / "README.md").read_text()


# ---- what an expression becomes ----

NAMES = {"one": lambda: 1.0, "table": lambda: "| a |\n|---|\n| b |"}


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        (
            'hits <!-- {{ "%.2f" % one() }} -->9<!-- end --> x',
            'hits <!-- {{ "%.2f" % one() }} -->1.00<!-- end --> x',
        ),
        (
            "<!-- {{ table() }} -->\n<!-- end -->",
            "<!-- {{ table() }} -->\n| a |\n|---|\n| b |\n<!-- end -->",
        ),
        ("| <!-- {{ one() }} --><!-- end --> |", "| <!-- {{ one() }} -->1.0<!-- end --> |"),
        ("<!-- a comment --> and {{ braces }}", "<!-- a comment --> and {{ braces }}"),
    ],
)
def test_what_is_filled_in(renderer: Any, text: str, rendered: str) -> None:
    assert renderer.render(text, NAMES) == rendered
    assert renderer.render(rendered, NAMES) == rendered


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "a\nb <!-- {{ missing() }} -->1<!-- end -->",
            "line 2: missing(): UndefinedError: 'missing' is undefined",
        ),
        ("a\n<!-- {{ one() }} -->1<!-- end -->", "line 2: a line of text must not begin with a comment"),
        ("a <!-- {{ one() }} -->1 and <!-- {{ one() }} -->1<!-- end -->", "no '<!-- end -->' behind it"),
    ],
)
def test_what_cannot_be_filled_in(renderer: Any, text: str, said: str) -> None:
    with pytest.raises(renderer.BadPage, match=re.escape(said)):
        renderer.render(text, NAMES)


def test_a_page_with_a_mistake_is_named(renderer: Any, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# A\n\nhits <!-- {{ missing() }} --><!-- end -->\n")
    (tmp_path / "CONTRIBUTING.md").write_text("")
    with pytest.raises(renderer.BadPage, match=r"README\.md, line 3"):
        renderer.out_of_date(tmp_path)


# ---- where numbers come from ----


def test_a_figure_is_of_one_row(renderer: Any) -> None:
    row = renderer.NAMES["row"]
    assert row("tree", leaves=10_000, operation="evict_one", cache="importance")["microseconds"] > 0
    with pytest.raises(ValueError, match=r"0 rows of tree\.json"):
        row("tree", cache="nobody's")
    with pytest.raises(ValueError, match=r"rows of tree\.json have .* not one"):
        row("tree", cache="importance")


def api_routes(routes: Iterable[BaseRoute]) -> Iterator[APIRoute]:
    """Of an app, or of the routers that it includes."""
    for route in routes:
        if isinstance(route, APIRoute):
            yield route
        elif included := getattr(route, "original_router", None):
            yield from api_routes(included.routes)


@pytest.fixture(scope="module")
def references(renderer: Any) -> dict[str, str]:
    return dict(renderer.references())


def test_references_have_every_series_and_every_command(references: dict[str, str]) -> None:
    from sgl_importance.metrics_table import METRICS

    from support.tree_command import tree_command

    named = re.findall(r"^\| `(sglang:\w+)` \|", references["metrics.md"], re.MULTILINE)
    assert named == [metric.exported_name for metric in METRICS]
    commands = re.findall(r"^## `sgl-importance ([\w-]+)`$", references["commands.md"], re.MULTILINE)
    assert set(commands) == set(tree_command().commands)


def test_references_have_every_flag_and_every_route(references: dict[str, str]) -> None:
    """Seen from the other side: what the parser takes and what the app serves."""
    from fastapi import FastAPI

    from sgl_importance.options.importance_options import ImportanceOptions
    from sglang_importance.http.routes import install_routes
    from sglang_importance.launch.flags import add_flags

    parser, app = argparse.ArgumentParser(), FastAPI()
    add_flags(parser)
    install_routes(app, ImportanceOptions(policy="importance"))
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]  # what moved is not
    flags = {flag for action in shown for flag in action.option_strings} - {"-h", "--help"}
    listed = re.findall(r"^### (--[\w-]+)$", references["flags.md"], re.MULTILINE)
    assert set(listed) == flags
    ours = {f"{method} {route.path}" for route in api_routes(app.routes) for method in route.methods}
    assert len(ours) > 10
    headings = re.findall(r"^## ([A-Z]+ /.*)$", references["http_api.md"], re.MULTILINE)
    assert set(headings) == ours
