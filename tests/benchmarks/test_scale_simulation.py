"""The simulated cluster agrees with sums by hand, and what a request costs is the same with more workers."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvtest.benchmarks import run_benchmark
from kvtest.router import SPEC

ROOT = Path(__file__).parents[2]
BENCHMARKS = str(ROOT / "benchmarks")


@pytest.fixture(autouse=True)
def _on_path() -> Iterator[None]:
    sys.path.insert(0, BENCHMARKS)
    yield
    sys.path.remove(BENCHMARKS)


def test_a_server_works_in_order_and_a_decode_batch_shares_its_steps() -> None:
    from simulated_cluster import Clock, DecodeWorker, Server

    clock, ends = Clock(), []
    server = Server(clock)
    worker = DecodeWorker(clock, "d", SPEC, lambda batch: float(batch), 2)
    for name in ("a", "b"):
        clock.at(1.0, lambda name=name: server.serve(2.0, lambda: ends.append((name, clock.now_s))))
    # x runs alone for two steps of a second, then with y in steps of two; z waits for a place.
    clock.at(0.0, lambda: worker.join(3, lambda: ends.append(("x", clock.now_s))))
    clock.at(2.0, lambda: worker.join(2, lambda: ends.append(("y", clock.now_s))))
    clock.at(2.0, lambda: worker.join(1, lambda: ends.append(("z", clock.now_s))))
    clock.run(3.5)
    assert (worker.running, worker.waiting) == (2, 1)
    clock.run(100.0)
    assert sorted(ends) == [("a", 3.0), ("b", 5.0), ("x", 4.0), ("y", 6.0), ("z", 6.0)]
    assert server.busy_s == 4.0


async def test_turns_of_an_idle_cluster_take_the_sum_of_their_parts() -> None:
    from simulated_cluster import Cluster, Costs, Load

    random.seed(7)
    costs = Costs(
        request_s=0.002,
        token_s=0.0001,
        redis_s=0.001,
        prefill_s=lambda tokens: tokens / 1000,
        transfer_s=lambda has_rows: 0.02,
        link_s=lambda has_rows: 0.01,
        step_s=lambda batch: 0.005 * batch,
    )
    cluster = Cluster(costs, spec=SPEC, routers=2, prefill=3, decode=3, max_batch=4)
    await cluster.start()
    load = Load(rate=0.2, sessions=50, new_share=0.0, first_tokens=500, further_tokens=100, answer_tokens=20)
    found = cluster.run(load, warm_up_s=10.0, measured_s=300.0)
    await cluster.close()
    assert found.turns > 30
    assert found.at_their_worker == found.turns
    first_s = (0.002 + 20 * 0.0001) / 2 + 0.001 / 2 + 0.1
    per_token_s = (0.02 + 19 * 0.005) / 19
    assert sorted(found.first_token_s)[found.turns // 2] == pytest.approx(first_s)
    assert sorted(found.per_token_s)[found.turns // 2] == pytest.approx(per_token_s)
    assert cluster.masters[0].busy_s == pytest.approx(0.001 * found.turns, rel=0.1)


async def test_what_a_request_makes_the_router_do_does_not_grow_with_the_workers() -> None:
    from scale_counts import counts_by_workers

    few, many = [await counts_by_workers(number, SPEC) for number in (20, 60)]
    flat = ("looked_at_per_choice", "asked_for_a_prefix", "told_of_an_expired_session")
    assert {name: few[name] for name in flat} == {name: many[name] for name in flat}
    assert [few[name] for name in flat] == [8, 8, 2]
    assert (few["told_of_a_deleted_session"], many["told_of_a_deleted_session"]) == (40, 120)


def test_real_runs_are_simulated_within_a_third() -> None:
    """The committed runs, with the costs of the smallest: a ratio below 1 is a cost that grows.

    More workers have more streams, of which the router reads more at a time, so a token costs it less there.
    """
    from scale_simulation import check_costs, check_streams

    workers: list[dict[str, Any]] = [check_costs("workers", "1", number) for number in ("1", "4", "16")]
    sessions = [check_costs("sessions", "100", number) for number in ("10000", "100000")]
    for check in (*workers, *sessions, check_streams()):
        ratios = check["simulated_over_measured"]
        assert min(ratios.values()) > 0.75, check
        assert check in workers or max(ratios.values()) < 1.33, check
    assert workers[0]["simulated_over_measured"] == {"request": 1.0, "token": 1.0}


async def test_real_clusters_with_queues_are_simulated_within_a_quarter() -> None:
    """The committed runs, of up to 16 workers of each role behind three routers."""
    from scale_simulation import RESULTS, check_clusters

    found = await check_clusters()
    committed = json.loads((RESULTS / "scale-simulation" / "scale.json").read_text())["clusters"]
    assert found == committed
    assert [cluster["run"] for cluster in found][-1] == "3 routers, 16 workers of each role"
    for cluster in found:
        ratios = cluster["simulated_over_measured"]
        for name in ("first_token_p50", "first_token_p90", "per_token_p50", "at_their_prefill_worker"):
            assert 0.8 < ratios[name] < 1.25, cluster
        assert 0.75 < ratios["router_cpu_ms"] < 1.33, cluster


@pytest.mark.full
async def test_a_real_cluster_of_two_routers_is_measured_and_simulated(tmp_path: Path) -> None:
    from scale_simulation import check_cluster

    output = tmp_path / "real.json"
    run_benchmark("real_cluster.py", "--clusters", "2x2", "--measured-s", "6", "--output", output)
    (run,) = json.loads(output.read_text())["runs"]
    assert len(run["first_token_s"]) == len(run["per_token_s"]) == run["turns"] > 3
    assert min(run["first_token_s"]) > 0.5  # what prefill takes at least
    assert run["at_their_prefill_worker"] > 0.5
    assert run["router_cpu_ms"] > 0 < run["redis_cpu_ms"]
    found = await check_cluster(run, run, 600.0)
    ratios = found["simulated_over_measured"]
    assert (ratios["router_cpu_ms"], ratios["redis_cpu_ms"]) == (1.0, 1.0)
    assert 0.5 < ratios["per_token_p50"] < 1.1
