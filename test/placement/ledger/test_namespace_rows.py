"""The namespaces of a ledger: kept as long as a prefix of theirs, and counted."""

from __future__ import annotations

from sgl_importance.nodes.digests import root_digest
from sgl_importance.placement.ledger.ledger import Ledger
from sgl_importance.placement.ledger.ledger_place import LedgerPlace

from support.workloads.ledger_rows import open_ledger, record


def _salted(user: int) -> tuple[str | None, str | None]:
    return (None, f"user-{user:05d}-{'x' * 20}")


def _roots(ledger: Ledger) -> set[bytes]:
    return {each.parent for each in ledger.prefixes() if each.depth == 0}


def test_namespaces_go_with_their_rows_and_count_against_the_budget(place: LedgerPlace):
    """One salt for each user: nobody's outlives what is kept of him."""
    ledger = open_ledger(place)
    budget = 64 << 10
    for batch in range(15):
        names = [_salted(100 * batch + user) for user in range(100)]
        rows = [record([1, 2, 3, 4, 5, 6, 7, 8], root=root_digest(*each)) for each in names]
        ledger.write(rows, clock=batch + 1, requests=1, namespaces=names)
        is_full = ledger.forget(budget, lambda _, age, *__: 1 / (1 + age)) > 0
        assert not is_full or ledger.num_bytes > 0.89 * budget, "no more went than had to"
    assert 20 < len(ledger) < 1000
    assert set(ledger.namespaces()) == _roots(ledger)
    ((rows_bytes,),) = ledger.database.execute("SELECT sum(length(pages) + length(vectors)) FROM prefixes")
    ((names_bytes,),) = ledger.database.execute("SELECT sum(length(root) + length(names)) FROM namespaces")
    assert rows_bytes + names_bytes < ledger.num_bytes <= budget
    ledger.close()


def test_a_namespace_that_was_forgotten_is_written_again(place: LedgerPlace):
    """Also where another server has forgotten it."""
    ours = open_ledger(place)
    known = record([1, 2, 3, 4], root=root_digest(*_salted(1)))
    for is_ours in (True, False):
        ours.write([known], clock=1, requests=1, namespaces=[_salted(1)])
        assert list(ours.namespaces().values()) == [_salted(1)]
        forgetful = ours if is_ours else open_ledger(place)
        assert forgetful.forget(0, lambda *_: 1.0) == 1
        assert ours.namespaces() == {}
    forgetful.close()
    ours.close()


def test_namespaces_that_earlier_versions_left_cost_no_rows(place: LedgerPlace):
    ledger = open_ledger(place)
    names = [_salted(user) for user in range(20)]
    rows = [record([1, 2, 3, 4], root=root_digest(*each)) for each in names]
    ledger.write(rows, clock=1, requests=1, namespaces=names)
    full = ledger.num_bytes
    ledger.write([], clock=1, requests=0, namespaces=map(_salted, range(1000, 3000)))
    assert ledger.num_bytes > full + 100_000
    ledger.close()
    ledger = open_ledger(place)
    assert ledger.forget(full, lambda *_: 1.0) == 0
    assert (len(ledger), ledger.num_bytes) == (20, full)
    assert set(ledger.namespaces().values()) == set(names)
    ledger.close()
