"""The account of why prompts are not found."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_importance.options.setting import option


@dataclass(frozen=True, slots=True)
class MissOptions:
    """How long the server remembers what its cache has held."""

    memory: float = option(
        4.0,
        help="KV that the server remembers after its cache has given it up, to tell why a prompt was not "
        "found, in sizes of the device pool and up to 262,144 pages; 0 keeps no account",
        unit="device pools",
        minimum=0,
        whole=False,
        cost="eight bytes of scheduler memory for each token that is held or remembered, and scheduler time "
        "for each request (benchmark/misses.py)",
    )
