"""Which turns a prefill worker refuses: those that would go on without an acknowledged one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvtest.clock import Clock
from kvtest.control import PREFILL_REQUEST

from kvferry.services.prefill.turns import PendingTable
from kvferry.shared.control.messages import PendingTurn, PendingTurns, PrefillRequest, SessionBase, SessionKey
from kvferry.shared.errors import SessionPending

KEY = SessionKey(owner="0a1b", session_id="s")
LEASE_S = 30.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> PendingTable:
    return PendingTable(clock)


def turn(router: str, commit_id: str, request_id: str = "r") -> PrefillRequest:
    base = SessionBase(router=router, commit_id=commit_id)
    return replace(PREFILL_REQUEST, request_id=request_id, session=KEY, session_base=base)


def announce(table: PendingTable, *bases: str, router: str = "a") -> bool:
    """Returns whether the router may acknowledge its turn."""
    turns = (PendingTurn(session=KEY, bases=bases),)
    return not table.announce(PendingTurns(router=router, lease_s=LEASE_S, turns=turns)).overtaken


@pytest.mark.parametrize(
    ("bases", "commit_id", "is_refused"),
    [
        (("",), "", True),  # it seems to be a new session
        (("c-1",), "c-1", True),
        (("c-1", "c-2"), "c-1", True),
        (("c-1",), "", True),  # Redis has lost it
        (("deleted-1",), "deleted-1", True),
        (("c-1",), "c-2", False),  # written back
        (("c-1",), "deleted-1", False),
        (("",), "c-1", False),  # another router's commit has won
    ],
)
def test_a_turn_is_refused_while_one_beyond_its_base_is_pending(
    table: PendingTable, clock: Clock, bases: tuple[str, ...], commit_id: str, is_refused: bool
) -> None:
    assert announce(table, *bases)
    if is_refused:
        with pytest.raises(SessionPending):
            table.begin(turn("b", commit_id))
    else:
        table.begin(turn("b", commit_id))
    table.begin(turn("a", commit_id))  # its own router knows it
    clock.turn(LEASE_S)
    table.sweep()
    table.begin(turn("b", commit_id))


def test_a_deleted_session_is_forgotten(table: PendingTable) -> None:
    assert announce(table, "")
    table.drop(KEY)
    table.begin(turn("b", ""))
    assert not table.info(KEY).bases


def test_a_router_is_told_that_another_one_has_taken_its_session_over(table: PendingTable) -> None:
    table.begin(turn("a", "c-1", "r-a"))
    assert announce(table, "c-1")  # nobody else
    table.drop(KEY)
    table.begin(turn("b", "c-1", "r-b"))
    assert not announce(table, "c-1")
    assert announce(table, "c-2")  # the other one's turn was before
    table.drop(KEY)
    table.begin(turn("b", "c-1", "r-b"))
    table.give_up(KEY, "r-other")
    assert not announce(table, "c-1")
    table.give_up(KEY, "r-b")
    assert announce(table, "c-1")
