"""What a trained model takes on this machine: start, prompts, tokens, and a conversation's second turn.

    python benchmark/real_model/times.py --model .cache/models/smollm2

One server as `scripts/serve.sh` starts it, one request at a time. Prompts are cut from real text by the
model's own tokenizer, another place of it in each round; what is ``cached`` is the same prompt again, what is
``cold`` was sent to an emptied cache. The JSON has the load of the machine before each round: times of a busy
one say little.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import jinja2
import typer
from rich.progress import track

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from tokenizers import Tokenizer

from benchmark.results import RESULTS, print_rows, write_results
from benchmark.sparse.streamed import Streamed, streamed

from support.served import script_server
from support.servers import ServerProcess

DECODE_TOKENS = 32
TALK_TOKENS = 2048
FIRST_QUESTION = "Say in one sentence what this text is about."
SECOND_QUESTION = "And whom is it for?"


def windows(ids: Sequence[int], tokens: int, rounds: int) -> list[list[int]]:
    """For each round so many tokens of the text, from places as far apart as it allows."""
    if len(ids) < tokens:
        raise typer.BadParameter(
            f"the text has {len(ids)} tokens, fewer than {tokens}: give more of it", param_hint="--text"
        )
    step = (len(ids) - tokens) // max(1, rounds - 1)
    return [list(ids[at * step : at * step + tokens]) for at in range(rounds)]


def asked(server: ServerProcess, prompt: Sequence[int], tokens: int) -> tuple[Streamed, Streamed]:
    """Behind an emptied cache, and again."""
    server.flush_cache()
    cold = streamed(server, prompt, tokens)
    assert cold.cached == 0
    return cold, streamed(server, prompt, tokens)


def prompt_row(server: ServerProcess, prompt: Sequence[int]) -> dict[str, Any]:
    """Seconds to the first token, and milliseconds from token to token behind it."""
    cold, cached = asked(server, prompt, DECODE_TOKENS)
    return {
        "what": "prompt",
        "tokens": len(prompt),
        "cached_tokens": cached.cached,
        "cold_s": cold.times[0],
        "cached_s": cached.times[0],
        "decode_ms": 1000 * median(cold.steps + cached.steps),
    }


def conversation_row(server: ServerProcess, tokenizer: Tokenizer, text: str, speak: Any) -> dict[str, Any]:
    """Seconds to the first token of the second turn: behind the first, and behind an emptied cache."""
    first = [{"role": "user", "content": f"{text}\n\n{FIRST_QUESTION}"}]
    server.flush_cache()
    answer = streamed(server, speak(first), DECODE_TOKENS)
    said = tokenizer.decode(answer.output_ids)
    second = [*first, {"role": "assistant", "content": said}, {"role": "user", "content": SECOND_QUESTION}]
    prompt = speak(second)
    cached = streamed(server, prompt, 1)
    server.flush_cache()
    cold = streamed(server, prompt, 1)
    return {
        "what": "second turn",
        "tokens": len(prompt),
        "cached_tokens": cached.cached,
        "cold_s": cold.times[0],
        "cached_s": cached.times[0],
    }


def speaker(model: Path, tokenizer: Tokenizer) -> Any:
    """From messages to token ids, by the model's chat template; None where it has none."""
    config = json.loads((model / "tokenizer_config.json").read_text())
    if "chat_template" not in config:
        return None
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(config["chat_template"])
    return lambda messages: (
        tokenizer.encode(
            template.render(messages=messages, add_generation_prompt=True), add_special_tokens=False
        ).ids
    )


def main(
    model: Annotated[Path, typer.Option(help="Folder of a model, as scripts/get_model.py prints it.")],
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Files of real text, one behind the other; this project's pages."),
    ] = None,
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts.")] = "512,4096",
    rounds: Annotated[int, typer.Option(min=1, help="How often each is asked.")] = 3,
    policy: Annotated[str, typer.Option(help="--kv-policy of the server.")] = "importance",
    out: Annotated[Path, typer.Option(help="The JSON.")] = RESULTS / "real_model_times.json",
) -> None:
    model = model.absolute()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    files = text or sorted((ROOT / "docs").glob("*.md"))
    whole = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
    ids = tokenizer.encode(whole, add_special_tokens=False).ids
    sizes = [int(size) for size in lengths.split(",")]
    speak = speaker(model, tokenizer)
    rows: list[dict[str, Any]] = []
    started = time.perf_counter()
    flags = ("--model-path", str(model), "--kv-policy", policy, "--max-total-tokens", "16384")
    with script_server(*flags, model=model, imports_anew=True) as server:
        rows.append({"what": "start", "seconds": time.perf_counter() - started, "load": os.getloadavg()[0]})
        begin = tokenizer.encode("").ids  # what each text begins with, of some models
        prompts = {
            size: [[*begin, *window] for window in windows(ids, size - len(begin), rounds)] for size in sizes
        }
        talks = windows(ids, TALK_TOKENS, rounds)
        for number in track(range(rounds), description="rounds"):
            key = {"round": number, "load": os.getloadavg()[0]}
            rows += [{**prompt_row(server, prompts[size][number]), **key} for size in sizes]
            if speak is not None:
                talk = tokenizer.decode(talks[number])
                rows.append({**conversation_row(server, tokenizer, talk, speak), **key})
            write_results("real_model_times", rows, out=out)
    print_rows("Medians", medians(rows))


def medians(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each kind and length, medians over rounds; kinds that have no such number say None."""
    found = []
    for what, tokens in dict.fromkeys((row["what"], row.get("tokens")) for row in rows if "round" in row):
        own = [row for row in rows if (row["what"], row.get("tokens")) == (what, tokens)]
        names = ("cached_tokens", "cold_s", "cached_s", "decode_ms")
        values = {name: [row[name] for row in own if name in row] for name in names}
        found.append(
            {"what": what, "tokens": tokens, **{n: median(v) if v else None for n, v in values.items()}}
        )
    return found


if __name__ == "__main__":
    typer.run(main)
