"""What chosen pages change on text that is no needle: the next byte's distribution, beside exact attention.

    python benchmark/lab/scripts/train_text_model.py --out build/text --max-minutes 60
    python benchmark/sparse/text.py build/text

Files of Python's standard library that the model was not trained on, served by a tiered server for each
selector. Of each file the last 256 bytes are what is predicted, behind contexts of several lengths; they
alone read chosen pages. Every prompt is asked twice, exactly (the hint ``selector: all``) and from chosen
pages. Intervals are over files. Resumable: rows that ``--out`` holds already are not measured again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.progress import track

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test"), str(ROOT / "benchmark/lab/scripts")]
# ruff: noqa: E402
from text_training.text import VOCABULARY, Text

from benchmark.results import RESULTS, print_rows, rows_so_far, write_results
from sgl_importance_lab.study.statistics import mean_of

from support.served import script_server
from support.servers import ServerProcess

EXACT = {"kv_hints": {"selector": "all"}}
PREDICTED = 256
"""Last bytes of a file; a whole number of pages."""


@dataclass(frozen=True)
class Predictions:
    """What a server says of the last bytes of a prompt.

    Attributes:
        log_probabilities: nats, float64 [PREDICTED, VOCABULARY].
        targets: token ids that are there, int64 [PREDICTED].
    """

    log_probabilities: np.ndarray[Any, np.dtype[np.float64]]
    targets: np.ndarray[Any, np.dtype[np.int64]]

    @property
    def loss(self) -> float:
        """Mean nats a byte."""
        return float(-self.log_probabilities[np.arange(len(self.targets)), self.targets].mean())

    def divergence_to(self, other: Predictions) -> float:
        """Mean Kullback-Leibler divergence in nats a byte, of `other` from these."""
        mine, theirs = self.log_probabilities, other.log_probabilities
        return float((np.exp(mine) * (mine - theirs)).sum(-1).mean())

    def agreement_with(self, other: Predictions) -> float:
        """Share of bytes of which both name the same as likeliest."""
        likeliest = (each.log_probabilities.argmax(-1) for each in (self, other))
        return float((next(likeliest) == next(likeliest)).mean())


def predicted(server: ServerProcess, prompt: Sequence[int], **extra: Any) -> Predictions:
    """Asks for the distribution at each of the last bytes of a prompt, one token before each."""
    body = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
        "return_logprob": True,
        # The first of these has no distribution: it is what the others are behind.
        "logprob_start_len": len(prompt) - PREDICTED - 1,
        "top_logprobs_num": VOCABULARY,
        **extra,
    }
    found = server.post("/generate", body)["meta_info"]["input_top_logprobs"][1:]
    log_probabilities = np.full((PREDICTED, VOCABULARY), -np.inf)
    for row, entries in zip(log_probabilities, found, strict=True):
        for value, token, _ in entries:
            row[token] = value
    assert np.isfinite(log_probabilities).all(), "the server left out tokens of the vocabulary"
    return Predictions(log_probabilities, np.array(prompt[-PREDICTED:]))


def compared(found: Sequence[tuple[Predictions, Predictions]], shortest: Sequence[float]) -> dict[str, Any]:
    """What files say of one context: a mean and its interval of each quantity, in nats a byte or as a share.

    Args:
        found: of each file, exact predictions and those from chosen pages.
        shortest: of each file, the loss of exact predictions behind the shortest context.
    """
    values = {
        "loss": [exact.loss for exact, _ in found],
        "gain": [short - exact.loss for short, (exact, _) in zip(shortest, found, strict=True)],
        "gain_chosen": [short - chosen.loss for short, (_, chosen) in zip(shortest, found, strict=True)],
        "divergence": [exact.divergence_to(chosen) for exact, chosen in found],
        "agreement": [exact.agreement_with(chosen) for exact, chosen in found],
    }
    return {name: asdict(mean_of(each)) for name, each in values.items()}


def main(
    model: Annotated[Path, typer.Argument(help="Checkpoint of benchmark/lab/scripts/train_text_model.py.")],
    selectors: Annotated[
        str, typer.Option(help="Separated by commas.")
    ] = "bits,quest,infllm,mean,window,token,oracle",
    contexts: Annotated[
        str, typer.Option(help="Bytes of a prompt, separated by commas, shortest first.")
    ] = "512,1024,2048,4096,8192",
    budget: Annotated[float, typer.Option(help="As --kv-sparse-budget.")] = 0.05,
    files: Annotated[int, typer.Option(min=2, help="Held-out files.")] = 80,
    out: Annotated[Path | None, typer.Option(help="Write the JSON there.")] = None,
) -> None:
    """Measures and writes the results."""
    path = out or RESULTS / "pages_text.json"
    lengths = [int(length) for length in contexts.split(",")]
    held_out = Text.of_this_python().held_out(max(lengths), files)
    if not (model / "training.json").exists():
        raise typer.BadParameter(
            f"{model} is no checkpoint of benchmark/lab/scripts/train_text_model.py: run that first"
        )
    training = json.loads((model / "training.json").read_text())
    trained = {name: training[name] for name in ("text", "steps", "bytes_of_a_step")}
    setting = {"budget": budget, "files": files, "predicted": PREDICTED, **trained}
    rows = rows_so_far(path)
    same = [row for row in rows if all(row.get(name) == setting[name] for name in setting)]
    done = {(row["selector"], row["context"]) for row in same}
    for selector in selectors.split(","):
        if all((selector, length) in done for length in lengths):
            continue
        with script_server(*_flags(selector, budget, max(lengths)), model=model) as server:
            found: dict[int, list[tuple[Predictions, Predictions]]] = {length: [] for length in lengths}
            for tokens in track(held_out, description=selector):
                for length in lengths:
                    exact, chosen = (predicted(server, tokens[-length:], **extra) for extra in (EXACT, {}))
                    found[length].append((exact, chosen))
        shortest = [exact.loss for exact, _ in found[lengths[0]]]
        for length in lengths:
            key = {"selector": selector, "context": length, **setting}
            rows.append({**key, **compared(found[length], shortest)})
        write_results("pages_text", rows, out=path)
    shown = [
        {name: value["value"] if isinstance(value, dict) else value for name, value in row.items()}
        for row in ({name: row[name] for name in row if name not in trained} for row in rows)
    ]
    print_rows("Chosen pages on text", shown)


def _flags(selector: str, budget: float, longest: int) -> tuple[str, ...]:
    return (
        *("--kv-policy", "importance", "--kv-residency", "tiered", "--kv-device-tokens", "0.6"),
        *("--kv-sparse-selector", selector, "--kv-sparse-budget", str(budget)),
        *("--kv-sparse-prompt-tokens", str(PREDICTED), "--kv-sparse-min-context", "0"),
        *("--max-running-requests", "2", "--max-total-tokens", str(4 * longest), "--skip-tokenizer-init"),
    )


if __name__ == "__main__":
    typer.run(main)
