"""Several servers asked at once: what each says, and what they say together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from sgl_importance.cli.server_client import NotThere, Server, ServerError

FLEET_CURE = "another URL"
"""What to give where nobody is at an address: commands of a fleet take addresses without an option."""
FLEET_SECONDS = 20.0
"""Longest wait for one answer: a server that hangs must not hide the others for long."""
CANDIDATE_NODES = 200
"""Largest nodes of each server among which the hottest prefixes are looked for."""

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Member:
    """One tree of a fleet: a server, or one data-parallel rank of it.

    Attributes:
        server: to ask.
        dp_rank: its rank; None where the server has only one.
        document: its answer to ``GET /kv_importance``.
    """

    server: Server
    dp_rank: int | None
    document: dict[str, Any]

    @property
    def name(self) -> str:
        return self.server.url if self.dp_rank is None else f"{self.server.url} dp{self.dp_rank}"


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix that some member knows: the path to one node of its tree.

    Attributes:
        input_ids: its tokens.
        extra_key: of its namespace.
        cache_salt: of its namespace.
        tokens: of them, those of the last node.
        label: how the last node begins.
    """

    input_ids: tuple[int, ...]
    extra_key: str | None
    cache_salt: str | None
    tokens: int
    label: str

    @property
    def key(self) -> tuple[object, ...]:
        return self.input_ids, self.extra_key, self.cache_salt

    @property
    def body(self) -> dict[str, Any]:
        """It in the body of a request. Without the empty names ``find`` would look at every tenant's KV."""
        return {
            "input_ids": list(self.input_ids),
            "extra_key": self.extra_key or "",
            "cache_salt": self.cache_salt or "",
        }


def ask_all(
    asked: Sequence[S], question: Callable[[S], T], advance: Callable[[], None] = lambda: None
) -> list[T | ServerError]:
    """Asks all at the same time; in their order, the answer or what went wrong with this one.

    Args:
        asked: servers, or members.
        question: asks one of them.
        advance: called after each answer.
    """

    def one(each: S) -> T | ServerError:
        try:
            return question(each)
        except ServerError as error:
            return error
        finally:
            advance()

    def run(each: S, answer: Future[T | ServerError]) -> None:
        try:
            answer.set_result(one(each))
        except Exception as error:
            answer.set_exception(error)

    # Daemons, and nobody joins them: Ctrl-C waits for no server that hangs.
    answers: list[Future[T | ServerError]] = [Future() for _ in asked]
    for each, answer in zip(asked, answers, strict=True):
        threading.Thread(target=run, args=(each, answer), daemon=True).start()
    return [answer.result() for answer in answers]


def ask_servers(
    servers: Sequence[Server], question: Callable[[Server], T], advance: Callable[[], None] = lambda: None
) -> tuple[dict[str, T], dict[str, ServerError]]:
    """As ``ask_all``: the answers, and what went wrong, by address."""
    found = ask_all(servers, question, advance)
    pairs = [(server.url, each) for server, each in zip(servers, found, strict=True)]
    return (
        {url: each for url, each in pairs if not isinstance(each, ServerError)},
        {url: each for url, each in pairs if isinstance(each, ServerError)},
    )


def members_of(server: Server) -> list[Member]:
    """The trees of a server.

    Raises:
        ServerError: it is not there, refuses, or runs without us.
    """
    document = server.get("", limit=1)
    if "dp_ranks" not in document:
        return [Member(server, None, document)]
    return [Member(server, rank, each) for rank, each in enumerate(document["dp_ranks"]) if each is not None]


def summary_of(member: Member) -> dict[str, Any]:
    """What a member holds, what it hit, and what is wrong with it.

    ``hit_rate`` is by tier, of all prompt tokens; ``trouble`` has one line for each fault.
    """
    document = member.document
    hits = document["hits"]
    prompt_tokens = max(hits["prompt_tokens"], 1)
    return {
        "name": member.name,
        "policy": document["policy"],
        "clock": document["clock"],
        "tiers": document["tiers"],
        "hits": hits,
        "hit_rate": {tier: tokens / prompt_tokens for tier, tokens in hits["hit_tokens"].items()},
        "trouble": list(_trouble(document)),
    }


def _trouble(document: dict[str, Any]) -> Iterable[str]:
    if (fallback := document["faults"]["fallback"]) is not None:
        yield f"evicts by LRU until it is restarted: {fallback['error']}"
    for place, count in document["faults"]["counts"].items():
        yield f"{count:,} faults in {place}, caught"
    ledger = document.get("ledger")
    if ledger is not None and not ledger["is_written"]:
        yield f"the ledger {ledger['place']} is not written: {ledger['lost_visits']:,} visits lost"
    for tier in document.get("store_tiers", {"tiers": []})["tiers"]:
        if tier["state"] != "in use":
            yield f"storage tier {tier['name']}: {tier['state']}"


def together(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Requests, prompt tokens and hit rates of all members."""
    requests = sum(each["hits"]["requests"] for each in summaries)
    prompt_tokens = sum(each["hits"]["prompt_tokens"] for each in summaries)
    hit_tokens: dict[str, int] = {}
    for each in summaries:
        for tier, tokens in each["hits"]["hit_tokens"].items():
            hit_tokens[tier] = hit_tokens.get(tier, 0) + tokens
    return {
        "requests": requests,
        "prompt_tokens": prompt_tokens,
        "hit_rate": {tier: tokens / max(prompt_tokens, 1) for tier, tokens in hit_tokens.items()},
    }


def hot_prefixes_of(member: Member, count: int) -> list[Prefix]:
    """The prefixes whose last node was used most on this member: by uses times tokens.

    Raises:
        ServerError: it stopped answering; it is asked nothing more.
    """
    tree = member.server.get("/tree", limit=CANDIDATE_NODES, dp_rank=member.dp_rank)
    rows = sorted(tree["nodes"], key=lambda row: row["accesses"] * row["tokens"], reverse=True)[:count]
    prefixes = []
    for row in rows:
        try:
            body = member.server.get(f"/node/{row['id']}/prompt", dp_rank=member.dp_rank)
        except NotThere:
            continue  # it was evicted meanwhile
        ids = tuple(body["input_ids"])
        prefixes.append(Prefix(ids, body["extra_key"], body["cache_salt"], row["tokens"], row["label"]))
    return prefixes


def uses_of(member: Member, prefix: Prefix) -> dict[str, Any]:
    """How often requests of this member went through the whole of a prefix, and the tiers of its end.

    Raises:
        ServerError: it stopped answering; it is asked nothing more.
    """
    rank = "" if member.dp_rank is None else f"?dp_rank={member.dp_rank}"
    found = member.server.post(f"/find{rank}", prefix.body)
    if not found["path"] or found["matched_tokens"] < len(prefix.input_ids):
        return {"name": member.name, "uses": 0, "tiers": []}
    try:
        node = member.server.get(f"/node/{found['path'][-1]['id']}", dp_rank=member.dp_rank)
    except NotThere:  # it was evicted meanwhile
        return {"name": member.name, "uses": 0, "tiers": []}
    return {"name": member.name, "uses": node["accesses"], "tiers": node["tiers"]}


def hottest(
    prefixes: Iterable[Prefix], members: Sequence[Member], count: int, advance: Callable[[], None]
) -> list[tuple[Prefix, dict[str, Any]]]:
    """The prefixes that all members together use most, each once, and its row with the uses on each member.

    A member that cut its tree elsewhere is counted by the node that the end of the prefix lies in. One that
    cannot be asked any more is left out.

    Args:
        prefixes: hot on some member.
        members: to ask.
        count: prefixes to return.
        advance: called after each member's answers.
    """
    known = list({prefix.key: prefix for prefix in prefixes}.values())

    def ask(member: Member) -> list[dict[str, Any]]:
        return [uses_of(member, prefix) for prefix in known]

    answers = [each for each in ask_all(members, ask, advance) if not isinstance(each, ServerError)]
    rows: list[tuple[Prefix, dict[str, Any]]] = [
        (
            prefix,
            {
                "label": prefix.label,
                "tokens": prefix.tokens,
                "prefix_tokens": len(prefix.input_ids),
                "extra_key": prefix.extra_key,
                "cache_salt": prefix.cache_salt,
                "uses": sum(of_member[number]["uses"] for of_member in answers),
                "members": [of_member[number] for of_member in answers],
            },
        )
        for number, prefix in enumerate(known)
    ]
    return sorted(rows, key=lambda row: row[1]["uses"] * row[1]["tokens"], reverse=True)[:count]


def pins_of(server: Server) -> dict[str, Any]:
    """The pins of all its data-parallel ranks, each once, and the budget of one rank.

    Pins of the route or a command hold on every rank, those of a hint on the one that served its request.

    Raises:
        ServerError: it is not there, refuses, or runs without us.
    """
    answer = server.get("/pins")
    ranks: list[dict[str, Any]] = [each for each in answer.get("dp_ranks", [answer]) if each is not None]
    pins = {pin["pin_id"]: pin for each in reversed(ranks) for pin in reversed(each["pins"])}
    return ranks[0] | {"pins": list(reversed(pins.values()))}


def pins_together(answers: Iterable[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Every pin of a fleet once, with the servers that hold it and the tokens that each grants.

    Args:
        answers: name of a server, and its answer to ``GET /kv_importance/pins``.
    """
    rows: dict[str, dict[str, Any]] = {}
    for name, answer in answers:
        for pin in answer["pins"]:
            row = rows.setdefault(
                pin["pin_id"],
                {
                    "pin_id": pin["pin_id"],
                    "source": pin["source"],
                    "cache_salt": pin["cache_salt"],
                    "tokens": pin["tokens"],
                    "granted_tokens": {},
                },
            )
            row["granted_tokens"][name] = pin["granted_tokens"].get("device", 0)
    return list(rows.values())
