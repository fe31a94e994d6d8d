"""Least hit density: evicts what is expected to earn the fewest hits for the space and time it takes."""

from __future__ import annotations

from collections import deque
from typing import ClassVar

from sgl_importance_lab.policies.hit_density import MAX_AGE, HitDensity
from sgl_importance_lab.policies.sampled import SampledPolicy

_EARLY_SAMPLES = 8
_EARLY_RECONFIGURATIONS = 50
_EXPLORER_FRACTION = 0.01
_EXPLORE_ONE_IN = 32
_DECAY = 0.9


class LhdPolicy(SampledPolicy):
    """Beckmann, Chen, Cidon: LHD: Improving Cache Hit Rate by Maximizing Hit Density, NSDI 2018.

    Follows the authors' simulator, which libCacheSim carries: 16 classes by the last two hit ages, coarse
    ages, a random sample of candidates and of recent admissions, 1 % of the cache for explorers that stay.
    In a prefix tree the sample is drawn from the evictable blocks. The authors learn anew every 2**20
    accesses, more than many KV traces have: on those the default ranks by the prior, which is recency.

    Args:
        capacity, seed: see ``SampledPolicy``.
        samples: candidates looked at per victim; 8 until 50 reconfigurations have passed.
        admissions: recent admissions of low density that are looked at besides.
        reconfigure_every: accesses between reconfigurations.
    """

    name: ClassVar[str] = "lhd"

    def __init__(
        self,
        capacity: int,
        *,
        seed: int = 0,
        samples: int = 32,
        admissions: int = 8,
        reconfigure_every: int = 1 << 20,
    ) -> None:
        super().__init__(capacity, seed=seed)
        assert samples > 0
        assert reconfigure_every > 0
        self._samples = samples
        self._reconfigure_every = reconfigure_every
        self._time = 0
        self._model = HitDensity()
        self._last_access: dict[int, int] = {}
        self._class: dict[int, int] = {}
        self._last_hit_age: dict[int, int] = {}
        self._explorers: set[int] = set()
        self._explorer_budget = int(capacity * _EXPLORER_FRACTION)
        self._doubtful: deque[int] = deque(maxlen=admissions)
        self._victim_density = 0.0

    def insert(self, block: int) -> None:
        self._last_hit_age[block] = 0
        self._class[block] = 0
        self._last_access[block] = self._time
        explores = self._explore(block)
        if not explores and self._density(block) < self._victim_density:
            self._doubtful.append(block)
        self._tick()

    def access(self, block: int) -> None:
        age = self._model.age(self._time - self._last_access[block])
        self._model.hit(self._class[block], age)
        self._class[block] = self._model.class_of_age[min(age + self._last_hit_age[block], MAX_AGE)]
        self._last_hit_age[block] = age
        self._last_access[block] = self._time
        self._end_exploration(block)
        self._explore(block)
        self._tick()

    def victim(self) -> int:
        victim, lowest = -1, float("inf")
        last_access, classes, explorers = self._last_access, self._class, self._explorers
        time, shift, densities = self._time, self._model.shift, self._model.densities
        for block in self._sample():  # _density inlined: most of the time of a replay is spent here
            age = (time - last_access[block]) >> shift
            density = densities[classes[block]][age if age < MAX_AGE else -1]
            if block in explorers:
                density += 1.0
            if density < lowest:
                victim, lowest = block, density
        if lowest >= 0:  # minus infinity stands for ages out of range, and would never decay
            self._victim_density = _DECAY * self._victim_density + (1 - _DECAY) * lowest
        self._forget(victim)
        return victim

    def _sample(self) -> list[int]:
        """Candidates drawn at random, and the recent admissions that looked like victims at once."""
        candidates, uniform = self._candidates, self._random.random
        number = len(candidates)
        early = self._model.reconfigurations <= _EARLY_RECONFIGURATIONS
        samples = min(self._samples, _EARLY_SAMPLES) if early else self._samples
        sampled = [candidates[int(uniform() * number)] for _ in range(samples)]
        sampled += [block for block in self._doubtful if block in self._places]
        return sampled

    def _density(self, block: int) -> float:
        age = (self._time - self._last_access[block]) >> self._model.shift
        density = self._model.densities[self._class[block]][age if age < MAX_AGE else -1]
        return density + 1.0 if block in self._explorers else density

    def _explore(self, block: int) -> bool:
        """Lets a few blocks stay whatever their density, to learn about the ages that evictions cut off."""
        chosen = self._random.random() * _EXPLORE_ONE_IN < 1
        if chosen and self._explorer_budget > 0 and self._model.reconfigurations < _EARLY_RECONFIGURATIONS:
            self._explorers.add(block)
            self._explorer_budget -= 1
        return chosen

    def _end_exploration(self, block: int) -> None:
        if block in self._explorers:
            self._explorers.discard(block)
            self._explorer_budget += 1

    def _forget(self, block: int) -> None:
        age = self._model.age(self._time - self._last_access[block])
        self._model.evict(self._class[block], age)
        self._end_exploration(block)
        self.held(block)
        del self._last_access[block], self._class[block], self._last_hit_age[block]

    def _tick(self) -> None:
        self._time += 1
        if self._time % self._reconfigure_every == 0:
            self._model.reconfigure(len(self._last_access))
