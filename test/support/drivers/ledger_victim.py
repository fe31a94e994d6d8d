"""Writes a ledger until it is killed: ``python -m support.drivers.ledger_victim PLACE SEED``."""

from __future__ import annotations

import itertools
import random
import sys
from dataclasses import replace

from sgl_importance.placement.ledger import ledger_writer
from sgl_importance.placement.ledger.ledger_place import LedgerPlace, named_place
from sgl_importance.placement.ledger.ledger_writer import LedgerWriter, Visit
from sgl_importance.placement.ledger.reuse_evidence import ReuseEvidence
from sgl_importance.reuse.estimator import ReuseEstimator

from support.workloads.ledger_rows import NAMESPACE, open_ledger, random_tree

BUDGET_BYTES = 200_000


def main(place: LedgerPlace, seed: int) -> None:
    ledger_writer.BATCH_SECONDS = 0.0
    reuse, rng = ReuseEstimator(), random.Random(seed)
    writer = LedgerWriter(
        open_ledger(place),
        budget_bytes=BUDGET_BYTES,
        worth=lambda reuse_class, age, tokens, depth: 1 / (1 + age),
        clock=0,
        evidence=ReuseEvidence.of(reuse),
        queue_bytes=BUDGET_BYTES // 4,
    )
    print("writing", flush=True)
    for clock in itertools.count(1):
        reuse.tick()
        reuse.began(0)
        reuse.hit(0, clock)
        records = [replace(each, last_access=clock) for each in random_tree(rng, 20)]
        while not writer.put(Visit(records, clock, NAMESPACE, ReuseEvidence.of(reuse))):
            pass


if __name__ == "__main__":
    main(named_place(sys.argv[1]), int(sys.argv[2]))
