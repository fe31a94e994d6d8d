"""Seeded garbage: bytes, JSON values and words, and the command line that they are given to."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import signal
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import typer

from sgl_importance.cli import main as cli

LIMIT_SECONDS = 60
WORDS = (
    *(
        "",
        " ",
        "-",
        "--",
        "-1",
        "0",
        "00",
        "+1",
        "1.5",
        "nan",
        "inf",
        "-inf",
        "1e999",
        "-0.0",
        "1_000",
        "0x10",
    ),
    *(
        "9" * 25,
        "9" * 400,
        "1e-400",
        "½",
        "١٢",
        "x",
        "a,b,,",
        ",",
        ",,,",
        "0,0",
        "1,-1",
        "auto",
        "off",
        "true",
    ),
    *(
        "null",
        "None",
        "{}",
        "[]",
        "[1,",
        '{"a": 1}',
        "%s%n%d",
        "../..",
        "/",
        ".",
        "/dev/null",
        "/proc/self/mem",
    ),
    *(
        "a\nb",
        "a\tb",
        "\x1b[31m",
        "é",
        "💥",
        "\udcff",
        "A" * 5000,
        "http://",
        "http://[",
        "http://x:99999999",
    ),
    *(
        "localhost",
        "file:///etc/passwd",
        "a:b",
        ":",
        "os:getcwd",
        "*",
        "~",
        "$HOME",
        "lru,",
        "lru,lru",
        "importance",
    ),
)


def word(rng: random.Random) -> str:
    """Something that a user or a script might give by mistake."""
    if rng.random() < 0.7:
        return rng.choice(WORDS)
    return "".join(
        chr(rng.choice((rng.randrange(1, 128), rng.randrange(128, 0x2FF)))) for _ in range(rng.randrange(9))
    )


def value(rng: random.Random, depth: int = 0) -> Any:
    """A JSON value that no format asks for."""
    plain = (
        *(
            None,
            True,
            False,
            0,
            1,
            -1,
            2**31,
            2**63 - 1,
            2**63,
            -(2**63) - 1,
            10**30,
            0.5,
            -0.5,
            1e308,
            5e-324,
        ),
        *("", "x", "é💥", "\x00", "9" * 30, "1970-01-01", "0001-01-01", "9999-12-31T23:59:59+23:59"),
    )
    kind = rng.random()
    if depth > 3 or kind < 0.7:
        return rng.choice(plain)
    if kind < 0.85:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    names = ("role", "content", "a", "", "hash_ids", "messages", "prompt", "body", "timestamp", "text")
    return {rng.choice(names): value(rng, depth + 1) for _ in range(rng.randrange(4))}


def spoil(rng: random.Random, document: Any) -> Any:
    """A JSON value like ``document``, with a part of it left out, doubled or put in the place of another."""
    if rng.random() < 0.25:
        return value(rng)
    if isinstance(document, dict) and document:
        name = rng.choice(list(document))
        rest = {key: each for key, each in document.items() if key != name or rng.random() < 0.8}
        return {**rest, name: spoil(rng, document[name])} if name in rest else rest
    if isinstance(document, list) and document:
        place = rng.randrange(len(document))
        parts = [document[place]] * rng.randrange(3) if rng.random() < 0.3 else [spoil(rng, document[place])]
        return [*document[:place], *parts, *document[place + 1 :]]
    return value(rng)


def nested(levels: int) -> bytes:
    """JSON that is deeper than any reader's stack."""
    return b'{"a":' * levels + b"[" * levels


def damage(rng: random.Random, data: bytes) -> bytes:
    """The bytes with a few flipped, cut out, doubled, zeroed or replaced."""
    spoiled = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(spoiled) + 1)
        stop = min(len(spoiled), start + rng.choice((1, 2, 4, 8, 64, 4096)))
        match rng.randrange(6):
            case 0 if start < len(spoiled):
                spoiled[start] ^= 1 << rng.randrange(8)
            case 1:
                del spoiled[start:stop]
            case 2:
                spoiled[start:start] = spoiled[start:stop]
            case 3:
                spoiled[start:stop] = bytes(stop - start)
            case 4:
                spoiled[start:stop] = rng.randbytes(stop - start)
            case 5:
                del spoiled[start:]
    return bytes(spoiled)


def json_lines(rng: random.Random, good: Sequence[Any]) -> bytes:
    """Lines of which some are spoiled as JSON, some as bytes, and one in a hundred is far too deep."""
    lines = []
    for document in good:
        spoiled = spoil(rng, document) if rng.random() < 0.5 else document
        line = json.dumps(spoiled).encode()
        lines.append(damage(rng, line) if rng.random() < 0.15 else line)
    if rng.random() < 0.01:
        lines.append(nested(20_000))
    return b"\n".join(lines) + b"\n" * rng.randrange(2)


@cache
def command() -> Any:
    """The command, built once: that takes longer than most of what it then refuses."""
    return typer.main.get_command(cli.build_app())


def run(words: Sequence[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``sgl-importance`` in this process; fails where it takes too long."""
    out, err = io.StringIO(), io.StringIO()
    before = sys.argv
    sys.argv = [cli.PROGRAM, *words]
    built = command()
    try:
        with (
            pytest.MonkeyPatch.context() as patch,
            _limited(words),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            patch.setattr(cli, "build_app", lambda: built)
            cli.main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    finally:
        sys.argv = before
    return code, out.getvalue(), err.getvalue()


@contextlib.contextmanager
def _limited(words: Sequence[str]) -> Iterator[None]:
    def late(*_: object) -> None:
        pytest.fail(f"still at it after {LIMIT_SECONDS} s: {words}")

    former = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)


def check_one_line(words: Sequence[str]) -> int:
    """Runs a command, which must work or end with one line that says why; its exit code."""
    try:
        code, _, err = run(words)
    except Exception as error:
        raise AssertionError(f"{words} ended in a traceback") from error
    problem = [line for line in err.splitlines() if line.startswith("error: ")]
    if code == 2:
        assert len(problem) == 1, (words, err)
        rest = [line for line in err.splitlines() if line not in problem]
        assert all(line.startswith("skipped ") for line in rest), (words, err)
    else:
        assert not problem, (words, code, err)
    assert code in (0, 1, 2), (words, code)
    return code


def examples(few: int, many: int) -> pytest.MarkDecorator:
    """``count`` examples in every run, and many more at night."""
    factor = int(os.environ.get("SGL_IMPORTANCE_FUZZ", "1"))
    return pytest.mark.parametrize(
        "count", [few, pytest.param(many * factor, marks=pytest.mark.nightly)], ids=["few", "many"]
    )


def check_message(error: object) -> None:
    """What ends in front of a user is one line, and no name of a type alone."""
    assert len(str(error).splitlines()) == 1, error
