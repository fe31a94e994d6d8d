"""A pre-warm plan from the ledger's records."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sgl_importance.placement.ledger.ledger import Ledger
from sgl_importance.placement.ledger.prefix_record import PrefixRecord
from sgl_importance.placement.prewarm.prewarm_plan import Candidate, plan
from sgl_importance.policy.cost_model import CostModel
from sgl_importance.policy.marginal_loss import importance_factor
from sgl_importance.reuse.estimator import ReuseEstimator
from sgl_importance.signal.node_importance import NodeImportance
from sgl_importance.tiers import Tier


@dataclass(frozen=True, slots=True)
class WarmPath:
    """Tokens to bring in, from the root on.

    Attributes:
        namespace: extra key and cache salt of their requests.
        token_ids: of the whole path, int64.
        start: tokens that are on the device already, or come with an earlier path.
        ends: tokens up to the end of each node behind ``start``, ascending; the last is the whole path.
            Brought in one after the other, the nodes are cut as they were.
    """

    namespace: tuple[str | None, ...]
    token_ids: array[int]
    start: int
    ends: tuple[int, ...]

    @classmethod
    def of_prompt(cls, namespace: tuple[str | None, ...], token_ids: Sequence[int]) -> WarmPath:
        """A path of a prompt that is not in the ledger."""
        return cls(namespace, array("q", token_ids), 0, (len(token_ids),))


def plan_from_ledger(
    ledger: Ledger,
    cost: CostModel,
    *,
    use_importance: bool,
    has_storage: bool,
    present: Collection[bytes],
    max_tokens: int,
    max_seconds: float,
) -> list[WarmPath]:
    """Paths of highest value among the ledger's prefixes that the device does not hold.

    Args:
        ledger: keeps token ids; of the model that is served.
        cost: of the server.
        use_importance: whether g counts.
        has_storage: whether pages that were handed to the storage tier can come from there.
        present: digests of nodes on the device.
        max_tokens: room on the device.
        max_seconds: most that bringing in may take by the cost model.
    """
    reuse = ReuseEstimator()
    clock = ledger.clock
    evidence = ledger.evidence()
    if evidence is not None:
        reuse.restore(evidence.hits, evidence.reached, clock)
    records = {record.digest: record for record in ledger.prefixes() if record.token_ids is not None}
    namespaces = ledger.namespaces()
    candidates = []
    for record in records.values():
        source = Tier.STORAGE if has_storage and record.in_storage else None
        seconds = cost.restore_seconds(record.tokens, record.depth, source)
        age = max(clock - record.last_access, 0)
        candidates.append(
            Candidate(
                digest=record.digest,
                parent=record.parent,
                depth=record.depth,
                tokens=record.tokens,
                rate=0.0 if record.at_risk_as is None else reuse.index(record.at_risk_as, age),
                saved_seconds=seconds * (_factor(record) if use_importance else 1.0),
                restore_seconds=seconds,
            )
        )
    paths = plan(
        candidates,
        present={*present, *namespaces},
        max_tokens=max_tokens,
        max_seconds=max_seconds,
        page_size=ledger.page_size,
    )
    warm = []
    for path in paths:
        root, token_ids = _tokens_to(path.nodes[-1], records)
        if root in namespaces:  # else the ledger has forgotten the beginning of the path
            nodes = (records[digest] for digest in path.nodes)
            ends = tuple(min(node.depth + node.tokens, path.stop) for node in nodes)
            warm.append(WarmPath(namespaces[root], token_ids[: path.stop], path.start, ends))
    return warm


def _factor(record: PrefixRecord) -> float:
    importance = NodeImportance(len(record.vectors))
    importance.restore_pages(0, record.vectors, record.queries)
    return importance_factor(importance)


def _tokens_to(digest: bytes, records: dict[bytes, PrefixRecord]) -> tuple[bytes, array[int]]:
    """The root above a node, and the tokens from there to the node's end."""
    pieces = []
    while (record := records.get(digest)) is not None:
        assert record.token_ids is not None
        pieces.append(record.token_ids)
        digest = record.parent
    tokens: array[int] = array("q")
    for piece in reversed(pieces):
        tokens.extend(piece)
    return digest, tokens
