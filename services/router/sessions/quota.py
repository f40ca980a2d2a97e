"""Limits on what one API key may store: sessions, documents, and the tokens of each kind.

Checked before a turn runs, so that nothing is computed that cannot be stored. Routers that share a Redis
count together; two simultaneous requests may both pass.
"""

from __future__ import annotations

from kvferry.services.router.config import RouterConfig
from kvferry.services.router.sessions.record import is_document
from kvferry.services.router.sessions.redis_store import SessionStore
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import CapacityExceeded, InvalidRequest

_RETRY_AFTER_S = 60.0


async def check_quota(
    config: RouterConfig, store: SessionStore, key: SessionKey, *, is_new: bool, num_tokens: int
) -> None:
    """Whether a session or document may have this many tokens.

    Args: num_tokens: its tokens after the turn, as far as they are known.
    Raises:
        InvalidRequest: it is too long by itself.
        CapacityExceeded: with the key's others it is too much; deleting some of them helps.
    """
    documents = is_document(key)
    what, limit = (
        ("documents", config.max_documents_per_key)
        if documents
        else ("sessions", config.max_sessions_per_key)
    )
    max_tokens = config.max_history_tokens_per_key
    if max_tokens and num_tokens > max_tokens:
        raise InvalidRequest(
            f"This would be {num_tokens} tokens; all {what} of a key may have {max_tokens} together"
        )
    if not is_new and not max_tokens:
        return
    usage = await store.usage(key.owner, documents=documents, excluding=key)
    if is_new and usage.num_records >= limit:
        raise CapacityExceeded(
            f"This key has {usage.num_records} {what}; the limit is {limit}, delete some",
            reason=f"{what}_quota",
            retry_after_s=_RETRY_AFTER_S,
        )
    if max_tokens and usage.num_tokens + num_tokens > max_tokens:
        raise CapacityExceeded(
            f"This key's other {what} have {usage.num_tokens} tokens and this one would have "
            f"{num_tokens}; the limit for all is {max_tokens}, delete some",
            reason=f"{what}_tokens_quota",
            retry_after_s=_RETRY_AFTER_S,
        )
