"""Run in a process where LMCache can be imported: its own CPU backend under pressure, by two policies."""

from __future__ import annotations

import json
import sys

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_allocators.tensor_memory_allocator import TensorMemoryAllocator
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.cache_policy import BaseCachePolicy
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.token_database import ChunkedTokenDatabase

from sgl_importance.interface import Importance
from sgl_importance.nodes.digests import chain_digests, root_digest
from sgl_importance_lab.connectors.lmcache import register, watch_tokens

PAGE, CHUNK, CHUNKS = 4, 32, 12
SHAPE, DTYPE = torch.Size([2, 1, CHUNK, 16]), torch.float32
CHUNK_BYTES = SHAPE.numel() * 4


class Known:
    """A source that knows what it is told."""

    def __init__(self) -> None:
        self.pages: dict[bytes, Importance] = {}

    def get_importance(self, key: bytes) -> Importance | None:
        return self.pages.get(key)


def prompt(start: int, chunks: int) -> list[int]:
    return list(range(start, start + chunks * CHUNK))


class Subject:
    """LMCache's CPU backend with room for CHUNKS chunks."""

    def __init__(self, policy: str, source: Known) -> None:
        config = LMCacheEngineConfig.from_defaults(chunk_size=CHUNK, cache_policy=policy, local_cpu=True)
        metadata = LMCacheMetadata("model", 1, 1, 0, 0, DTYPE, (1, 2, CHUNK, 1, 16))
        directory = register(source, page_size=PAGE, chunk_tokens=CHUNK)
        self.database = ChunkedTokenDatabase(config, metadata)
        watch_tokens(self.database, directory)
        buffer = torch.zeros(CHUNKS * max(CHUNK_BYTES, 4096), dtype=torch.uint8)
        self.backend = LocalCPUBackend(config, memory_allocator=TensorMemoryAllocator(buffer))
        assert isinstance(self.backend.cache_policy, BaseCachePolicy)
        self.policy = type(self.backend.cache_policy).__name__

    def keys(self, tokens: list[int]) -> list[CacheEngineKey]:
        return [key for _, _, key in self.database.process_tokens(torch.tensor(tokens))]

    def store(self, tokens: list[int]) -> None:
        for key in self.keys(tokens):
            memory = self.backend.allocate(SHAPE, DTYPE, busy_loop=False)
            assert memory is not None, "the policy names no victim"
            self.backend.submit_put_task(key, memory)
            memory.ref_count_down()

    def held(self, tokens: list[int]) -> list[bool]:
        return [self.backend.contains(key) for key in self.keys(tokens)]


def important(source: Known, tokens: list[int], chunk: int) -> None:
    """Says that three later queries spent half of their body mass on one chunk."""
    digests = chain_digests(root_digest(None, None), tokens, PAGE)
    for page in digests[chunk * CHUNK // PAGE : (chunk + 1) * CHUNK // PAGE]:
        mass = 0.5 * PAGE / CHUNK
        source.pages[page] = Importance(mass, 0.5, mass, 0.5, queries=3, weight=3.0)


def run(policy: str, *, scan: int) -> dict[str, object]:
    source, document = Known(), prompt(0, 3)
    subject = Subject(policy, source)
    subject.store(document)
    important(source, document, 1)
    for serial in range(scan):
        subject.store(prompt(10_000 + 1_000 * serial, 1))
    return {
        "policy": subject.policy,
        "held": subject.held(document),
        "chunks": len(subject.backend.hot_cache),
    }


if __name__ == "__main__":
    answers = {
        "lru": run("LRU", scan=14),
        "importance": run("IMPORTANCE", scan=14),
        "abandoned": run("IMPORTANCE", scan=60),
    }
    print("ANSWER " + json.dumps(answers))
    sys.stdout.flush()
