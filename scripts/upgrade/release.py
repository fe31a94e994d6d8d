"""An earlier release of this package, in an environment of its own beside the sglang that is installed."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

PACKAGES_OF = "import sysconfig; print(sysconfig.get_path('purelib'))"


@dataclass(frozen=True, slots=True)
class Release:
    """
    Attributes:
        python: its interpreter.
    """

    python: Path

    @classmethod
    def of(cls, root: Path, commit: str) -> Release:
        """Made once, below ``.cache/upgrade``; everything but our own package comes from here."""
        folder = root / ".cache" / "upgrade" / commit
        python = folder / "bin" / "python"
        if (folder / "complete").exists():
            return cls(python)
        source = folder / "source"
        venv.create(folder, clear=True)
        source.mkdir()
        archive = subprocess.run(["git", "archive", commit], cwd=root, stdout=subprocess.PIPE, check=False)
        if archive.returncode:
            sys.exit(
                f"commit {commit} is not in this checkout: fetch the whole history (git fetch --unshallow)"
            )
        subprocess.run(["tar", "-x", "-C", source], input=archive.stdout, check=True)
        packages = Path(_printed(str(python), PACKAGES_OF))
        # Its own package is found first, ours behind it and never.
        shared = folder / "shared"
        shared.symlink_to(_printed(sys.executable, PACKAGES_OF))
        (packages / "shared.pth").write_text(f"import site; site.addsitedir({str(shared)!r})\n")
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            str(packages),
            str(source),
        ]
        subprocess.run(pip, check=True)
        (folder / "complete").touch()
        found = cls(python)
        assert str(folder) in found.run("import sgl_importance; print(sgl_importance.__file__)")
        return found

    def run(self, code: str) -> str:
        return _printed(str(self.python), code)

    def flags(self) -> list[str]:
        """Every flag that it adds to sglang's."""
        code = (
            "import argparse, json; from sglang_importance.launch.flags import add_flags\n"
            "parser = argparse.ArgumentParser(); add_flags(parser)\n"
            "print(json.dumps([flag for action in parser._actions for flag in action.option_strings]))"
        )
        found: list[str] = json.loads(self.run(code).splitlines()[-1])
        return sorted(flag for flag in found if flag.startswith("--kv-"))

    def commands(self) -> list[str]:
        """Every command of its ``sgl-importance``."""
        code = (
            "import json; from importlib.metadata import distribution\n"
            "points = distribution('sgl-importance').entry_points\n"
            "print(json.dumps([p.name for p in points if p.group == 'sgl_importance.commands']))"
        )
        found: list[str] = json.loads(self.run(code).splitlines()[-1])
        return sorted(found)


def _printed(python: str, code: str) -> str:
    done = subprocess.run(
        [python, "-W", "ignore", "-c", code], cwd="/", stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.strip()
