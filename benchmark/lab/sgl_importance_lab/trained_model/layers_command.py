"""`sgl-importance layers`: which layers of a model should emit page scores."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from sgl_importance.terminal import add_texts, check_outputs, counted, existing_file, fail, show, some_path
from sgl_importance_lab.workload.real_text import (
    Documents,
    TextShape,
    model_tokenizer,
    read_text,
    text_at_hand,
)
from sgl_importance_lab.workload.workload_request import WorkloadError

if TYPE_CHECKING:
    from sgl_importance_lab.trained_model.layer_choice import Found
    from sgl_importance_lab.trained_model.planted_questions import Question

_SHAPE = TextShape(documents=12, document_tokens=768)

app = typer.Typer(
    help="Which layers of a model should emit page scores: those that find the page with a planted answer.",
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True, context_settings={"allow_interspersed_args": True})
def layers_command(
    model: Annotated[Path, typer.Argument(parser=some_path, help="Folder of a Llama or a Gemma 3.")],
    text: Annotated[
        list[Path] | None,
        typer.Option(
            parser=existing_file, metavar="PATH", help="Real text; without it, modules of Python's library."
        ),
    ] = None,
    documents: Annotated[int, typer.Option(min=1, help="Windows of the text.")] = _SHAPE.documents,
    document_tokens: Annotated[
        int, typer.Option(min=256, help="Length of a document, tokens of the model.")
    ] = _SHAPE.document_tokens,
    records: Annotated[
        int, typer.Option(min=1, help="Records in each document; all are asked for.")
    ] = _SHAPE.records,
    beside: Annotated[
        str, typer.Option(help="Layers whose joint scores are judged as well, such as 15,20,24,29.")
    ] = "",
    seed: Annotated[int, typer.Option(help="The same seed, the same questions.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", parser=some_path, metavar="PATH", help="Write the JSON there.")
    ] = None,
) -> None:
    """Asks for records planted in text, in float32 on the CPU, and looks where each layer looks."""
    # Every command is loaded before one is run, and most of them need no torch.
    import torch

    from sgl_importance_lab.trained_model.decoder import Decoder
    from sgl_importance_lab.trained_model.decoder_shape import UnknownModel
    from sgl_importance_lab.trained_model.layer_choice import CalibrationError, calibrate
    from sgl_importance_lab.trained_model.planted_questions import SHARE, ask_document

    check_outputs(json_file)
    shape = TextShape(documents, document_tokens, records)
    compared = _layers_of(beside)
    questions: list[Question] = []
    try:
        decoder, tokenizer = Decoder(model), model_tokenizer(model)
        whole = decoder.shape.whole_layers
        if not set(compared) <= set(whole):
            known = ", ".join(map(str, whole))
            fail(
                f"--beside {beside}: {model} has layers 0 to {decoder.shape.layers - 1}, and those that see "
                f"the whole context are {known}"
            )
        windows = Documents(read_text(text or text_at_hand()), tokenizer, shape, seed)
        with torch.inference_mode(), counted("asking", documents) as advance:
            for number in range(documents):
                questions += ask_document(decoder, tokenizer, windows, number)
                advance()
        found = calibrate(questions, compared)
    except (CalibrationError, UnknownModel, WorkloadError) as error:
        fail(str(error))
    table = Table("layer", *(f"{each.window} tokens observed" for each in found.windows))
    for at, layer in enumerate(found.layers):
        add_texts(table, str(layer), *(_share(each, at, layer) for each in found.windows))
    typer.echo(f"Answers in the best {SHARE:.0%} of a layer's pages; chosen layers have an asterisk")
    show(table)
    typer.echo(f"{found.answered} of {found.asked} questions were answered, and only these count")
    for each in found.windows:
        typer.echo(f"{each.window} tokens, layers {list(each.chosen)} together: {each.together}")
        if each.beside is not None:
            typer.echo(f"{each.window} tokens, layers {compared} together: {each.beside}")
    best = found.best
    typer.echo(f"for --kv-importance-config:\n[signal]\nlayers = {list(best.chosen)}\nwindow = {best.window}")
    if json_file is not None:
        command = f"sgl-importance layers {model.name} --documents {documents} --document-tokens "
        command += f"{document_tokens} --records {records} --seed {seed}" + (
            f" --beside {beside}" * bool(beside)
        )
        document = {"command": command, "compared": compared, **asdict(found)}
        json_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _layers_of(beside: str) -> list[int]:
    try:
        return [int(layer) for layer in beside.split(",") if layer.strip()]
    except ValueError:
        fail(f"--beside takes numbers of layers, separated by commas, not {beside!r}")


def _share(found: Found, at: int, layer: int) -> str:
    return f"{found.by_layer[at]}{' *' if layer in found.chosen else ''}"
