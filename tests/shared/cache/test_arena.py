"""The arena hands out disjoint ranges, gives back exactly, and its states always sum to its size."""

import itertools
import threading

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvferry.shared.cache.arena import ByteArena
from kvferry.shared.errors import CapacityExceeded, InvalidRequest, KvferryError

CPU = torch.device("cpu")


def make_arena(size_bytes):
    return ByteArena(size_bytes, CPU)


class ArenaMachine(RuleBasedStateMachine):
    """Any order of reserving, advancing and freeing keeps the arena whole and bytes apart."""

    allocations = Bundle("allocations")

    def __init__(self):
        super().__init__()
        self.arena = make_arena(64 * 40)
        self.numbers = itertools.count()
        self.marks = {}

    @rule(target=allocations, size_bytes=st.integers(1, 64 * 12))
    def reserve(self, size_bytes):
        try:
            allocation = self.arena.reserve(size_bytes, owner="r")
        except CapacityExceeded:
            needed = -(-size_bytes // 64) * 64
            held = sorted((a.offset, a.size_bytes) for a in self.marks)
            ends = [0] + [o + s for o, s in held]
            starts = [o for o, _ in held] + [self.arena.size_bytes]
            assert max(b - a for a, b in zip(ends, starts, strict=True)) < needed
            return None
        assert allocation.size_bytes >= size_bytes
        mark = next(self.numbers) % 251
        self.arena.buffer(allocation).fill_(mark)
        self.marks[allocation] = mark
        return allocation

    @rule(allocation=allocations, state=st.sampled_from(["reserved", "in_transfer", "running"]))
    def advance(self, allocation, state):
        if allocation is None or allocation not in self.marks:
            return
        order = ["reserved", "in_transfer", "running"]
        current = self.arena.state(allocation)
        if order.index(state) == order.index(current) + 1:
            self.arena.advance(allocation, state)
            assert self.arena.state(allocation) == state
        else:
            with pytest.raises(KvferryError):
                self.arena.advance(allocation, state)
            assert self.arena.state(allocation) == current

    @rule(allocation=consumes(allocations))
    def free(self, allocation):
        if allocation is None:
            return
        before = self.arena.free_bytes
        self.arena.free(allocation)
        del self.marks[allocation]
        assert self.arena.free_bytes == before + allocation.size_bytes
        with pytest.raises(KvferryError, match="does not exist"):
            self.arena.free(allocation)

    @invariant()
    def whole(self):
        self.arena.check_integrity()
        assert sum(self.arena.bytes_by_state().values()) == self.arena.size_bytes
        for allocation, mark in self.marks.items():
            assert (self.arena.buffer(allocation) == mark).all()
        if not self.marks:
            assert self.arena.free_bytes == self.arena.size_bytes


ArenaMachine.TestCase.settings = settings(stateful_step_count=30)
TestArenaMachine = ArenaMachine.TestCase


def test_freed_neighbours_join_into_one_range_in_any_order():
    for order in [(0, 1, 2), (1, 0, 2), (2, 0, 1), (0, 2, 1)]:
        arena = make_arena(64 * 3)
        held = [arena.reserve(64, owner=str(i)) for i in range(3)]
        for i in order:
            arena.free(held[i])
        assert arena.reserve(64 * 3, owner="all").offset == 0


def test_reserving_takes_the_first_range_that_fits():
    arena = make_arena(64 * 10)
    held = [arena.reserve(64 * n, owner=str(n)) for n in (2, 1, 3, 1, 3)]
    arena.free(held[0])
    arena.free(held[2])
    assert arena.reserve(64 * 3, owner="x").offset == held[2].offset
    assert arena.reserve(64, owner="y").offset == 0


def test_a_full_arena_says_what_is_needed_and_what_is_free():
    arena = make_arena(256)
    arena.reserve(200, owner="a")
    with pytest.raises(CapacityExceeded, match=r"needs 64 bytes.*0 of 256") as caught:
        arena.reserve(1, owner="b")
    assert caught.value.reason == "arena_full"


def test_a_request_beyond_the_whole_arena_is_invalid():
    with pytest.raises(InvalidRequest, match=r"needs 320 bytes.*arena has 256"):
        make_arena(256).reserve(257, owner="a")


def test_an_older_generation_of_the_same_range_is_not_held():
    arena = make_arena(64)
    old = arena.reserve(64, owner="a")
    arena.free(old)
    new = arena.reserve(64, owner="a")
    assert new.generation == old.generation + 1
    for use in (arena.free, arena.buffer, arena.state, lambda a: arena.advance(a, "in_transfer")):
        with pytest.raises(KvferryError, match="does not exist"):
            use(old)
    assert arena.state(new) == "reserved"


def test_integrity_check_finds_an_overlap_and_a_wrong_count():
    arena = make_arena(256)
    arena.reserve(64, owner="a")
    arena._free[0] = (0, 192)
    with pytest.raises(KvferryError, match="does not follow"):
        arena.check_integrity()
    arena._free[0] = (64, 192)
    arena.check_integrity()
    arena._bytes["free"] += 64
    with pytest.raises(KvferryError, match="counts"):
        arena.check_integrity()


def test_threads_that_reserve_and_free_leave_the_arena_whole():
    arena = make_arena(64 * 64)
    errors = []

    def churn(seed):
        generator = torch.Generator().manual_seed(seed)
        try:
            for _ in range(100):
                size = int(torch.randint(1, 64 * 12, (1,), generator=generator))
                try:
                    allocation = arena.reserve(size, owner=str(seed))
                except CapacityExceeded:
                    continue
                arena.buffer(allocation).fill_(seed)
                arena.advance(allocation, "in_transfer")
                assert (arena.buffer(allocation) == seed).all()
                arena.free(allocation)
        except (AssertionError, KvferryError) as error:
            errors.append(error)

    threads = [threading.Thread(target=churn, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    arena.check_integrity()
    assert arena.free_bytes == arena.size_bytes
