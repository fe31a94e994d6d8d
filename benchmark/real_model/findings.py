"""Reproduces what docs/evidence says of a trained model's attention: g, h1, h2, h3, sensitivity, residency.

    python benchmark/real_model/findings.py --model .cache/models/smollm2

No server: the model's own arithmetic in float32 on one thread, page scores by the reference's definition,
answers that are given. What is recorded goes through the same studies as a server's recording. Recordings
that are there already are used again. Parameters stand here and nowhere else.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import track
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]
# ruff: noqa: E402
from benchmark.real_model.recorded import SIGNAL, Observed, Setting, by_document, observe, write_recording
from benchmark.results import RESULTS
from benchmark.sparse.real.choosing import of_selector
from benchmark.sparse.real_model import selector_of
from sgl_importance_lab.trained_model.decoder import Decoder
from sgl_importance_lab.trained_model.decoder_shape import Shape, UnknownModel
from sgl_importance_lab.workload.real_text import (
    TextShape,
    make_text_workload,
    model_tokenizer,
    read_text,
    text_at_hand,
)
from sgl_importance_lab.workload.workload_request import WorkloadError, WorkloadRequest, write_requests
from sglang_importance.attention.layers import sampled_layers

SEED = 7
SHARE = 0.1
"""Of the pages, those that ``bits`` chooses."""
ANSWERING = {"smollm2": (18, 21, 22, 23), "gemma3-270m": (5, 11)}
"""Layers that ``sgl-importance layers`` finds in a model, by its name; it is not asked of others."""


@dataclass(frozen=True)
class Traffic:
    """Requests about windows of text.

    Attributes:
        shape: of the windows.
        records: requests for a record, by the beginning of its sentence.
        repeats: requests that begin a passage of the window again.
        windows: last tokens that are observed in the layers that a server samples, by the setting's name.
        answering: likewise in the layers that find answers.
        lists: whether pages that tokens want, and that ``bits`` chooses, are recorded with the first.
    """

    shape: TextShape
    records: int
    repeats: int
    windows: Mapping[str, int] = field(default_factory=dict)
    answering: Mapping[str, int] = field(default_factory=dict)
    lists: bool = False

    def settings(self, model: str, shape: Shape) -> dict[str, Setting]:
        """Under which its attention is recorded."""
        sampled = sampled_layers(shape.whole_layers)
        found = {name: Setting(sampled, window) for name, window in self.windows.items()}
        if model in ANSWERING:
            found |= {name: Setting(ANSWERING[model], window) for name, window in self.answering.items()}
        return found


TRAFFIC = {
    "short": Traffic(
        TextShape(documents=10, document_tokens=768, answer_tokens=32, document_skew=0.7),
        records=80,
        repeats=16,
        windows={"questions": SIGNAL.window, "window-8": 8, "window-1": 1},
        answering={"answering-layers": SIGNAL.window, "answering": 1},
    ),
    "long": Traffic(
        TextShape(documents=4, document_tokens=2048, answer_tokens=32, document_skew=0.0),
        records=8,
        repeats=12,
        windows={"long": SIGNAL.window},
        lists=True,
    ),
}
SAME_SIGNAL = ("questions", "window-8", "window-1", "answering-layers")
STUDIES: Mapping[str, Sequence[str]] = {
    "h1": ("h1", "questions"),
    "h2": ("h2", "questions", "window-1", "answering-layers", "answering"),
    "g": ("g", "questions"),
    "g-answering": ("g", "answering"),
    "sensitivity": ("sensitivity", *SAME_SIGNAL),
    "h3": ("h3", "long"),
}
MIN_QUERIES = {"h1": 8, "h2": 8, "sensitivity": 8}
PAGE_POLICIES = "lru,lfu,ema,importance,random,belady"


def requests_of(traffic: Traffic, tokenizer: Tokenizer) -> list[WorkloadRequest]:
    """Records first, then repeats, each in the order of its draws."""
    text = read_text(text_at_hand())
    made: list[WorkloadRequest] = []
    for kind, count in (("records", traffic.records), ("repeats", traffic.repeats)):
        made += make_text_workload(text, tokenizer, (kind,), count, shape=traffic.shape, seed=SEED)
    return made


def main(
    model: Annotated[Path, typer.Option(help="Folder of a Llama or a Gemma 3.")],
    recordings: Annotated[Path, typer.Option(help="Folder for the recordings.")] = Path("build/findings"),
    out: Annotated[Path | None, typer.Option(help="Folder for JSON and figures.")] = None,
) -> None:
    """Records, studies, and writes the findings."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    recordings.mkdir(parents=True, exist_ok=True)
    out = out or RESULTS / "findings" / model.name
    try:
        tokenizer = model_tokenizer(model)
        for name, traffic in TRAFFIC.items():
            requests = requests_of(traffic, tokenizer)
            write_requests(requests, recordings / f"{name}.jsonl")
            settings = traffic.settings(model.name, Shape.of(model))
            if all((recordings / setting).is_dir() for setting in settings):
                continue
            taken = Taken(Decoder(model), tokenizer, settings, traffic.lists)
            record(taken, name, requests, recordings, model.name)
    except (UnknownModel, WorkloadError) as error:
        raise typer.BadParameter(str(error)) from error
    command = Path(sys.executable).parent / "sgl-importance"
    for part, (study, *names) in STUDIES.items():
        options = ["--out", str(out / part), "--no-figure"]
        if study in MIN_QUERIES:
            options += ["--min-queries", str(MIN_QUERIES[study])]
        if study == "sensitivity":
            options += ["--workload", str(recordings / "short.jsonl")]
        directories = [str(recordings / name) for name in names if (recordings / name).is_dir()]
        if not directories:
            continue
        (out / part).mkdir(parents=True, exist_ok=True)
        subprocess.run([command, "study", study, *directories, *options], check=True)
    subprocess.run(
        [
            *(
                command,
                "replay",
                str(recordings / "long"),
                "--pages",
                "--policies",
                PAGE_POLICIES,
                "--chosen",
            ),
            *("--capacity-fraction", "0.12,0.2,0.4", "--json", str(out / "residency-chosen.json")),
        ],
        check=True,
    )


@dataclass(frozen=True)
class Taken:
    """A model, and what of its attention is recorded.

    Attributes:
        decoder: the model.
        tokenizer: its own.
        settings: by name.
        lists: as ``Traffic.lists``.
    """

    decoder: Decoder
    tokenizer: Tokenizer
    settings: Mapping[str, Setting]
    lists: bool

    def of_document(self, requests: Sequence[WorkloadRequest], kept: Path) -> list[Observed]:
        """What a document's requests observe, from a file where an earlier run has written it."""
        if kept.exists():
            return list(pickle.loads(kept.read_bytes()))
        selector = of_selector(selector_of("bits", self.decoder)) if self.lists else None
        observed = observe(self.decoder, self.tokenizer, requests, self.settings, selector, SHARE)
        unfinished = kept.with_suffix(".unfinished")
        unfinished.write_bytes(pickle.dumps(observed))
        unfinished.rename(kept)
        return observed


def record(
    taken: Taken, name: str, requests: Sequence[WorkloadRequest], recordings: Path, model: str
) -> None:
    """Reads the requests once, and writes a recording for each setting."""
    observed: dict[int, Observed] = {}
    for document, places in track(by_document(requests).items(), description=name):
        of_document = [requests[at] for at in places]
        kept = recordings / f"{name}-{document}.pickle"
        observed |= zip(places, taken.of_document(of_document, kept), strict=True)
    in_order = [observed[at] for at in range(len(requests))]
    for at, (setting_name, setting) in enumerate(taken.settings.items()):
        unfinished = recordings / f"{setting_name}.unfinished"
        write_recording(unfinished, model, setting_name, setting, in_order, lists=taken.lists and at == 0)
        unfinished.rename(recordings / setting_name)


if __name__ == "__main__":
    typer.run(main)
