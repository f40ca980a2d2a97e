"""Admission is in bytes, in turns of API keys, bounded in time and number, and leaks nothing."""

import asyncio

import pytest
import torch

from kvferry.services.decode.memory import Scheduler
from kvferry.shared.cache.arena import ByteArena
from kvferry.shared.errors import CapacityExceeded, InvalidRequest


def make(size_bytes=640, *, max_waiting=8, admission_wait_s=20.0):
    arena = ByteArena(size_bytes, torch.device("cpu"))
    return arena, Scheduler(arena, max_waiting=max_waiting, admission_wait_s=admission_wait_s)


async def start(scheduler, size_bytes, owner, **options):
    """A reservation under way, in line if it has to be."""
    task = asyncio.create_task(scheduler.reserve(size_bytes, owner=owner, timeout_s=30, **options))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


async def test_memory_that_is_free_is_granted_at_once():
    arena, scheduler = make()
    granted = await scheduler.reserve(100, owner="a", timeout_s=30)
    assert (granted.owner, granted.size_bytes) == ("a", 128)
    assert arena.state(granted) == "reserved"


async def test_a_waiting_request_gets_bytes_released_by_another_thread():
    arena, scheduler = make()
    held = await scheduler.reserve(640, owner="a", timeout_s=30)
    waiting = await start(scheduler, 640, "b")
    assert scheduler.num_waiting == 1
    await asyncio.to_thread(scheduler.release, held)
    assert (await asyncio.wait_for(waiting, 10)).owner == "b"
    assert scheduler.num_waiting == 0
    assert arena.free_bytes == 0


async def test_small_requests_do_not_overtake_a_large_one():
    _, scheduler = make()
    held = await scheduler.reserve(320, owner="a", timeout_s=30)
    large = await start(scheduler, 640, "large")
    small = await start(scheduler, 64, "small")
    assert scheduler.num_waiting == 2
    assert not small.done()
    scheduler.release(held)
    scheduler.release(await asyncio.wait_for(large, 10))
    assert (await asyncio.wait_for(small, 10)).owner == "small"


async def test_a_request_that_waits_in_vain_is_refused_and_lets_the_next_one_through():
    arena, scheduler = make(admission_wait_s=0.1)
    await scheduler.reserve(320, owner="a", timeout_s=30)
    large = await start(scheduler, 640, "large")
    with pytest.raises(CapacityExceeded, match="640 bytes") as caught:
        await large
    assert caught.value.reason == "arena_full"
    assert caught.value.retry_after_s >= 1
    assert (await scheduler.reserve(320, owner="b", timeout_s=30)).size_bytes == 320
    arena.check_integrity()


async def test_a_refusal_says_when_the_bytes_will_be_free_by_what_ended_of_late():
    now_s = [0.0]
    arena = ByteArena(640, torch.device("cpu"))
    scheduler = Scheduler(arena, max_waiting=1, admission_wait_s=0.0, clock=lambda: now_s[0])
    for _ in range(4):
        allocation = await scheduler.reserve(64, owner="a", timeout_s=30)
        now_s[0] += 2.0
        scheduler.release(allocation)  # 64 bytes every two seconds
    await scheduler.reserve(640, owner="a", timeout_s=30)
    with pytest.raises(CapacityExceeded) as small:
        await scheduler.reserve(64, owner="b", timeout_s=30)
    with pytest.raises(CapacityExceeded) as large:
        await scheduler.reserve(320, owner="b", timeout_s=30)
    assert (small.value.retry_after_s, large.value.retry_after_s) == (2.0, 10.0)


async def test_a_full_line_says_how_long_it_will_take_with_those_in_it():
    now_s = [0.0]
    arena = ByteArena(640, torch.device("cpu"))
    scheduler = Scheduler(arena, max_waiting=1, admission_wait_s=20.0, clock=lambda: now_s[0])
    allocation = await scheduler.reserve(64, owner="a", timeout_s=30)
    now_s[0] = 3.0
    scheduler.release(allocation)
    held = await scheduler.reserve(640, owner="a", timeout_s=30)
    waiting = await start(scheduler, 128, "b")
    with pytest.raises(CapacityExceeded) as full:
        await scheduler.reserve(64, owner="c", timeout_s=30)
    assert (full.value.reason, full.value.retry_after_s) == ("queue_full", 9.0)
    scheduler.release(held)
    scheduler.release(await asyncio.wait_for(waiting, 10))


async def test_the_departure_of_the_head_serves_those_behind_it():
    _, scheduler = make()
    await scheduler.reserve(320, owner="a", timeout_s=30)
    large = await start(scheduler, 640, "large")
    small = await start(scheduler, 64, "small")
    large.cancel()
    assert (await asyncio.wait_for(small, 10)).owner == "small"


async def test_a_full_line_refuses_the_next_request():
    _, scheduler = make(max_waiting=1)
    await scheduler.reserve(640, owner="a", timeout_s=30)
    waiting = await start(scheduler, 64, "b")
    with pytest.raises(CapacityExceeded, match="1 requests wait") as caught:
        await scheduler.reserve(64, owner="c", timeout_s=30)
    assert caught.value.reason == "queue_full"
    waiting.cancel()


async def test_without_a_wait_a_full_arena_refuses_at_once():
    _, scheduler = make(admission_wait_s=0)
    await scheduler.reserve(640, owner="a", timeout_s=30)
    with pytest.raises(CapacityExceeded) as caught:
        await scheduler.reserve(64, owner="b", timeout_s=30)
    assert caught.value.reason == "arena_full"
    assert scheduler.num_waiting == 0


async def test_what_can_never_fit_is_an_invalid_request_even_behind_a_line():
    _, scheduler = make()
    await scheduler.reserve(640, owner="a", timeout_s=30)
    waiting = await start(scheduler, 64, "b")
    with pytest.raises(InvalidRequest, match=r"needs 704 bytes.*arena has 640"):
        await scheduler.reserve(641, owner="c", timeout_s=30)
    waiting.cancel()


async def test_cancelling_a_request_whose_bytes_were_just_granted_gives_them_back():
    arena, scheduler = make()
    held = await scheduler.reserve(640, owner="a", timeout_s=30)
    waiting = await start(scheduler, 640, "b")
    scheduler.release(held)  # grants to b, whose task has not run since
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert arena.free_bytes == 640
    arena.check_integrity()


async def line_up(scheduler, key_owner, number):
    """Requests of one API key, in line; their numbers are their owners' names."""
    names = [f"{key_owner}{index}" for index in range(number)]
    return [await start(scheduler, 640, name, key_owner=key_owner) for name in names]


async def test_owners_of_keys_take_turns():
    _, scheduler = make()
    held = await scheduler.reserve(640, owner="first", timeout_s=30)
    tasks = [*await line_up(scheduler, "greedy", 4), *await line_up(scheduler, "polite", 2)]
    order = []
    while tasks:
        scheduler.release(held)
        done, _ = await asyncio.wait(tasks, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        (task,) = done
        tasks.remove(task)
        held = task.result()
        order.append(held.owner)
    assert order == ["greedy0", "polite0", "greedy1", "polite1", "greedy2", "greedy3"]


async def test_a_key_that_was_away_does_not_wait_for_two_requests_of_one_that_was_not():
    _, scheduler = make()
    held = await scheduler.reserve(640, owner="first", key_owner="greedy", timeout_s=30)
    greedy = await line_up(scheduler, "greedy", 4)
    (polite,) = await line_up(scheduler, "polite", 1)
    scheduler.release(held)
    assert (await asyncio.wait_for(polite, 10)).owner == "polite0"
    assert not any(task.done() for task in greedy)
    scheduler.release(polite.result())
    assert (await asyncio.wait_for(greedy[0], 10)).owner == "greedy0"
    for task in greedy[1:]:
        task.cancel()


async def test_a_line_that_one_key_has_filled_takes_another_keys_requests():
    _, scheduler = make(max_waiting=4)
    held = await scheduler.reserve(640, owner="first", timeout_s=30)
    greedy = await line_up(scheduler, "greedy", 4)
    polite = await line_up(scheduler, "polite", 2)
    assert scheduler.num_waiting == 4
    for refused in (greedy[3], greedy[2]):
        with pytest.raises(CapacityExceeded) as caught:
            await asyncio.wait_for(refused, 10)
        assert caught.value.reason == "queue_full"
    assert not any(task.done() for task in polite)
    with pytest.raises(CapacityExceeded):  # it has as many as the others
        await scheduler.reserve(640, owner="x", key_owner="greedy", timeout_s=30)
    for task in (greedy[0], polite[0], greedy[1], polite[1]):
        scheduler.release(held)
        held = await asyncio.wait_for(task, 10)
