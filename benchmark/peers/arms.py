"""The servers that are compared, with flags that give each the same pool, page, chunk and precision."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from benchmark.peers.llama_cpp_server import llama_cpp_server
from benchmark.peers.served import Served
from benchmark.peers.sglang_server import HICACHE, LMCACHE, sglang
from benchmark.peers.vllm_server import vllm

OURS = ("--kv-policy", "importance")


@dataclass(frozen=True)
class Arm:
    """One server of the comparison.

    Attributes:
        tiers: "device", or "host" where KV may also lie in a host tier of ``HOST_RATIO`` pools, or "storage"
            where it may lie in files too.
        flags: of sglang's, beside those of all.
        engine: "sglang", "vLLM", whose host tier is LMCache, or "llama.cpp".
        tells: whether clients name their sessions, and say when one is over.
    """

    tiers: str
    flags: tuple[str, ...] = ()
    engine: str = "sglang"
    tells: bool = False

    @property
    def starts_anew(self) -> bool:
        """Whether each row has a server of its own: it learns, or cannot be emptied."""
        return "--kv-policy" in self.flags or self.engine == "llama.cpp"

    def started(
        self, model: Path, pool: int, *, sglang_flags: tuple[str, ...] = (), peer_threads: int = 1
    ) -> AbstractContextManager[Served]:
        has_host_tier = self.tiers == "host"
        if self.engine == "vLLM":
            return vllm(model, pool, has_lmcache=has_host_tier, threads=peer_threads)
        if self.engine == "llama.cpp":
            return llama_cpp_server(model, pool, has_host_tier=has_host_tier, threads=peer_threads)
        return sglang((*self.flags, *sglang_flags), model, pool, has_store=self.tiers == "storage")


ARMS = {
    "stock sglang": Arm("device"),
    "vLLM": Arm("device", engine="vLLM"),
    "llama.cpp": Arm("device", engine="llama.cpp"),
    "ours": Arm("device", OURS),
    "ours (told)": Arm("device", OURS, tells=True),
    "observe": Arm("device", ("--kv-policy", "observe")),
    "stock + HiCache": Arm("host", HICACHE),
    "stock + LMCache": Arm("host", LMCACHE),
    "vLLM + LMCache": Arm("host", engine="vLLM"),
    "llama.cpp + host": Arm("host", engine="llama.cpp"),
    "ours + HiCache": Arm("host", (*OURS, *HICACHE)),
    "ours + HiCache (told)": Arm("host", (*OURS, *HICACHE), tells=True),
    "ours + store": Arm("storage", (*OURS, *HICACHE)),
}
