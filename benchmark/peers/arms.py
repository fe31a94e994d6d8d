"""The servers that are compared, with flags that give each the same pool, page, chunk and precision."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from benchmark.peers.served import Served
from benchmark.peers.sglang_server import HICACHE, sglang
from benchmark.peers.vllm_server import vllm

OURS = ("--kv-policy", "importance")


@dataclass(frozen=True)
class Arm:
    """One server of the comparison.

    Attributes:
        tiers: "device", or "host" where KV may also lie in a host tier of ``HOST_RATIO`` pools, or "storage"
            where it may lie in files too.
        flags: of sglang's, beside those of all; None where it is vLLM.
        has_lmcache: whether vLLM's host tier is LMCache.
        tells: whether clients name their sessions, and say when one is over.
    """

    tiers: str
    flags: tuple[str, ...] | None
    has_lmcache: bool = False
    tells: bool = False

    @property
    def learns(self) -> bool:
        """Whether a prompt changes how later ones are treated, beyond what is cached."""
        return self.flags is not None and "--kv-policy" in self.flags

    def started(
        self, model: Path, pool: int, *, sglang_flags: tuple[str, ...] = (), vllm_threads: int = 1
    ) -> AbstractContextManager[Served]:
        if self.flags is None:
            return vllm(model, pool, has_lmcache=self.has_lmcache, threads=vllm_threads)
        return sglang((*self.flags, *sglang_flags), model, pool, has_store=self.tiers == "storage")


ARMS = {
    "stock sglang": Arm("device", ()),
    "vLLM": Arm("device", None),
    "ours": Arm("device", OURS),
    "ours (told)": Arm("device", OURS, tells=True),
    "observe": Arm("device", ("--kv-policy", "observe")),
    "stock + HiCache": Arm("host", HICACHE),
    "vLLM + LMCache": Arm("host", None, has_lmcache=True),
    "ours + HiCache": Arm("host", (*OURS, *HICACHE)),
    "ours + HiCache (told)": Arm("host", (*OURS, *HICACHE), tells=True),
    "ours + store": Arm("storage", (*OURS, *HICACHE)),
}
