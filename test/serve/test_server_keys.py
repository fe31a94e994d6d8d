"""The keys of a server stand in no answer and in no line of its log."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.entrypoints import http_server
from sglang.srt.server_args import ServerArgs

from sglang_importance.http.told_arguments import TELLING, hide_keys
from sglang_importance.upstream.server_keys import MASK, PRINTING, unprinted_keys

USERS, OPERATORS = "users-secret", "users-secret-of-operators"


def arguments(**keys: str) -> ServerArgs:
    args = ServerArgs(model_path="dummy", **keys)
    args._launch_command = " ".join(
        ["--model-path dummy", *(f"--{name.replace('_', '-')}={key}" for name, key in keys.items())]
    )
    return args


def ask(monkeypatch: pytest.MonkeyPatch, args: ServerArgs, path: str) -> Any:
    """What sglang's own route answers behind our look, where every replica tells its arguments too."""

    async def states() -> list[dict[str, Any]]:
        return [{"api_key": args.api_key, "admin_api_key": args.admin_api_key, "replica": 0}]

    manager = SimpleNamespace(server_args=args, get_internal_state=states, startup_time=1.0)
    state = SimpleNamespace(tokenizer_manager=manager, scheduler_info={"status": "ready"})
    monkeypatch.setattr(http_server, "_global_state", state)
    app = FastAPI()
    for name in TELLING:
        app.get(f"/{name}")(getattr(http_server, name))
    hide_keys(app)
    return TestClient(app).get(path, headers={"origin": "http://evil.example"}).json()


@pytest.mark.parametrize("path", sorted(f"/{name}" for name in TELLING))
@pytest.mark.parametrize(
    "keys",
    [{"admin_api_key": OPERATORS}, {"api_key": USERS}, {"api_key": USERS, "admin_api_key": OPERATORS}],
    ids=lambda keys: " ".join(keys),
)
def test_no_route_tells_a_key(monkeypatch: pytest.MonkeyPatch, keys: dict[str, str], path: str) -> None:
    told = ask(monkeypatch, arguments(**keys), path)
    assert "secret" not in json.dumps(told)
    for name in ("api_key", "admin_api_key"):
        expected = MASK if name in keys else None
        assert told[name] == told["internal_states"][0][name] == expected
    assert told["launch_command"].startswith("--model-path dummy --")
    assert told["model_path"] == "dummy"
    assert told["internal_states"][0]["replica"] == 0


def test_without_a_key_all_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments()
    told = ask(monkeypatch, args, "/server_info")
    assert {name: told[name] for name in args.resolved_dict()} == json.loads(json.dumps(args.resolved_dict()))
    assert told["launch_command"] == "--model-path dummy"


def test_an_app_without_the_routes_is_no_app_of_sglang() -> None:
    with pytest.raises(ValueError, match="sglang has no route get_server_info, server_info"):
        hide_keys(FastAPI())


def test_the_line_with_all_arguments_has_no_key(caplog: pytest.LogCaptureFixture) -> None:
    args = arguments(api_key=USERS, admin_api_key=OPERATORS)
    printing = logging.getLogger(PRINTING)
    with caplog.at_level(logging.INFO, PRINTING):
        with unprinted_keys(args):
            printing.info(f"server_args={args.resolved_dict()}")
        printing.info("afterwards users-secret")
    line, afterwards = caplog.messages
    assert "secret" not in line
    assert f"'api_key': {MASK}" in line
    assert "'model_path': 'dummy'" in line
    assert afterwards == "afterwards users-secret", "nothing stays behind"
