"""Sessions, aborts and an operator's messages that end stock sglang, or another client's request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.http_abuse import message, tokens
from support.servers import ServerProcess

pytestmark = pytest.mark.server


@pytest.fixture(autouse=True)
def lives(server: ServerProcess) -> Iterator[None]:
    yield
    server.generate([5, 6], max_new_tokens=1)


# ---- rules that leave no token ----


def grammar_ended(answer: httpx.Response) -> bool:
    """From 0.5.23 on sglang answers 500 where a grammar ends its request, and says why."""
    return answer.status_code == 500 and "Grammar accept_token failed" in answer.text


@pytest.mark.parametrize(
    "rules",
    [
        {"regex": "a", "min_new_tokens": 5},  # over behind one token, of at least five
        {"stop_token_ids": list(range(2000)), "min_new_tokens": 3},
        {"ebnf": "root ::= root root"},
        {"regex": "\u4e2d+"},  # the vocabulary cannot write it
    ],
)
@pytest.mark.parametrize("sampling", [{"top_p": 0.5, "top_k": 5}, {"sampling_seed": 5}, {"temperature": 0}])
def test_rules_that_exclude_every_token_end_one_request(
    client: httpx.Client, rules: dict[str, Any], sampling: dict[str, Any]
):
    """sglang draws from a softmax of nothing, and its scheduler ends with it."""
    params = {"max_new_tokens": 8, **sampling, **rules}
    answer = client.post("/generate", json={"input_ids": tokens(9, 40), "sampling_params": params})
    assert answer.status_code in (200, 400) or grammar_ended(answer), answer.text


def test_an_ambiguous_grammar_holds_nobody(server: ServerProcess, client: httpx.Client):
    """It takes longer with every token, and everybody's next token waits for it."""
    doubling = "\n".join(f"r{each} ::= r{each + 1} r{each + 1}" for each in range(40))
    ebnf = f'root ::= r0\n{doubling}\nr40 ::= "a"?'
    params = {"ebnf": ebnf, "max_new_tokens": 1000, "min_new_tokens": 1000}
    answer = client.post("/generate", json={"input_ids": tokens(9, 40), "sampling_params": params})
    if not grammar_ended(answer):
        assert answer.status_code == 200, answer.text
        assert answer.json()["meta_info"]["finish_reason"]["type"] == "abort"


# ---- sessions and aborts ----


def opened(client: httpx.Client) -> str:
    return str(client.post("/open_session", json={"capacity_of_str_len": 1000}).json())


def in_session(client: httpx.Client, session: str, **fields: Any) -> httpx.Response:
    body = {"input_ids": tokens(7, 40), "sampling_params": {"max_new_tokens": 2}, "session_params": fields}
    rid = fields.pop("own_rid", None)
    return client.post("/generate", json={**body, "rid": rid, "session_params": {"id": session, **fields}})


def test_a_session_that_is_to_forget_what_it_has_refuses_and_goes_on(client: httpx.Client):
    """sglang changes its list of the session's requests while it walks through it."""
    session = opened(client)
    assert in_session(client, session, own_rid="first of all").status_code == 200
    refused = in_session(client, session, replace=True)
    assert refused.status_code == 400
    assert "session_params.replace: needs the rid" in message(refused)
    assert in_session(client, session, rid="first of all", replace=True).status_code == 200


def test_a_session_takes_each_id_once(client: httpx.Client):
    """sglang would lose the first of two, and fail where it gives both back."""
    session = opened(client)
    assert in_session(client, session, own_rid="twice").status_code == 200
    refused = in_session(client, session, own_rid="twice", rid="twice")
    assert refused.status_code == 400
    assert message(refused).startswith("rid: the session has answered a request with this id")
    assert in_session(client, session, own_rid="another", rid="twice").status_code == 200


@pytest.mark.parametrize(("rid", "of_another"), [("a", "ab"), ("\0", "b")])
def test_an_abort_ends_the_request_with_that_id_and_no_other(client: httpx.Client, rid: str, of_another: str):
    """sglang ends every request whose id begins like it: one client's "a" would end a sixteenth of all."""

    def body(rid: str, length: int) -> dict[str, Any]:
        sampling = {"max_new_tokens": length, "ignore_eos": True}
        return {"input_ids": tokens(8, 40), "sampling_params": sampling, "stream": True, "rid": rid}

    def reason(lines: Iterator[str]) -> dict[str, Any]:
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        return dict(chunks[-1]["meta_info"]["finish_reason"])

    with (
        client.stream("POST", "/generate", json=body(rid, 1500)) as one,  # not over before the abort comes
        client.stream("POST", "/generate", json=body(of_another, 200)) as other,
    ):
        lines, others = one.iter_lines(), other.iter_lines()
        next(lines), next(others)
        assert client.post("/abort_request", json={"rid": rid}).status_code == 200
        assert reason(lines)["type"] == "abort"
        assert reason(others) == {"type": "length", "length": 200}


@pytest.mark.parametrize("act", ["start", "stop", "dump"])
def test_experts_are_recorded_only_where_the_server_can(client: httpx.Client, act: str):
    answer = client.post(f"/{act}_expert_distribution_record")
    assert answer.status_code == 400
    assert "--expert-distribution-recorder-mode" in message(answer)


@pytest.mark.parametrize("act", ["init_weights_send_group_for", "send_weights_to"])
def test_weights_are_sent_only_where_the_server_can(client: httpx.Client, act: str):
    group = {"master_address": "127.0.0.1", "ports": "29999", "group_rank": 0, "world_size": 2}
    answer = client.post(f"/{act}_remote_instance", json=group)
    assert answer.status_code == 400
    assert "this server has none" in message(answer)


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/parse_function_call", '{"text": "a", "tool_call_parser": "nobody", "tools": []}'),
        ("/separate_reasoning", '{"text": "a", "reasoning_parser": "nobody"}'),
        ("/add_external_corpus", "["),
        ("/remove_external_corpus", "[1]"),
        ("/start_profile", '{"activities": ["CPU"], "output_dir": "/proc/nobody", "num_steps": 1}'),
        ("/stop_profile", "null"),
        ("/tokenize", '{"messages": [{"role": "user"}], "chat_template_kwargs": {"messages": 1}}'),
        ("/detokenize", '{"tokens": [[]]}'),
        ("/v1/loads?include=nothing", ""),
        ("/slow_down", '{"forward_sleep_time": 1e30}'),
        ("/configure_logging", '{"log_level": "loud"}'),
        ("/update_weights_from_disk", '{"model_path": "/nobody", "load_format": "nobody"}'),
    ],
)
def test_what_an_operator_writes_is_no_error_of_the_server(client: httpx.Client, path: str, content: str):
    method = "POST" if content else "GET"
    answer = client.request(method, path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400), answer.text


_HI = [{"role": "user", "content": "Alice"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "Alice"}),
        ("/v1/responses", {"input": "Alice", "stream": True}),
        ("/v1/chat/completions", {"messages": _HI}),
        ("/tokenize", {"messages": _HI}),
    ],
)
def test_no_route_runs_a_template_that_a_request_brings(
    client: httpx.Client, server: ServerProcess, path: str, body: dict[str, Any]
):
    """sglang's responses would: two loops, one in the other, hold the process that answers everybody."""
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    brought = {"model": server.name, **body, "chat_template_kwargs": {"chat_template": loops}}
    answer = client.post(path, json=brought)
    assert answer.status_code == 400
    assert "chat_template" in message(answer)


def test_a_stream_that_cannot_begin_is_refused(client: httpx.Client, server: ServerProcess):
    """sglang 0.5.21 would cut its stream of a response off behind its 200; 0.5.23 sends all of it."""
    body = {"model": server.name, "input": "Alice", "max_output_tokens": 5, "metadata": {"a": 5}}
    answer = client.post("/v1/responses", json={**body, "stream": True})
    if answer.status_code == 200:
        assert "event: response.incomplete" in answer.text  # five tokens, and no more to say
    else:
        assert answer.status_code == 400
        assert "metadata" in message(answer)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/completions", "/v1/responses"])
@pytest.mark.parametrize("rank", ["x", "-1", "7"])
def test_a_header_that_names_no_rank_is_refused(
    client: httpx.Client, server: ServerProcess, path: str, rank: str
):
    """sglang's messages answered 500, and its other routes wrote a traceback into the log."""
    body = {"model": server.name, "messages": _HI, "prompt": "Alice", "input": "Alice", "max_tokens": 1}
    answer = client.post(path, json=body, headers={"X-Data-Parallel-Rank": rank})
    assert answer.status_code == 400, answer.text
    assert "rank" in message(answer).lower()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "Alice", "request_id": "HEALTH_CHECK_1"}),
        ("/vertex_generate", {"instances": [{"text": "Alice"}], "parameters": {"rid": "HEALTH_CHECK_1"}}),
    ],
)
def test_an_id_of_a_health_check_waits_for_nothing(
    client: httpx.Client, server: ServerProcess, path: str, body: dict[str, Any]
):
    """sglang drops a health check while a request runs: its client would wait for ever."""
    answer = client.post(path, json={"model": server.name, **body} if path == "/v1/responses" else body)
    assert answer.status_code == 400
    assert "begins as ids of the server's own requests do" in answer.text


def test_a_salt_is_read_whatever_its_body_is_called(client: httpx.Client):
    """FastAPI reads such a body as JSON."""
    chat = json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": "Alice " * 40}], "max_tokens": 1}
    )
    salted = json.dumps({**json.loads(chat), "cache_salt": "b"})
    kind = {"content-type": 'application/json; of="form"'}
    for content in (chat, salted):
        answer = client.post("/invocations", content=content, headers=kind)
        assert answer.status_code == 200, answer.text
        details = answer.json()["usage"]["prompt_tokens_details"]
        assert not (details and details["cached_tokens"])
