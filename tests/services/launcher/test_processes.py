"""How the processors of the machine are divided."""

from __future__ import annotations

import pytest

from kvferry.services.launcher.processes import divide_threads, usable_cpus


@pytest.mark.parametrize(("num_cpus", "expected"), [(1, (1, 1)), (2, (1, 1)), (4, (3, 1)), (16, (11, 5))])
def test_prefill_gets_the_larger_share_and_both_get_one(num_cpus: int, expected: tuple[int, int]) -> None:
    assert divide_threads(0, num_cpus) == expected


def test_a_request_holds_for_each() -> None:
    assert divide_threads(3, 2) == (3, 3)


def test_usable_cpus_is_at_least_one() -> None:
    assert usable_cpus() >= 1
