"""H3: what choosing pages together with where they are would save, on recorded page lists.

    python benchmark/sparse/joint.py

The embedded model with all of its KV in one place, one request at a time; what each token attends to is
recorded and put to the study of ``sgl-importance study h3``. ``questions`` about cached documents, which take
turns in pairs; ``decode``: answers of 96 tokens. Counts of pages only: other work on the machine changes
nothing.
"""

from __future__ import annotations

import random
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from sgl_importance.embedded_model import checkpoint_path
from sgl_importance_lab.probe.tasks import ProbeDocument, make_document
from sgl_importance_lab.probe.tokenizer import encode
from sgl_importance_lab.replay.residency.page_steps import PageRecording, load_page_steps
from sgl_importance_lab.study.h3 import study_h3

from support.config_file import config_flags
from support.served import script_server
from support.servers import ServerProcess

PAGE, LISTED = 16, 0.4
ANSWER_TOKENS, DECODE_TOKENS = 8, 96


def ask(server: ServerProcess, rid: str, document: ProbeDocument, name: str, tokens: int) -> None:
    body = {
        "rid": rid,
        "input_ids": encode(document.messages(name)),
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
    }
    server.post("/generate", body)


def record(length: int, documents: int, n: int, directory: Path) -> PageRecording:
    """Everything that is asked about documents of a length."""
    texts = [make_document(length - 64, seed) for seed in range(documents)]
    draws = random.Random(1)
    asked = [draws.sample(list(document.records), n) for document in texts]
    flags = (
        *("--kv-policy", "observe", "--page-size", str(PAGE), "--max-running-requests", "1"),
        *("--max-total-tokens", str((documents + 1) * (length + 256) // PAGE * PAGE)),
        *("--kv-importance-source", "none", "--kv-importance-trace", str(directory)),
        *config_flags(trace={"pages": LISTED}),
    )
    with script_server(*flags, model=checkpoint_path()) as server:
        # Two of a document in a row, as when somebody asks back.
        for at in range(0, n, 2):
            for number, document in enumerate(texts):
                for turn in (at, at + 1):
                    rid = f"questions/{number}/{turn}"
                    ask(server, rid, document, asked[number][turn], ANSWER_TOKENS)
        for number, document in enumerate(texts):
            for turn in range(2):
                ask(server, f"decode/{number}/{turn}", document, asked[number][turn], DECODE_TOKENS)
        server.shut_down()  # what waits to be written is
    return load_page_steps(directory)


def main(
    lengths: Annotated[
        str, typer.Option(help="Tokens of a document, separated by commas.")
    ] = "2048,4096,8192,16384",
    documents: Annotated[int, typer.Option(help="Documents of each length.")] = 4,
    n: Annotated[int, typer.Option(help="Questions about each document; an even number.")] = 12,
    out: Annotated[Path, typer.Option(help="Folder for JSON and figure.")] = ROOT
    / "benchmark/results/findings/h3",
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        recordings = [
            record(length, documents, n, Path(folder) / f"{length}")
            for length in track(list(map(int, lengths.split(","))), description="recording")
        ]
    out.mkdir(parents=True, exist_ok=True)
    finding = study_h3(recordings, figure=out / "h3.png")
    finding.show(Console())
    finding.write(out, recordings, shlex.join(["python", "benchmark/sparse/joint.py", *sys.argv[1:]]))


if __name__ == "__main__":
    typer.run(main)
