"""What it would save to bring pages to the device at admission, by what earlier queries attended to.

    python benchmark/pages/prefetch.py

Two parts, both with the embedded model and questions about documents that take turns, so that a document's
pages have left the device when it is asked about again. *Replay*: page lists of a served model, through the
server's slots and policies, with several rankings of what to bring (``prefetch_replay.py``). ``fresh``
questions are asked once, of ``popular`` ones some come again and again. Counts of pages, so other work on the
machine changes nothing. *Served*: each question is asked twice in a row. The second time its pages are on the
device: so much faster, at best, a server would be that knew them all and brought them at no cost. Rows that
the JSON has already are not measured again.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.progress import track

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from benchmark.pages.load import slowed
from benchmark.pages.page_counts import PageCounts
from benchmark.pages.prefetch_replay import MOST, RANKINGS, SELECTED, Loads, prepare, run
from benchmark.pages.residency import device_tokens
from benchmark.pages.streamed import streamed
from benchmark.results import RESULTS, print_rows, rows_so_far, write_results
from sgl_importance.embedded_model import checkpoint_path
from sgl_importance.trace.page_steps import load_page_steps
from sgl_importance_lab.probe.tasks import ProbeDocument, make_document
from sgl_importance_lab.probe.tokenizer import encode
from sgl_importance_lab.study.statistics import Estimate, ratio_of

from support.served import script_server
from support.servers import ServerProcess

PAGE, LISTED = 16, 0.25
QUESTION_TOKENS, ANSWER_TOKENS = 16, 8
KINDS = ("fresh", "popular")
POPULARITY = 1.0
"""Exponent of the Zipf distribution of ``popular`` questions."""
SERVED_CONTEXT, SERVED_DOCUMENTS, SERVED_TURNS = 8192, 4, 6
COUNTS = ("brought", "first", "later", "streamed")


@dataclass(frozen=True, slots=True)
class Arm:
    """One replay.

    Attributes:
        slots: share of the longest context that each layer keeps.
        prompt_selects: whether questions choose pages, as under ``--kv-sparse-prompt-tokens``.
        has_prior: whether pages in slots are valued by the tree's importance, too.
    """

    policy: str = "ema"
    slots: float = 0.2
    prompt_selects: bool = True
    ranking: str = "none"
    budget: float = 0.0
    has_prior: bool = False


def replayed_arms() -> list[Arm]:
    """Every ranking with the budget of what a token reads; in the usual setting, others and a prior, too."""
    brought = RANKINGS[1:]
    settings: list[dict[str, Any]] = [
        {},
        {"slots": 1.0},
        {"policy": "lru"},
        {"prompt_selects": False},
    ]
    arms = [Arm(**setting, ranking=ranking, budget=SELECTED) for setting in settings for ranking in brought]
    arms += [Arm(ranking=ranking, budget=budget) for budget in (SELECTED / 2, MOST) for ranking in brought]
    for selects in (True, False):
        arms.append(Arm("importance", prompt_selects=selects, has_prior=True))
    without = [Arm(arm.policy, arm.slots, arm.prompt_selects) for arm in arms]
    return [*dict.fromkeys(without), *arms]


# ---- replay ----


def names_asked(kind: str, document: ProbeDocument, n: int, draws: random.Random) -> list[str]:
    names = draws.sample(list(document.records), n)
    if kind == "fresh":
        return names
    return draws.choices(names, [rank**-POPULARITY for rank in range(1, n + 1)], k=n)


def ask(server: ServerProcess, rid: str, document: ProbeDocument, name: str) -> None:
    body = {
        "rid": rid,
        "input_ids": encode(document.messages(name)),
        "sampling_params": {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True},
    }
    server.post("/generate", body)


def record(length: int, documents: int, n: int, directory: Path) -> None:
    """Questions about as many documents of each kind, a turn of all after the other."""
    unfinished = directory.with_suffix(".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    texts = [make_document(length - 64, seed) for seed in range(len(KINDS) * documents)]
    kinds = KINDS * documents
    draws = random.Random(1)
    asked = [names_asked(kind, text, n, draws) for kind, text in zip(kinds, texts, strict=True)]
    flags = (
        *("--kv-policy", "observe", "--page-size", str(PAGE), "--max-running-requests", "1"),
        *("--max-total-tokens", str((len(texts) + 1) * (length + 256) // PAGE * PAGE)),
        *("--kv-importance-source", "none", "--kv-importance-trace", str(unfinished)),
        *("--kv-importance-trace-pages", str(LISTED)),
    )
    with script_server(*flags, model=checkpoint_path()) as server:
        for turn in track(range(n), description=f"{length:,} tokens: recording"):
            for number, text in enumerate(texts):
                ask(server, f"{kinds[number]}/{number}/{turn}", text, asked[number][turn])
        server.shut_down()  # what waits to be written is
    unfinished.rename(directory)


def replay(length: int, directory: Path, rows: list[dict[str, Any]], out: Path) -> None:
    """Adds the rows of a recording that are not there yet."""
    arms = [arm for arm in replayed_arms() if not _has(rows, _key(length, KINDS[0], arm))]
    if not arms:
        return
    events = prepare(load_page_steps(directory))
    for arm in track(arms, description=f"{length:,} tokens: replaying"):
        slots = int(arm.slots * events.longest)
        found = run(
            events,
            arm.policy,
            slots,
            arm.ranking,
            arm.budget,
            prompt_selects=arm.prompt_selects,
            has_prior=arm.has_prior,
        )
        for kind in KINDS:
            by_document = [astuple(loads) for name, loads in found.items() if name.startswith(kind)]
            rows.append({**_key(length, kind, arm), **_counts(by_document)})
        write_results("pages_prefetch", rows, out=out)


def _key(length: int, kind: str, arm: Arm) -> dict[str, Any]:
    return {
        "part": "replay",
        "context": length,
        "questions": kind,
        "policy": arm.policy,
        "slots": arm.slots,
        "prompt_selects": arm.prompt_selects,
        "ranking": arm.ranking,
        "budget": arm.budget,
        "prior": arm.has_prior,
    }


def _has(rows: Sequence[dict[str, Any]], key: dict[str, Any]) -> bool:
    return any(key.items() <= row.items() for row in rows)


def _counts(by_document: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """Pages of all layers for each question; those of every document beside, for intervals."""
    names = list(Loads.__dataclass_fields__)
    table = np.array(by_document, float)
    questions = table[:, names.index("questions")]
    each = {name: (table[:, names.index(name)] / questions).tolist() for name in names[1:]}
    means = {name: float(np.mean(values)) for name, values in each.items()}
    return {"documents": len(table), **means, "by_document": {name: each[name] for name in COUNTS}}


def compare(rows: Sequence[dict[str, Any]]) -> None:
    """Adds to each replayed row what it saves beside nothing brought in the same setting: [value, low, high].

    ``named``: share of what the first step would have loaded that was there; ``steps``: loads that steps wait
    for, and ``copies``: all loads, as parts of those without. Intervals are over documents.
    """
    setting = ("context", "questions", "policy", "slots", "prompt_selects")
    of_part = [row for row in rows if row["part"] == "replay"]
    none = {
        tuple(row[name] for name in setting): row
        for row in of_part
        if row["ranking"] == "none" and not row["prior"]
    }
    for row in of_part:
        found = _beside(row, none[tuple(row[name] for name in setting)])
        row |= {name: astuple(value) for name, value in found.items()}


def _beside(row: dict[str, Any], none: dict[str, Any]) -> dict[str, Estimate]:
    """What ``compare`` adds to a row."""

    def sums(of: dict[str, Any], names: Sequence[str]) -> list[float]:
        return list(map(sum, zip(*(of["by_document"][name] for name in names), strict=True)))

    def ratio(names: Sequence[str]) -> Estimate:
        return ratio_of(list(zip(sums(row, names), sums(none, names), strict=True)))

    missed = ratio(["first"])
    named = missed.from_one()
    return {"named": named, "steps": ratio(["first", "later"]), "copies": ratio(COUNTS)}


# ---- served ----


def serve(throttled: bool, rows: list[dict[str, Any]], out: Path) -> None:
    """Adds a row of questions that are asked twice, with the single ones in it."""
    if _has(rows, {"part": "served", "throttled": throttled}):
        return
    length = SERVED_CONTEXT
    pool = (SERVED_DOCUMENTS + 1) * (length + 256) // PAGE * PAGE
    flags = (
        *("--kv-policy", "importance", "--kv-residency", "tiered", "--max-running-requests", "1"),
        *("--kv-device-tokens", str(device_tokens(pool, int(0.2 * length / PAGE)))),
        *("--max-total-tokens", str(pool), "--page-size", str(PAGE), "--skip-tokenizer-init"),
        *("--kv-sparse-selector", "rep", "--kv-sparse-budget", str(SELECTED)),
        *("--kv-sparse-prompt-tokens", str(QUESTION_TOKENS)),
    )
    env = slowed() if throttled else {}
    texts = [make_document(length - 64, seed) for seed in range(SERVED_DOCUMENTS)]
    draws = random.Random(2)
    found = []
    with script_server(*flags, model=checkpoint_path(), env=env) as server:
        for text in track(texts, description="served: documents"):
            server.generate(encode(text.messages(next(iter(text.records)))), max_new_tokens=1)
        for turn in track(range(SERVED_TURNS), description="served: turns"):
            for number, text in enumerate(texts):
                prompt = encode(text.messages(draws.choice(list(text.records))))
                row: dict[str, Any] = {"document": number, "turn": turn}
                for name in ("cold", "warm"):
                    loaded = PageCounts(server)
                    first, second = streamed(server, prompt, 2).times
                    row |= {
                        f"{name}_{key}": value
                        for key, value in loaded.since("loaded", "load_seconds").items()
                    }
                    row |= {f"{name}_first_token": first, f"{name}_second_token": second}
                found.append(row)
    key = {"part": "served", "context": length, "throttled": throttled}
    rows.append({**key, **_twice(found), "by_question": found})
    write_results("pages_prefetch", rows, out=out)


def _twice(questions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The second time that questions are asked beside the first, over documents: [value, low, high].

    ``second_token``: seconds to it, and ``loads``: pages, as parts of the first time's. ``waiting``: share of
    the first time's seconds in which attention waited for loads; ``saved``: those that it waited less.
    """
    documents = range(SERVED_DOCUMENTS)
    sums = {
        name: np.array([sum(each[name] for each in questions if each["document"] == at) for at in documents])
        for name in questions[0]
    }
    seconds, waited = sums["cold_second_token"], sums["cold_load_seconds"]
    parts = {
        "second_token": (sums["warm_second_token"], seconds),
        "loads": (sums["warm_loaded"], sums["cold_loaded"]),
        "waiting": (waited, seconds),
        "saved": (waited - sums["warm_load_seconds"], seconds),
    }
    return {
        name: astuple(ratio_of(list(zip(above.tolist(), below.tolist(), strict=True))))
        for name, (above, below) in parts.items()
    }


def main(
    lengths: Annotated[str, typer.Option(help="Tokens of a document, separated by commas.")] = "4096",
    documents: Annotated[int, typer.Option(help="Documents of each length and kind.")] = 8,
    n: Annotated[int, typer.Option(help="Questions about each document.")] = 8,
    recordings: Annotated[Path, typer.Option(help="Folder of the recordings; those there are used.")] = ROOT
    / ".cache/pages_prefetch",
    out: Annotated[Path, typer.Option(help="The JSON, with the rows so far.")] = RESULTS
    / "pages_prefetch.json",
) -> None:
    rows = rows_so_far(out)
    recordings.mkdir(parents=True, exist_ok=True)
    for length in map(int, lengths.split(",")):
        directory = recordings / str(length)
        if not directory.exists():
            record(length, documents, n, directory)
        replay(length, directory, rows, out)
    for throttled in (False, True):
        serve(throttled, rows, out)
    compare(rows)
    write_results("pages_prefetch", rows, out=out)
    shown = [
        {name: value for name, value in row.items() if name not in ("part", "by_document")}
        for row in rows
        if row["part"] == "replay"
    ]
    print_rows("Pages brought at admission", shown)
    served = [
        {name: str(value) for name, value in row.items() if name != "by_question"}
        for row in rows
        if row["part"] == "served"
    ]
    print_rows("Second time a question is asked, as a part of the first", served)


if __name__ == "__main__":
    typer.run(main)
