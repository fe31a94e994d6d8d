"""Ids that clients give their requests: sglang keeps its books by them."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from sglang_importance.http.requests.fields.refusal import BadField, shown
from sglang_importance.http.requests.fields.server_facts import ServerFacts
from sglang_importance.http.requests.fields.text_rules import MAX_NAME, text

FIELD = "rid"
_one = text(MAX_NAME, least=1)


def check_ids(
    rid: Any, prompts: int | None, samples: int, in_flight: Container[str], server: ServerFacts
) -> None:
    """Looks at the ids of a request.

    Args:
        rid: one, or one for each prompt.
        prompts: of a batch; None for a request with a single prompt.
        samples: of each prompt.
        in_flight: ids of requests that are not answered yet.
        server: what it can do.

    Raises:
        BadField: sglang would end, refuse them late, or keep what it has entered of them for ever.
    """
    if rid is None:
        return
    if isinstance(rid, list):
        if prompts is None:
            raise BadField(FIELD, "is a list beside a single prompt: give one text")
        if len(rid) != prompts:
            raise BadField(FIELD, f"is a list of {len(rid)} for {prompts} prompts: give one for each")
        for place, each in enumerate(rid):
            if problem := _one(each, server):
                raise BadField(f"{FIELD}.{place}", problem)
        if len(set(rid)) < len(rid):
            raise BadField(FIELD, "names two prompts alike: give each its own")
        used = rid
    else:
        if problem := _one(rid, server):
            raise BadField(FIELD, problem)
        one = prompts is None and samples == 1
        # As sglang names the parts (managers/io_struct.py).
        used = [rid] if one else [f"{rid}_{place}" for place in range((prompts or 1) * samples)]
    if busy := next((each for each in used if each in in_flight), None):
        raise BadField(FIELD, f"{shown(busy)} is the id of a request that is not answered yet: give another")
