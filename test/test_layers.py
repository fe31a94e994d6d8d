"""The graph of imports, drawn anew: none goes up the layers of pyproject.toml, none closes a circle."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import patch

import pytest
from click.testing import CliRunner
from importlinter.cli import lint_imports_command

ROOT = Path(__file__).parents[1]


def lint(config: Path) -> tuple[int, str]:
    # Its set-up of logging would silence every logger that this process has made.
    with patch("importlinter.cli._configure_logging"):
        run = CliRunner().invoke(lint_imports_command, ["--config", str(config), "--no-cache"])
    return run.exit_code, run.output


def test_no_import_goes_upwards_or_in_a_circle() -> None:
    code, output = lint(ROOT / "pyproject.toml")
    assert code == 0, output
    kept = re.search(r"Contracts: (\d+) kept, 0 broken", output)
    assert kept, output
    assert int(kept[1]) == 6


FILES = {
    "upward": {"low/__init__.py": "from {package}.high import thing", "high/__init__.py": "thing = 1"},
    "circle": {
        "low/__init__.py": "",
        "high/__init__.py": "",
        "high/one.py": "from {package}.high import two",
        "high/two.py": "def late():\n    from {package}.high import one",
    },
    "typed": {
        "low/__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import {package}.high",
        "high/__init__.py": "",
    },
    "unlisted": {"low/__init__.py": "", "high/__init__.py": "", "new/__init__.py": ""},
}


@pytest.mark.parametrize("fault", FILES)
def test_the_contracts_notice(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kinds of contracts that pyproject.toml uses, over a package with one fault each."""
    package = f"layered_{fault}"
    for name, text in {"__init__.py": "", **FILES[fault]}.items():
        file = tmp_path / package / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.format(package=package) + "\n")
    config = tmp_path / "importlinter.toml"
    config.write_text(f"""
[tool.importlinter]
root_package = "{package}"
[[tool.importlinter.contracts]]
name = "Layers"
type = "layers"
containers = ["{package}"]
exhaustive = true
layers = ["high", "low"]
[[tool.importlinter.contracts]]
name = "No circles"
type = "acyclic_siblings"
ancestors = ["{package}"]
""")
    monkeypatch.syspath_prepend(tmp_path)
    code, output = lint(config)
    assert code == 1, output
    assert "BROKEN" in output
