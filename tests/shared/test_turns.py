"""Places that callers take in turn."""

from __future__ import annotations

import asyncio

from kvferry.shared.process.turns import Turns


class Log:
    """Who got places, in order."""

    def __init__(self, turns: Turns) -> None:
        self.turns, self.got = turns, list[str]()

    async def ask(self, owner: str, num: int = 1) -> asyncio.Task[None]:
        """Begin to wait for places."""

        async def take() -> None:
            await self.turns.take(owner, num)
            self.got.append(owner)

        task = asyncio.create_task(take())
        await asyncio.sleep(0)
        return task

    async def leave(self, owner: str, num: int = 1) -> None:
        self.turns.leave(owner, num)
        await asyncio.sleep(0)


async def test_callers_take_turns_and_none_has_more_than_its_share() -> None:
    log = Log(Turns(2, most_of_one=1))
    for owner in "aaabc":
        await log.ask(owner)
    assert log.got == ["a", "b"]
    await log.leave("a")
    await log.leave("b")
    assert log.got == ["a", "b", "a", "c"]
    await log.leave("c")
    assert log.turns.num_waiting("a") == 1, "it has its share"
    await log.leave("a")
    assert log.got[-1] == "a"
    await log.leave("a")
    assert log.turns.num_waiting("a") == 0


async def test_one_that_needs_many_places_is_not_passed_over_by_others() -> None:
    log = Log(Turns(4, most_of_one=3))
    await log.ask("a", 2)
    await log.ask("b", 9)  # as its whole share
    await log.ask("c")
    assert log.got == ["a"]
    await log.leave("a", 2)
    assert log.got == ["a", "b", "c"]


async def test_who_leaves_the_queue_lets_the_next_one_in() -> None:
    log = Log(Turns(2, most_of_one=2))
    await log.ask("a")
    leaving = await log.ask("b", 2)
    await log.ask("c")
    assert log.got == ["a"]
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await asyncio.sleep(0)
    assert log.got == ["a", "c"]


async def test_a_place_that_comes_as_its_caller_leaves_is_given_back() -> None:
    log = Log(Turns(1, most_of_one=1))
    await log.ask("a")
    leaving = await log.ask("b")
    log.turns.leave("a")  # it is b's turn,
    leaving.cancel()  # which has not heard of it
    await asyncio.gather(leaving, return_exceptions=True)
    await log.ask("c")
    assert log.got == ["a", "c"]
