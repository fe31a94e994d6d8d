"""Announces this tree's plugin to the Python that has a folder on its path, as an installed package would be.

    python scripts/gpu/announce.py FOLDER

Building the package would take a newer setuptools than a machine without network may have.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def announce(folder: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    information = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (information / "entry_points.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    announce(Path(sys.argv[1]))
