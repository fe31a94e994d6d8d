"""Two minutes with a trained model: agents share its cache, and one line says what was found, and what not.

What is said at the end comes from the server's own account (``GET /kv_importance/why``), and for stock from
the shadow of ``--kv-policy observe``, fed with the server's recording. It shows how things look, not what
they are worth: README.md has that. Needs what ``scripts/setup.sh`` installs.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts")]
# ruff: noqa: E402
from demo.agents import load
from demo.served import OWN_FLAGS, NotServed, Server
from demo.stock import OURS, NotRecorded, lru_hit_tokens
from rich.progress import track

MODEL = "smollm2"
POOL_TOKENS = 2048
ANSWER_TOKENS = 4
WORDS = {
    "never_seen": "new",
    "parted": "new behind what others had asked",
    "evicted": "given up to make room",
    "short": "ends that fill no page",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--keep", action="store_true", help="goes on serving behind the load, until Ctrl-C")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="takes pictures of the live page")
    parser.add_argument("--port", type=int, help="of the server and its live page; a free one without it")
    arguments, flags = parser.parse_known_args()
    for flag in flags:
        if flag.partition("=")[0] in OWN_FLAGS:
            parser.error(f"{flag} is the demonstration's own: leave it out, or use scripts/serve.sh")
    pool = ("--max-total-tokens", str(POOL_TOKENS))
    server = Server("--model", MODEL, *pool, *flags, port=arguments.port)
    if "SERVE_DRY_RUN" in os.environ:
        sys.exit(subprocess.run(server.command, check=False).returncode)
    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # SIGINT is ignored behind a shell's `&`
        signal.signal(kind, interrupted)
    try:
        print("==> Starting a server", flush=True)
        with server:
            print(f"==> The live page: {server.url}/kv_importance/ui", flush=True)
            sent = send(server)
            if arguments.pictures:
                take_pictures(server.url, arguments.pictures)
            said = summary(server, sent)
            if arguments.keep:
                print(said, "==> Serving: Ctrl-C ends it", sep="\n", flush=True)
                signal.pause()
    except (NotRecorded, NotServed) as trouble:
        sys.exit(f"demo.sh: {trouble}")
    except KeyboardInterrupt:
        if arguments.keep:
            return
        sys.exit("demo.sh: interrupted; the server has ended")
    print(said)


def send(server: Server) -> int:
    """The load, one request behind the other, sessions closed behind their last answer; its length."""
    turns = list(load())
    for number, turn in enumerate(track(turns, "    12 coding agents")):
        server.post(
            "/v1/chat/completions",
            rid=f"{OURS}{number}",
            messages=turn.messages,
            max_tokens=ANSWER_TOKENS,
            temperature=0,
            session_id=turn.session,
        )
        if turn.is_last:
            server.post("/close_session", session_id=turn.session)
    return len(turns)


def summary(server: Server, sent: int) -> str:
    """One line: what was hit, what stock would have hit, why the rest missed."""
    told = [
        request
        for request in server.get("/kv_importance/why", limit=200)["requests"]
        if request["rid"].startswith(OURS)  # sglang sends some to warm up
    ]
    assert len(told) == sent, "the server remembers 200 requests"
    missed: Counter[str] = Counter()
    for request in told:
        missed.update(request["missed_tokens"])
    prompt = sum(request["prompt_tokens"] for request in told)
    hit = prompt - missed.total()
    stock = lru_hit_tokens(server.recording, sent)
    why = ", ".join(f"{tokens:,} {WORDS.get(reason, reason)}" for reason, tokens in missed.most_common())
    return (
        f"{hit:,} of {prompt:,} prompt tokens were hit ({hit / prompt:.1%}), stock's LRU would have hit "
        f"{stock:,} ({stock / prompt:.1%}); computed: {why}."
    )


def take_pictures(url: str, folder: Path) -> None:
    sys.path[:0] = [str(ROOT / "test")]
    import screenshots

    from support.browser import NoBrowser

    folder.mkdir(parents=True, exist_ok=True)
    try:
        screenshots.take(url, folder)
    except NoBrowser as trouble:
        print(f"demo.sh: no pictures: {trouble}", file=sys.stderr)


def interrupted(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
