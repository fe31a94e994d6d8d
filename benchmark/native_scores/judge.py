"""Judges trained indexers on text that nothing was learned from: as selectors of pages, and as producers of
the signal (H4), beside exact attention, ``bits``, Quest's bound and BLASST's difference.

    python benchmark/native_scores/judge.py MODEL --text agents=TRANSCRIPTS --text service=TRANSCRIPTS

Selectors: as ``benchmark/sparse/real_model.py``, with windows of the last 30 % of each text. Producers: pages
are placed by the scores of 32 queries, and what the next 32 read is looked for there. Only layers with
indexers choose and place, whatever the arm; others read every page. Intervals are bootstraps over windows.
Resumable: a window's rows are appended to ``--measured``, and its keys and values kept in ``--cache`` (150 MB
each for SmolLM2-135M).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from rich.progress import Progress
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]
# ruff: noqa: E402
from benchmark.native_scores.estimators import Of_page, of_indexer, shared
from benchmark.native_scores.placement import hits
from benchmark.native_scores.seen import Seen
from benchmark.native_scores.summary import placement_rows, selector_rows, shown
from benchmark.native_scores.teacher import WatchedDecoder
from benchmark.native_scores.texts import UNSEEN, judged_part
from benchmark.native_scores.training import Trained, load_indexers
from benchmark.results import print_rows, write_results
from benchmark.sparse.real.choosing import Estimator, exact_answers, of_selector
from benchmark.sparse.real.windows import NoText, Window, default_texts, make_windows, text_at
from benchmark.sparse.real_model import PAGE, arm_row, selector_of
from sgl_importance_lab.trained_model.decoder_shape import UnknownModel

ARMS = "oracle,bits,shared/sum,dim16/sum,dim32/sum,dim32/max"
"""Selectors; ``shared`` is exact attention of all heads together, ``dimN`` the indexer of N dimensions."""
Identity = tuple[Any, ...]


class Judge:
    """Measures one window after the other, and what of it is missing."""

    def __init__(
        self, decoder: WatchedDecoder, trained: dict[str, Trained], measured: Path, cache: Path
    ) -> None:
        self._decoder, self._trained = decoder, trained
        self._measured, self._cache = measured, cache
        self._selectors: dict[str, Estimator] = {}
        self.rows = (
            [json.loads(line) for line in measured.read_text().splitlines()] if measured.exists() else []
        )
        self._done = {_identity(row) for row in self.rows}
        of_all = {tuple(made.indexers) for made in trained.values()} or {tuple(range(decoder.shape.layers))}
        if len(of_all) > 1:
            raise typer.BadParameter(f"indexers of unlike layers: {of_all}; give one of --arms at a time")
        (self.layers,) = of_all

    def window(self, window: Window, arms: list[str], share: float) -> None:
        """All arms and producers on a window."""
        key = {"source": window.source, "number": window.number, "tokens": len(window.tokens)}
        key |= {"unseen": window.source in UNSEEN, "layers": self.layers}
        missing = [arm for arm in arms if (*_place(key), "selector", arm) not in self._done]
        placed = [name for name in self._trained if (*_place(key), "placement", name) not in self._done]
        if not (missing or placed):
            return
        path = self._cache / f"{window.source}-{window.number}-{len(window.tokens)}.safetensors"
        seen = Seen(self._decoder, window.tokens, path)
        if missing:
            exact = exact_answers(self._decoder, window, seen)
            cue_inputs = list(self._decoder.inputs)
        for arm in missing:
            estimator = self._estimator(arm, window, seen, cue_inputs)
            row = arm_row(self._decoder, window, seen, exact, (arm, "layer", estimator), share, self.layers)
            self._keep(key | {"measure": "selector", "arm": arm} | row)
        for name in placed:
            found = hits(seen, self._trained[name].indexers, page_size=PAGE, seed=window.number)
            counts = [[*which, *count] for which, count in found.items()]
            self._keep(key | {"measure": "placement", "arm": name, "counts": counts})

    def _estimator(self, arm: str, window: Window, seen: Seen, cue_inputs: list[torch.Tensor]) -> Estimator:
        name, _, of_page = arm.partition("/")
        if name == "shared":
            return shared(cast("Of_page", of_page))
        if name in self._trained:
            indexers = self._trained[name].indexers
            return of_indexer(
                indexers, self._decoder, seen, window.tasks, cue_inputs, cast("Of_page", of_page)
            )
        if arm not in self._selectors:
            self._selectors[arm] = of_selector(selector_of(arm, self._decoder))
        return self._selectors[arm]

    def _keep(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self._done.add(_identity(row))
        self._measured.parent.mkdir(parents=True, exist_ok=True)
        with self._measured.open("a") as file:
            file.write(json.dumps(row) + "\n")


def _place(row: dict[str, Any]) -> Identity:
    return (row["source"], row["number"], row["tokens"], tuple(row["layers"]))


def _identity(row: dict[str, Any]) -> Identity:
    return (*_place(row), row["measure"], row["arm"])


def main(
    model: Annotated[Path, typer.Argument(help="Checkpoint of the Llama architecture, as Hugging Face's.")],
    tokens: Annotated[int, typer.Option(help="Of a window.")] = 1024,
    windows: Annotated[int, typer.Option(min=1, help="Of each kind of text.")] = 2,
    arms: Annotated[str, typer.Option(help="Selectors, separated by commas.")] = ARMS,
    share: Annotated[float, typer.Option(help="Of pages that are read.")] = 0.1,
    text: Annotated[
        list[str] | None, typer.Option(help="A further kind of text, NAME=PATH; may be repeated.")
    ] = None,
    cache: Annotated[Path, typer.Option(help="Indexers that train.py made, and windows once seen.")] = Path(
        ".cache/native_scores"
    ),
    measured: Annotated[
        Path, typer.Option(help="Where each window's rows are kept, for a run that goes on.")
    ] = Path("build/native_scores.jsonl"),
    out: Annotated[Path | None, typer.Option(help="Write the JSON there.")] = None,
) -> None:
    """Measures and writes the results."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    names = arms.split(",")
    try:
        decoder = WatchedDecoder(model)
        trained = load_indexers(cache, names)
        further = (kind.partition("=") for kind in text or ())
        texts = default_texts() | {name: text_at(Path(path)) for name, _, path in further}
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        found = [
            window
            for name, of_kind in texts.items()
            for window in make_windows(
                tokenizer, name, judged_part(of_kind), tokens=tokens, count=windows, page_size=PAGE
            )
        ]
    except (UnknownModel, NoText, FileNotFoundError) as error:
        raise typer.BadParameter(str(error)) from error
    # One of each kind before the second of any: what is cut short has seen all kinds.
    found.sort(key=lambda window: window.number)
    judge = Judge(decoder, trained, measured, cache / "windows")
    with Progress() as progress:
        task = progress.add_task("windows", total=len(found))
        for window in found:
            judge.window(window, names, share)
            summed = [*selector_rows(judge.rows, trained, decoder.shape), *placement_rows(judge.rows)]
            training = [{"table": "training"} | made.report for made in trained.values()]
            write_results("native_scores", [{"model": model.name}, *training, *summed], out=out)
            progress.advance(task)
    for table in ("selectors", "placement"):
        print_rows(table, [shown(row) for row in summed if row["table"] == table])


if __name__ == "__main__":
    typer.run(main)
