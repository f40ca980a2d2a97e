"""Turns that routers have acknowledged while they could not reach Redis, as this worker knows them.

Place in the request's path: before a prompt is queued. A router that cannot write a turn to Redis announces
it to every prefill worker before it acknowledges it, and goes on announcing it until Redis has it. Another
router, which may reach Redis and finds the session without the turn there, says with each prompt which record
it continues. If that is one that an announced turn goes beyond, the prompt is refused. So the check costs no
call of its own, and a router that reaches Redis announces nothing.

The other way round, a router is told at its announcement if another one has taken over the session meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.shared.control.messages import (
    PendingAnswer,
    PendingInfo,
    PendingTurns,
    PrefillRequest,
    SessionBase,
    SessionKey,
)
from kvferry.shared.errors import SessionPending

_MAX_BEGUN = 16_384
"""Sessions whose last turn's base is remembered."""


@dataclass(frozen=True, kw_only=True)
class _Announced:
    router: str
    info: PendingInfo
    until_s: float


class PendingTable:
    """What was announced, and which turns began here from which base. For one event loop.

    Args: clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._announced: dict[SessionKey, _Announced] = {}
        self._begun: OrderedDict[SessionKey, tuple[str, SessionBase]] = OrderedDict()
        """The last turn of each session: its request id and base. It may still run."""

    def begin(self, request: PrefillRequest) -> None:
        """Let a turn begin.

        Raises: SessionPending: another router has acknowledged a turn beyond the base of this one.
        """
        session, base = request.session, request.session_base
        if session is None or base is None:
            return
        known = self._known(session)
        if known is not None and known.router != base.router and known.info.goes_beyond(base.commit_id):
            raise SessionPending.of(session.session_id)
        self._begun[session] = (request.request_id, base)
        self._begun.move_to_end(session)
        if len(self._begun) > _MAX_BEGUN:
            self._begun.popitem(last=False)

    def give_up(self, session: SessionKey | None, request_id: str) -> None:
        """A turn has ended, and its router has not acknowledged it."""
        if session is not None and self._begun.get(session, ("",))[0] == request_id:
            del self._begun[session]

    def announce(self, turns: PendingTurns) -> PendingAnswer:
        """See `PrefillControl.announce_pending`."""
        until_s, overtaken = self._clock() + turns.lease_s, []
        for turn in turns.turns:
            begun = self._begun.get(turn.session)
            if begun is not None and begun[1].router != turns.router and begun[1].commit_id in turn.bases:
                overtaken.append(turn.session)
                continue
            info = PendingInfo(bases=turn.bases)
            self._announced[turn.session] = _Announced(router=turns.router, info=info, until_s=until_s)
        return PendingAnswer(overtaken=tuple(overtaken))

    def info(self, session: SessionKey) -> PendingInfo:
        """See `PrefillControl.pending_turn`."""
        known = self._known(session)
        return known.info if known is not None else PendingInfo()

    def drop(self, session: SessionKey) -> None:
        """The session was deleted: its id may be used at once."""
        self._announced.pop(session, None)
        self._begun.pop(session, None)

    def sweep(self) -> None:
        """Forget what nobody has announced for its lease."""
        now_s = self._clock()
        for session in [key for key, known in self._announced.items() if known.until_s <= now_s]:
            del self._announced[session]

    def _known(self, session: SessionKey) -> _Announced | None:
        known = self._announced.get(session)
        return None if known is None or known.until_s <= self._clock() else known
