"""What a server is that a benchmark asks: its model, and what sglang tells of its selector of pages."""

from __future__ import annotations

import argparse
import hashlib
from typing import Any

import msgspec

from sgl_importance_lab.bench.bench_run import Asked, Run
from sgl_importance_lab.probe.chat_client import ChatClient, ServerError


class BenchedServer(ChatClient):
    """Asks one server what it is."""

    async def flags(self) -> dict[str, Any]:
        """sglang's own; empty for any other server."""
        try:
            told = await self._request("GET", "/server_info")
        except ServerError:
            return {}
        return told if isinstance(told, dict) else {}

    async def told_model(self) -> dict[str, Any]:
        """What tells one model from another under the same name, None where the server does not say it."""
        listing = await self._request("GET", "/v1/models")
        return {name: listing["data"][0].get(name) for name in ("root", "max_model_len")}


async def new_run(url: str, api_key: str | None, timeout: float, asked: Asked, body: dict[str, Any]) -> Run:
    """A run that nothing has been asked in yet.

    Raises:
        ServerError: no OpenAI-compatible server answers there.
    """
    client = BenchedServer(url, api_key, timeout)
    async with client:
        model, flags = await client.model(), await client.flags()
        # Not all flags: sglang draws a seed at each start.
        command = str(flags.get("launch_command", ""))
        told = [model, await client.told_model(), command]
        served = hashlib.sha256(msgspec.json.encode(told)).hexdigest()
        hints = body.get("kv_hints") or {}
        given = _selector_flags(command)
        selector = hints.get("selector") or given.kv_sparse_selector
        budget = hints.get("budget") or given.kv_sparse_budget
        if selector in (None, "all"):
            budget = None
        return Run(asked, client.base_url, model, served, body, selector, budget, [])


def _selector_flags(command: str) -> argparse.Namespace:
    """Ours are in no field of ``/server_info``, as sglang does not know them."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--kv-sparse-selector")
    parser.add_argument("--kv-sparse-budget", type=float)
    return parser.parse_known_args(command.split())[0]
