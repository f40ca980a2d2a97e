"""A small run of the simulation of decode memory: no more is lost to fragmentation than its limit allows."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import fragmentation


@pytest.mark.parametrize("seed", [1, 2])
def test_under_mixed_load_little_memory_is_free_and_of_no_use(seed):
    found = fragmentation.simulate(num_requests=40, arena_bytes=3 << 20, seed=seed)
    assert found["mean_lost_share"] <= fragmentation.LIMIT
    # the load is heavy enough to tell: requests waited, and sequences were swapped out
    assert found["steps_with_a_waiting_request"] > 100
    assert found["swapped_to_the_host"] > 0
    assert found["mean_used_share_while_a_request_waits"] > 0.7
