"""When are answers from chosen pages wrong, and how sure is the model then?

    python benchmark/sparse/adversarial.py

The embedded model, served. The document is read exactly; everything behind it, the question too, is forced
upon the model token by token as if it had generated it, so that each token chooses its pages alone. Then one
token is free: the value that was asked for. Cases:

- ``plain``: records scattered among filler;
- ``crowded``: the record lies in a run of records, so that its page has more names than vectors kept of it;
- ``split``: the name is the last token of a page, its value the first of the next;
- ``decoys``: sixteen other places name the same name, without a value;
- ``middle``: the middle twentieth of 16k tokens;
- ``late``: the question comes behind 2,000 generated tokens.

Resumable: rows that ``--out`` holds already, of the same arguments, are not measured again.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Annotated, Any

import httpx
import typer
from rich.progress import track
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from benchmark.results import RESULTS, print_rows, rows_so_far, write_results
from sgl_importance.embedded_model import checkpoint_path
from sgl_importance_lab.probe.document import RECORD_TOKENS, filler_sentence, record_pieces
from sgl_importance_lab.probe.tasks import ProbeDocument, make_document
from sgl_importance_lab.probe.tokenizer import ASSISTANT, BEGIN, SYSTEM, USER, piece_ids
from sgl_importance_lab.probe.vocabulary import INSTRUCTION, NAMES, QUESTION, held_out_values, name_piece

from support.served import script_server
from support.servers import ServerProcess

SELECTORS = "bits,quest,infllm,mean,window,token,oracle"
PAGE = 16
PREFIX = (BEGIN, SYSTEM, *INSTRUCTION, USER)
MENTIONS = 16
LATE_TOKENS = 2000
AT_A_TIME = 4
MODE = "none"
"""Of rows: others, of audits that changed budgets, and what audits found are from when servers had such."""
SECONDS = 3600.0
"""For an answer: late ones are long, and the machine may be shared."""


@dataclass(frozen=True)
class Case:
    """A document, and questions about it.

    Attributes:
        pieces: of the document, as text.
        answers: by the name that is asked for.
        before: pieces that come between the document and the question.
    """

    pieces: list[str]
    answers: dict[str, str]
    before: tuple[str, ...] = ()

    @property
    def prompt(self) -> list[int]:
        """Token ids of the document."""
        return [token for piece in (*PREFIX, *self.pieces) for token in piece_ids(piece)]


def positions(document: ProbeDocument) -> dict[str, int]:
    """Where each record begins among the document's tokens, by name."""
    names = (name for name, _ in document.record_list)
    return dict(zip(names, document.layout.record_offsets, strict=True))


def plain(length: int, n: int, rng: Random, seed: int) -> Case:
    document = make_document(length, seed)
    names = rng.sample(list(document.records), min(n, len(document.records)))
    return Case(document.layout.pieces, {name: document.records[name] for name in names})


def crowded(length: int, n: int, rng: Random, seed: int) -> Case:
    records = [(name, rng.choice(held_out_values(name))) for name in rng.sample(NAMES, n + 12)]
    run = [piece for record in records for piece in record_pieces(record)]
    before: list[str] = []
    after: list[str] = []
    while len(before) + len(after) + len(run) < length - 11:
        (before if rng.random() < 0.5 else after).extend(filler_sentence(rng))
    return Case([*before, *run, *after], dict(records[6:-6]))


def split(length: int, n: int, rng: Random, seed: int) -> Case:
    document = make_document(length, seed)
    at_the_end = [name for name, at in positions(document).items() if (len(PREFIX) + at) % PAGE == PAGE - 1]
    return Case(document.layout.pieces, {name: document.records[name] for name in at_the_end[:n]})


def decoys(length: int, n: int, rng: Random, seed: int) -> Case:
    document = make_document(length - n * MENTIONS, seed)
    names = rng.sample(list(document.records), min(n, len(document.records)))
    layout = document.layout
    records = set(layout.record_offsets)
    sentences = [start for start in layout.sentence_offsets if start not in records]
    mentions: dict[int, list[str]] = {}
    for name in names:
        for start in rng.sample(sentences, MENTIONS):
            mentions.setdefault(start, []).append(name_piece(name))
    pieces = [each for at, piece in enumerate(layout.pieces) for each in (*mentions.get(at, ()), piece)]
    return Case(pieces, {name: document.records[name] for name in names})


def middle(length: int, n: int, rng: Random, seed: int) -> Case:
    document = make_document(2 * length, seed)
    within = [name for name, at in positions(document).items() if abs(at / document.tokens - 0.5) < 0.025]
    return Case(document.layout.pieces, {name: document.records[name] for name in within[:n]})


def late(length: int, n: int, rng: Random, seed: int) -> Case:
    case = plain(length, n, rng, seed)
    answer: list[str] = []
    while len(answer) < LATE_TOKENS:
        answer += filler_sentence(rng)
    return Case(case.pieces, case.answers, tuple(answer))


CASES: dict[str, Callable[[int, int, Random, int], Case]] = {
    each.__name__: each for each in (plain, crowded, split, decoys, middle, late)
}


class ForcedTokens(CustomLogitProcessor):
    """Lets a request generate the tokens that ``custom_params`` name, and then what it likes."""

    def __call__(self, logits: Any, custom_param_list: list[dict[str, Any]] | None = None) -> Any:
        for row, params in enumerate(custom_param_list or ()):
            done, forced = len(params["__req__"].output_ids), params["forced"]
            if done < len(forced):
                logits[row] = float("-inf")  # this class travels without the names of its module
                logits[row, forced[done]] = 0.0
        return logits


def ask(server: ServerProcess, case: Case, name: str, *, exact: bool) -> dict[str, Any]:
    """One question: whether the answer was right, how sure the model was of it, and what was read."""
    question = (*case.before, *QUESTION, name_piece(name), ASSISTANT)
    # The model's own first token follows on the document; the forced ones come behind it, as generated ones.
    forced = [token for piece in question for token in piece_ids(piece)]
    answer = httpx.post(
        f"{server.base_url}/generate",
        timeout=SECONDS,
        json={
            "input_ids": case.prompt,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": len(forced) + 1,
                "ignore_eos": True,
                "custom_params": {"forced": forced},
            },
            "custom_logit_processor": ForcedTokens.to_str(),
            "return_logprob": True,
            "kv_hints": {"report": True, **({"selector": "all"} if exact else {})},
        },
    )
    reply = answer.raise_for_status().json()
    answered = reply["output_ids"][-1]
    assert reply["output_ids"][:-1] == forced
    logprob, token, _ = reply["meta_info"]["output_token_logprobs"][-1]
    assert token == answered
    return {
        "right": [answered] == piece_ids(case.answers[name]),
        "confidence": math.exp(logprob),
        **reply["meta_info"]["kv_importance"]["pages"],
    }


def mean(values: list[float]) -> float | None:
    return fmean(values) if values else None


def summary(asked: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts and means over questions; a mean over none is None."""
    right = [each for each in asked if each["right"]]
    wrong = [each for each in asked if not each["right"]]
    row: dict[str, Any] = {"n": len(asked), "right": len(right) / len(asked)}
    for label, those in (("right", right), ("wrong", wrong)):
        row[f"confidence_{label}"] = mean([each["confidence"] for each in those])
    candidates = sum(each["candidates"] for each in asked)
    row["read"] = sum(each["selected"] for each in asked) / candidates if candidates else 1.0
    return row


def main(
    selectors: Annotated[str, typer.Option(help="Separated by commas.")] = SELECTORS,
    cases: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(CASES),
    length: Annotated[int, typer.Option(help="Tokens of a document; middle has twice as many.")] = 8000,
    budget: Annotated[float, typer.Option(help="As --kv-sparse-budget.")] = 0.05,
    n: Annotated[int, typer.Option(help="Questions of a case.")] = 20,
    late_n: Annotated[int, typer.Option(help="Questions of the case late.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Write the JSON there.")] = None,
) -> None:
    path = out or RESULTS / "pages_adversarial.json"
    rows = rows_so_far(path)
    done = {(row["selector"], row["mode"], row["case"]) for row in rows}
    for selector in ("all", *selectors.split(",")):
        missing = [name for name in cases.split(",") if (selector, MODE, name) not in done]
        if not missing:
            continue
        flags = (
            *("--kv-policy", "importance", "--kv-residency", "tiered", "--kv-device-tokens", "0.6"),
            *("--kv-sparse-selector", "bits" if selector == "all" else selector),
            *("--kv-sparse-budget", str(budget), "--max-running-requests", str(AT_A_TIME)),
            *("--max-total-tokens", "40000", "--enable-custom-logit-processor"),
            "--disable-overlap-schedule",  # which lets a request's own list of tokens fall a step behind
        )
        with script_server(*flags, model=checkpoint_path()) as server:
            for name in missing:
                count = late_n if name == "late" else n
                case = CASES[name](length, count, Random(f"{name}/{length}"), seed=1)
                document = {"input_ids": case.prompt, "sampling_params": {"max_new_tokens": 1}}
                server.post("/generate", document)  # once for all questions
                with ThreadPoolExecutor(AT_A_TIME) as pool:
                    answers = pool.map(partial(ask, server, case, exact=selector == "all"), case.answers)
                    label = f"{selector} {name}"
                    asked = list(track(answers, total=len(case.answers), description=label))
                rows.append({"selector": selector, "mode": MODE, "case": name, **summary(asked)})
                write_results("pages_adversarial", rows, out=path)
    print_rows("When answers from chosen pages are wrong", rows)


assert RECORD_TOKENS == 3, "a name is the last token of its page, and its value the first of the next"

if __name__ == "__main__":
    typer.run(main)
