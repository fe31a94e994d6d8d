"""What we know of a request of upstream's: one record, which goes with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sgl_importance.misses.account import AccountedRequest
from sgl_importance.nodes.named_sessions import Session, SessionName
from sgl_importance.placement.hints.hinted_request import HintedRequest
from sgl_importance.placement.hints.hints import Hints
from sgl_importance.signal.fold import QueryFolds
from sgl_importance.sparse.selection_rule import Selection
from sgl_importance.tiers import Tier

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

RECORD_ATTRIBUTE = "importance"


def namespace_of(req: Req) -> tuple[str | None, str | None]:
    """Extra key and cache salt of a request; an empty name is none, as in ``root_digest``."""
    return req.extra_key or None, req.cache_salt or None


def session_name_of(req: Req) -> SessionName | None:
    """The session that the request names, or that ``/open_session`` named for it."""
    session_id: str | None = getattr(req, "session_id", None)
    if session_id is None and (opened := getattr(req, "session", None)) is not None:
        session_id = opened.session_id
    return SessionName(session_id, *namespace_of(req)) if session_id else None


@dataclass(slots=True)
class RequestRecord:
    """Of one request, in the scheduler; each part is None until its owner has met the request.

    Attributes:
        query: its folds, since it was admitted to the tree.
        session: that it belongs to, since it was admitted; None where it names none.
        is_counted: whether the metrics have counted it.
        decode_prefix: tokens that a decode server had of its prompt; None on another server.
        has_read_hints: whether ``hints`` says what its envelope held.
        hints: None where it has none that can be followed.
        hinted: follows its hints.
        make_report: of the report that it asked for, by the tokens that it found in each tier; gives None
            where that fails.
        misses: why tokens of its prompt were not found.
        selection: which of its tokens read chosen pages only.
    """

    query: QueryFolds | None = None
    session: Session | None = None
    is_counted: bool = False
    decode_prefix: int | None = None
    has_read_hints: bool = False
    hints: Hints | None = None
    hinted: HintedRequest | None = None
    make_report: Callable[[Mapping[Tier, int]], dict[str, Any] | None] | None = None
    misses: AccountedRequest | None = None
    selection: Selection | None = None


def record_of(req: Req) -> RequestRecord:
    """The record of a request, made where it has none yet."""
    record: RequestRecord | None = getattr(req, RECORD_ATTRIBUTE, None)
    if record is None:
        record = RequestRecord()
        setattr(req, RECORD_ATTRIBUTE, record)
    return record


def found_tokens(req: Req) -> dict[Tier, int]:
    """Tokens of its prompt that an admitted request found on this server, by tier.

    A decode server's request says what the prefill server had found, which counts there.
    """
    prefix = record_of(req).decode_prefix
    if prefix is not None:
        return {Tier.DEVICE: prefix, Tier.HOST: 0, Tier.STORAGE: 0}
    return {
        Tier.DEVICE: req.cached_tokens_device,
        Tier.HOST: req.cached_tokens_host,
        Tier.STORAGE: req.cached_tokens_storage,
    }
