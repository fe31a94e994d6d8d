"""Runs the lines of a container file in a root of their own, where no image can be built.

    python scripts/deploy/run_lines.py scripts/deploy/cpu.Containerfile server /tmp/root

The root must hold what the first FROM names (``debootstrap --variant=minbase bookworm /tmp/root``), and be
somebody's to change root into. COPY copies what git has, RUN is run by ``sh -c``, ENV and WORKDIR hold from
there on; the rest is printed. Ends at the first line that fails.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Instruction and the rest of each line, comments and continuations resolved."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", "").splitlines():
        if line.strip():
            name, _, rest = line.strip().partition(" ")
            yield name.upper(), rest.strip()


def stage(text: str, wanted: str | None) -> list[tuple[str, str]]:
    """The instructions that make a stage, those of the stages below it first; of the last one where None."""
    stages: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for name, rest in instructions(text):
        if name == "FROM":
            base, named = [*re.split(r"\s+as\s+", rest, flags=re.IGNORECASE), str(len(stages))][:2]
            current = stages[named] = list(stages.get(base, [("FROM", base)]))
        else:
            current.append((name, rest))
    return stages[wanted] if wanted else current


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("stage")
    parser.add_argument("root", type=Path)
    arguments = parser.parse_args()
    folder = "/"
    environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
    # What the machine needs to reach its package index is no part of an image.
    environment |= {key: value for key, value in os.environ.items() if re.match(r"PIP_|SSL_|.*_proxy$", key)}
    for name, rest in stage(arguments.file.read_text(), arguments.stage):
        print(f"==> {name} {rest}", flush=True)
        began = time.monotonic()
        if name == "WORKDIR":
            folder = rest
            (arguments.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif name == "ENV":
            for word in shlex.split(rest):
                key, _, value = word.partition("=")
                environment[key] = value.replace("$PATH", environment["PATH"])
        elif name == "COPY":
            assert rest == ". .", "only whole checkouts are copied"
            target = arguments.root / folder.lstrip("/")
            archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, check=True)
            subprocess.run(["tar", "-x", "-C", target], input=archive.stdout, check=True)
        elif name == "RUN":
            line = f"cd {shlex.quote(folder)} && {rest}"
            command = ["chroot", str(arguments.root), "/usr/bin/env", "-i"]
            command += [f"{key}={value}" for key, value in environment.items()]
            code = subprocess.run([*command, "sh", "-c", line], check=False).returncode
            print(f"    ended with {code} after {time.monotonic() - began:.0f} s", flush=True)
            if code:
                sys.exit(1)


if __name__ == "__main__":
    main()
