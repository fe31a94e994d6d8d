"""Commands that ask a server: what they send, what they print, and what they say when it is not there."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from sgl_importance.cli import observe_command, pin_commands, snapshot_command
from sgl_importance.cli.fleet_command import app as fleet_app
from sgl_importance.cli.pin_commands import app as pin_app
from sgl_importance.cli.prewarm_command import app as prewarm_app
from sgl_importance.cli.server_client import Server, ServerError
from sgl_importance.cli.snapshot_command import app as snapshot_app
from sgl_importance.cli.why_command import MEANINGS
from sgl_importance.cli.why_command import app as why_app
from sgl_importance.misses.reason import Reason
from sglang_importance.http.pins_route import PinBody
from sglang_importance.http.prewarm_route import PrewarmRequest
from sglang_importance.http.prompt_tokens import Prompt
from sglang_importance.launch.doctor import app as doctor_app

from support.servers import free_port

KEY = "secret"
PIN = {
    "pin_id": "abc",
    "source": "requested",
    "cache_salt": "tenant",
    "extra_key": None,
    "tokens": 1280,
    "granted_tokens": {"device": 800},
    "resident_tokens": 640,
    "strength": 1.0,
    "expires_in_seconds": 59.6,
    "survives_restart": True,
}
NODE = {
    "id": 7,
    "parent": None,
    "depth_tokens": 0,
    "tokens": 1280,
    "tiers": ["device", "host"],
    "body_mass": 0.5,
    "peak": 0.9,
    "lift": 1.0,
    "self_mass": 0.5,
    "cross_mass": 0.0,
    "queries": 3,
    "accesses": 4,
    "age": 12,
    "p_reuse": 0.25,
    "loss": 1e-6,
    "pinned": True,
}
ANSWERS: dict[str, tuple[int, Any]] = {
    "/kv_importance/pin": (200, {"pin_id": "abc", "tokens": 1280, "granted_tokens": {"device": 800}}),
    "/kv_importance/prewarm": (200, {"job_id": "abc"}),
    "/kv_importance/why": (200, {"requests": []}),
    "/kv_importance/unpin": (404, {"message": "pin_id: there is no pin abc"}),
    "/kv_importance/pins": (
        200,
        {"pins": [PIN], "budget": {"device": {"tokens": 800, "granted_tokens": 800}}},
    ),
    "/kv_importance": (
        200,
        {
            "nodes": [NODE],
            "tiers": {"device": {"used_tokens": 1280, "total_tokens": 4000}},
            "next_cursor": "more",
        },
    ),
}


class _Handler(BaseHTTPRequestHandler):
    def _answer(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        self.server.seen.append((self.path, self.rfile.read(size)))  # type: ignore[attr-defined]
        status, document = ANSWERS.get(self.path.partition("?")[0], (404, {"message": "Not Found"}))
        if self.headers.get("Authorization") != f"Bearer {KEY}":
            status, document = 401, {"error": "Unauthorized"}
        raw = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    do_GET = do_POST = _answer

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), _Handler)
    server.seen = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def run(app: Any, server: HTTPServer, *arguments: str, key: str = KEY, stdin: str | None = None):
    url = f"http://127.0.0.1:{server.server_address[1]}"
    environment = {"SGLANG_API_KEY": key, "COLUMNS": "200", "NO_PROXY": "*"}
    address = [url] if app is fleet_app else ["--url", url]
    return CliRunner().invoke(app, [*arguments, *address], env=environment, input=stdin)


def test_pin_sends_one_form_and_says_what_was_pinned(server: HTTPServer, tmp_path: Path):
    messages = tmp_path / "messages.json"
    messages.write_text(json.dumps([{"role": "system", "content": "x"}]))
    result = run(pin_app, server, "add", "--messages", str(messages), "--ttl", "60", "--cache-salt", "tenant")
    assert result.exit_code == 0, result.output
    assert result.output == "abc: 1280 tokens pinned, within the budget 800 on the device\n"
    ((path, body),) = server.seen  # type: ignore[attr-defined]
    assert path == "/kv_importance/pin"
    assert json.loads(body) == {
        "messages": [{"role": "system", "content": "x"}],
        "ttl_seconds": 60.0,
        "cache_salt": "tenant",
    }


WHOLE_BODY = {
    "model": "m",
    "messages": [{"role": "user", "content": "x"}],
    "tools": [{"type": "function", "function": {"name": "look_up"}}],
    "tool_choice": "auto",
    "temperature": 0.5,
    "continue_final_message": False,
    "chat_template_kwargs": {},
    "metadata": {"extra_key": "key of the file", "user": "u"},
    "cache_salt": "salt of the file",
}
BODY_COMMANDS = {
    "pin add": (pin_app, ["add", "--messages"], PinBody),
    "fleet pin": (fleet_app, ["pin", "--messages"], PinBody),
    "prewarm": (prewarm_app, ["--no-wait", "--messages"], PrewarmRequest),
    "why": (why_app, ["--json", "--prompt"], Prompt),
}


@pytest.mark.parametrize("flags", [{}, {"cache_salt": "salt of the flag"}], ids=["", "--cache-salt"])
@pytest.mark.parametrize("command", BODY_COMMANDS)
def test_the_body_of_a_whole_request_keeps_its_tools_and_its_namespace(
    server: HTTPServer, tmp_path: Path, command: str, flags: dict[str, str]
):
    app, words, route_takes = BODY_COMMANDS[command]
    file = tmp_path / "request.json"
    file.write_text(json.dumps(WHOLE_BODY))
    given = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", value)]
    result = run(app, server, *words, str(file), *given)
    assert result.exit_code == 0, result.output
    ((_, raw),) = server.seen  # type: ignore[attr-defined]
    body = json.loads(raw)
    body.pop("pin_id", None)
    route_takes.model_validate(body)
    assert body == {
        "messages": WHOLE_BODY["messages"],
        "tools": WHOLE_BODY["tools"],
        "cache_salt": "salt of the file",
        "extra_key": "key of the file",
        **flags,
    }


@pytest.mark.parametrize("command", BODY_COMMANDS)
@pytest.mark.parametrize(
    "field",
    [
        {"system": "Be brief."},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": 0.0},
        {"continue_final_message": True},
        {"tool_choice": "none"},
        {"tool_choice": {"type": "function", "function": {"name": "look_up"}}},
        {"lora_path": "adapter"},
    ],
    ids=str,
)
def test_what_changes_a_prompt_and_is_not_taken_is_refused(
    server: HTTPServer, tmp_path: Path, command: str, field: dict[str, Any]
):
    app, words, _ = BODY_COMMANDS[command]
    file = tmp_path / "request.json"
    file.write_text(json.dumps(WHOLE_BODY | field))
    line = failure(run(app, server, *words, str(file)))
    assert f"{words[-1]}: {next(iter(field))} changes what the request finds" in line
    assert server.seen == []  # type: ignore[attr-defined]


def test_a_prompt_may_come_from_standard_input(server: HTTPServer):
    assert run(pin_app, server, "add", "--input-ids", "-", stdin="[1, 2]").exit_code == 0
    assert run(pin_app, server, "add", "--text-file", "-", stdin="some text").exit_code == 0
    bodies = [json.loads(body) for _, body in server.seen]  # type: ignore[attr-defined]
    assert bodies == [{"input_ids": [1, 2]}, {"text": "some text"}]


def test_tables_and_json(server: HTTPServer):
    table = run(pin_app, server, "list").output
    for cell in ("abc", "requested", "tenant", "1,280", "800", "640", "1.00", "60 s", "held"):
        assert cell in table
    assert "device: 800 of 800 tokens of the budget" in table
    assert json.loads(run(pin_app, server, "list", "--json").output)["pins"] == [PIN]
    tree = run(snapshot_app, server, "--limit", "1", "--min-tokens", "64").output
    for cell in ("device host", "pinned", "1,280", "0.25", "0.900", "1e-06", "more: --cursor more"):
        assert cell in tree
    assert "device: 1,280 of 4,000 tokens" in tree
    assert server.seen[-1][0] == "/kv_importance?limit=1&min_tokens=64"  # type: ignore[attr-defined]


def test_tables_cut_no_figure_in_a_window_of_80_columns() -> None:
    large = NODE | {"id": 123456, "depth_tokens": 12345, "age": 12345, "loss": 1.6e-10}
    for table, cells in (
        (snapshot_command._table([large]), ("123456", "12,345", "1.6e-10", "device", "host", "pinned")),
        (pin_commands._table([PIN | {"pin_id": "b" * 32}]), ("b" * 32, "1,280", "640")),
    ):
        window = Console(width=80, record=True, file=StringIO())
        window.print(table)
        shown = window.export_text()
        assert "…" not in shown
        assert all(cell in shown for cell in cells), shown


def failure(result: Any) -> str:
    """The one line of a command that failed."""
    assert result.exit_code == 2, result.output
    (line,) = result.output.strip().splitlines()
    return line


def test_what_the_server_refuses_is_said_in_one_line(server: HTTPServer, monkeypatch: pytest.MonkeyPatch):
    assert failure(run(pin_app, server, "rm", "abc")) == "error: pin_id: there is no pin abc"
    refused = failure(run(pin_app, server, "list", key="wrong"))
    assert refused.endswith("refuses the key: give --api-key or set SGLANG_API_KEY")
    monkeypatch.delitem(ANSWERS, "/kv_importance/pins")
    assert failure(run(pin_app, server, "list")).endswith("--kv-policy importance")


@pytest.mark.parametrize(
    "answer",
    [
        {"content": b"["},
        {"content": b"[" * 200_000},
        {"json": []},
        {"json": {"status": "ok"}},
        {"coded": b"no gzip"},
    ],
    ids=["cut", "deep", "list", "of another server", "wrongly coded"],
)
def test_what_is_not_our_json_is_said_in_one_line(answer: dict[str, Any]):
    def handle(_: httpx.Request) -> httpx.Response:
        if (coded := answer.get("coded")) is None:
            return httpx.Response(200, **answer)
        return httpx.Response(200, headers={"Content-Encoding": "gzip"}, stream=httpx.ByteStream(coded))

    problem = pytest.raises(ServerError, match="/kv_importance/pins did not answer with our JSON")
    with Server("http://server", transport=httpx.MockTransport(handle)) as asked, problem:
        asked.get("/pins")


def test_a_server_that_is_not_there_is_said_in_one_line():
    url = f"http://127.0.0.1:{free_port()}"
    line = failure(CliRunner().invoke(pin_app, ["list", "--url", url], env={"NO_PROXY": "*"}))
    assert line.startswith(f"error: no server at {url} (")
    assert line.endswith("start one, or give --url")
    assert "is no address" in failure(CliRunner().invoke(pin_app, ["list", "--url", "nonsense"]))


def test_the_doctor_says_of_another_server_that_it_is_not_ours(server: HTTPServer):
    line = failure(run(doctor_app, server))
    assert line.endswith("counts no faults: it is another server, or an older one of ours")


@pytest.mark.parametrize(
    ("content", "arguments", "problem"),
    [
        ("", [], "give exactly one of --text, --text-file, --messages, --input-ids, not none"),
        ("[1]", ["--text", "a", "--input-ids", "FILE"], "not --text and --input-ids"),
        ("{", ["--messages", "FILE"], "is not JSON (Expecting property name"),
        ("3", ["--input-ids", "FILE"], "must hold a list, not 3"),
        ("", ["--text-file", "FILE.gone"], "cannot read"),
    ],
)
def test_a_wrong_prompt_is_said_before_anything_is_sent(
    server: HTTPServer, tmp_path: Path, content: str, arguments: list[str], problem: str
):
    file = tmp_path / "prompt"
    file.write_text(content)
    line = failure(run(pin_app, server, "add", *(each.replace("FILE", str(file)) for each in arguments)))
    assert problem in line
    assert server.seen == []  # type: ignore[attr-defined]


def test_observe_reads_a_server_that_compares_no_larger_pool(capsys: pytest.CaptureFixture[str]) -> None:
    """As of 0.1.0: a newer client goes on without it."""
    counts = ("lru", "importance", "server")
    observed = {
        **{f"{name}_hit_tokens": 300 for name in counts},
        "requests": 1000,
        "prompt_tokens": 1000,
        "capacity_tokens": 512,
        "batches": [[1000, 0]],
        "saved_tokens": 0,
        "lost_tokens": 0,
        "agreed_tokens": 300,
        "dropped_events": 0,
        "failed": False,
    }
    observe_command.print_report(observe_command.summarize({"observe": observed}))
    assert "times the pool" not in (printed := capsys.readouterr().out)
    assert "by importance only (saved)" in printed


def test_observe_puts_first_what_saves_most(capsys: pytest.CaptureFixture[str]) -> None:
    """A host tier whose policy saves more than ours, and less than four pools."""
    even = [[100, 0]] * 10
    observed = {
        "lru_hit_tokens": 300,
        "importance_hit_tokens": 310,
        "server_hit_tokens": 300,
        "requests": 1000,
        "prompt_tokens": 1000,
        "capacity_tokens": 512,
        "batches": [[100, 1]] * 10,
        "saved_tokens": 10,
        "lost_tokens": 0,
        "agreed_tokens": 300,
        "dropped_events": 0,
        "failed": False,
        "larger_pools": [
            {"times": times, "hit_tokens": hits, "batches": even}
            for times, hits in ((2, 305), (4, 600), (8, 610))
        ],
        "write_back": {
            "host_tokens": 1024,
            "write_through_hit_tokens": 305,
            "hit_tokens": 405,
            "batches": [[100, 10]] * 10,
        },
        "sessions_end": {
            "requests": 600,
            "prompt_tokens": 600,
            "lru_hit_tokens": 180,
            "hit_tokens": 192,
            "batches": [[60, 1]] * 10,
        },
    }
    report = observe_command.summarize({"observe": observed})
    names = [each["change"] for each in report["changes"]]
    assert names == [
        *("8 times the pool", "4 times the pool", "write_back", "sessions_end", "importance"),
        "2 times the pool",
    ]
    by_name = {each["change"]: each for each in report["changes"]}
    assert by_name["write_back"]["gain"] == pytest.approx(0.1), "beside write_through"
    assert by_name["write_back"]["computed_tokens"] == 595
    assert by_name["importance"]["gain_interval"] == pytest.approx((0.01, 0.01))
    assert by_name["sessions_end"]["gain"] == pytest.approx(0.02), "of the requests that it has followed"
    assert report["bend_tokens"] == 4 * 512
    observe_command.print_report(report)
    printed = capsys.readouterr().out
    assert printed.index("8 times the pool") < printed.index("write_back, LRU") < printed.index("--kv-policy")
    assert "memory beyond 2,048 tokens" in printed
    told = next(line for line in printed.splitlines() if "tell their end" in line)
    assert "408" not in told, "computed tokens of fewer requests stand in no column of all"
    assert "+2.00%" in told

    nothing = [{**pool, "hit_tokens": 0} for pool in observed["larger_pools"]]
    for too_little in (
        {"requests": 40},
        {"dropped_events": 7},
        {"lru_hit_tokens": 0, "larger_pools": nothing},
    ):
        report = observe_command.summarize({"observe": {**observed, **too_little}})
        assert report["bend_tokens"] is None, too_little
        observe_command.print_report(report)
        assert "memory beyond" not in capsys.readouterr().out


def test_observe_gives_no_verdict_on_a_comparison_with_gaps(capsys: pytest.CaptureFixture[str]) -> None:
    observed = {
        "lru_hit_tokens": 300,
        "importance_hit_tokens": 600,
        "server_hit_tokens": 300,
        "requests": 1000,
        "prompt_tokens": 1000,
        "capacity_tokens": 512,
        "batches": [[100, 30]] * 10,
        "saved_tokens": 300,
        "lost_tokens": 0,
        "agreed_tokens": 300,
        "dropped_events": 7,
        "failed": False,
    }
    whole = observe_command.summarize({"observe": {**observed, "dropped_events": 0}})
    assert (whole["verdict"], whole["gain_interval"] is None) == ("importance saves tokens here", False)
    report = observe_command.summarize({"observe": observed})
    assert report["gain_interval"] is report["changes"][0]["gain_interval"] is None
    observe_command.print_report(report)
    printed = capsys.readouterr().out
    assert "saves tokens" not in printed
    assert "too early" not in printed
    line = next(line for line in printed.splitlines() if line.startswith("no verdict"))
    assert "7 events" in line
    assert "start the server anew" in line, "the cure"


def test_every_reason_of_a_miss_has_words() -> None:
    assert set(MEANINGS) == set(Reason)
