"""Up to 1,000 workers and 10^6 sessions, simulated; and what grows with workers, sessions and turns, counted.

    python benchmarks/scale_simulation.py [--workers 16 100 300 1000] [--measured-s 20] [--output FOLDER]

`simulated_cluster.py` is the simulation; placement in it is the router's own. Service times come from
committed results: the router's and Redis' from `results/router-scale`, the wire's from `results/links`, and
the GPU's from `kvferry plan`'s model of a machine, which is modelled itself. So all times are modelled.

    counts      what the router's own code does for a request, by workers and by turns (`scale_counts.py`)
    checks      the real runs of `router_scale.py`, simulated with the costs of the smallest one: a ratio
                below 1 would be a cost that grows
    clusters    the real runs of `real_cluster.py`, likewise: queues, placement and several routers
    cells       clusters of each size with 1,000 sessions a worker, a tenth of the workers for prefill
    compared    one size, with other numbers of workers compared in a choice
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import real_cluster  # noqa: E402
from links import LATENCY_S, LLAMA  # noqa: E402
from scale_counts import counts  # noqa: E402
from simulated_cluster import Clock, Cluster, Costs, Load, Server  # noqa: E402

from kvferry.services.router.turn import worker_pool  # noqa: E402
from kvferry.shared.compression.plan import Budget  # noqa: E402
from kvferry.shared.compression.presets import plan_for  # noqa: E402
from kvferry.tools.evaluation.provenance import commit  # noqa: E402
from kvferry.tools.plan.machine import find_machine  # noqa: E402
from kvferry.tools.plan.sizes import sizes_of  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
MACHINE, GBITS, METHOD, TOKEN_BUDGET = "H100-SXM", 100.0, "rocketkv", 1024
CONTEXT, FIRST_TOKENS, FURTHER_TOKENS, ANSWER_TOKENS = 4096, 2000, 300, 256
SESSIONS_A_WORKER, THINK_S, NEW_SHARE = 1000, 300.0, 0.1
PREFILL_SHARE, MAX_BATCH, UTILISATION = 0.1, 64, 0.7
"""UTILISATION: at most, of routers and of masters of Redis."""
WARM_UP_S = 30.0
SIMULATED_S = 1200.0
"""Of a real cluster, for steady percentiles."""
COMPARED_WORKERS, COMPARED = 100, (1, 2, 8, 32, 10_000)
TURNS = (1, 10, 50, 100)


def measured(kind: str, number: str) -> dict[str, float]:
    """A setting's CPU seconds in `results/router-scale`."""
    setting = json.loads((RESULTS / "router-scale" / "scale.json").read_text())[kind][number]
    return {name: setting[f"{name}_cpu_ms"] / 1e3 for name in ("request", "token", "redis")}


def gpu_costs() -> Costs:
    """Of Llama-3.1-8B on the planned machine, with sessions in Redis."""
    machine, router = find_machine(MACHINE), measured("sessions", "100000")
    wire = max(json.loads((RESULTS / "links" / "links.json").read_text())["wire_s_per_byte"].values())
    plan = plan_for(METHOD, budget=Budget(tokens=TOKEN_BUDGET))
    sizes = sizes_of(LLAMA.spec, plan, num_prompt_tokens=CONTEXT, max_new_tokens=ANSWER_TOKENS)
    steps = [machine.step_s(LLAMA, plan, sizes, batch) for batch in range(MAX_BATCH + 1)]

    def link_s(has_rows: bool) -> float:
        new_share = (FURTHER_TOKENS + ANSWER_TOKENS) / CONTEXT if has_rows else 1.0
        return LATENCY_S + new_share * sizes.shipped * max(8e-9 / GBITS, wire)

    return Costs(
        request_s=router["request"],
        token_s=router["token"],
        redis_s=router["redis"],
        prefill_s=lambda new: machine.prefill_s(LLAMA, new) + machine.compress_s(plan, sizes, CONTEXT),
        transfer_s=lambda has_rows: machine.handover_s(plan, sizes) + link_s(has_rows),
        link_s=link_s,
        step_s=steps.__getitem__,
    )


async def cell(workers: int, costs: Costs, measured_s: float) -> dict[str, Any]:
    """One cluster."""
    random.seed(workers)
    sessions = SESSIONS_A_WORKER * workers
    rate = sessions / THINK_S
    prefill = max(2, round(PREFILL_SHARE * workers))
    router_s = costs.request_s + costs.token_s * ANSWER_TOKENS
    routers = max(2, math.ceil(rate * router_s / UTILISATION))
    masters = math.ceil(rate * costs.redis_s / UTILISATION)
    cluster = Cluster(
        costs,
        spec=LLAMA.spec,
        routers=routers,
        prefill=prefill,
        decode=workers - prefill,
        max_batch=MAX_BATCH,
        masters=masters,
    )
    began_s = time.process_time()
    await cluster.start()
    load = Load(
        rate=rate,
        sessions=sessions,
        new_share=NEW_SHARE,
        first_tokens=FIRST_TOKENS,
        further_tokens=FURTHER_TOKENS,
        answer_tokens=ANSWER_TOKENS,
    )
    figures = cluster.run(load, warm_up_s=WARM_UP_S, measured_s=measured_s)
    await cluster.close()
    cpu_s = [router.cpu.busy_s / measured_s for router in cluster.routers]
    redis_s = [master.busy_s / measured_s for master in cluster.masters]
    return {
        "workers": workers,
        "prefill": prefill,
        "decode": workers - prefill,
        "sessions": sessions,
        "routers": routers,
        "turns_per_s": round(figures.turns / measured_s, 1),
        "router_utilisation": round(statistics.mean(cpu_s), 3),
        "masters": masters,
        "redis_utilisation": round(statistics.mean(redis_s), 3),
        "first_token_ms": _percentiles(figures.first_token_s),
        "per_token_ms": _percentiles(figures.per_token_s),
        "at_their_prefill_worker": round(figures.at_their_worker / figures.turns, 3),
        "batch": {"mean": round(statistics.mean(figures.batches), 2), "most": max(figures.batches)},
        "simulation_cpu_s": round(time.process_time() - began_s, 1),
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {name: round(1e3 * ordered[int(share * len(ordered))], 3) for name, share in at.items()}


def check_costs(kind: str, base: str, number: str) -> dict[str, Any]:
    """One of the real runs, with the costs that the run `base` had."""
    costs, real = measured(kind, base), measured(kind, number)
    simulated = _closed_loop(costs)
    ratios = {name: round(simulated[name] / real[name], 3) for name in real if real[name]}
    return {"run": f"{number} {kind}", "costs_of": f"{base} {kind}", "simulated_over_measured": ratios}


def _closed_loop(costs: dict[str, float], clients: int = 32, requests: int = 240) -> dict[str, float]:
    """What `router_scale.py` measures: clients that each send one request after another."""
    busy: dict[int, tuple[float, float]] = {}
    few, many = 4, 68
    for num_tokens in (few, many):
        clock = Clock()
        router, redis, left = Server(clock), Server(clock), iter(range(requests))

        def client(
            num_tokens: int = num_tokens, clock: Clock = clock, parts: tuple[Any, ...] = (router, redis, left)
        ) -> None:
            cpu, store, queue = parts
            if next(queue, None) is None:
                return

            def token(number: int) -> None:
                if number == num_tokens:
                    client()
                else:
                    clock.at(
                        clock.now_s + 0.002, lambda: cpu.serve(costs["token"], lambda: token(number + 1))
                    )

            store.serve(costs["redis"], lambda: cpu.serve(costs["request"], lambda: token(0)))

        for _ in range(clients):
            client()
        clock.run(math.inf)
        busy[num_tokens] = router.busy_s / requests, redis.busy_s / requests
    token_s = (busy[many][0] - busy[few][0]) / (many - few)
    return {"token": token_s, "request": busy[few][0] - few * token_s, "redis": busy[few][1]}


def check_streams() -> dict[str, Any]:
    """64 streams at a pace: the median time between tokens, when each costs the router its measured CPU."""
    streams = json.loads((RESULTS / "router-scale" / "scale.json").read_text())["streams"]["medians"]
    clock, gaps, pace_s = Clock(), [], streams["bare"]["gap_ms"] / 1e3
    cpu = Server(clock)

    def token(last_s: float, left: int) -> None:
        def come() -> None:
            gaps.append(clock.now_s - last_s)
            if left:
                token(clock.now_s, left - 1)

        clock.at(clock.now_s + pace_s, lambda: cpu.serve(streams["router"]["cpu_ms_per_token"] / 1e3, come))

    for index in range(64):
        clock.at(index * pace_s / 64, lambda: token(clock.now_s, 150))
    clock.run(math.inf)
    ratio = 1e3 * statistics.median(gaps) / streams["router"]["gap_ms"]
    return {"run": "64 streams", "costs_of": "bare uvicorn's pace, the router's CPU a token",
            "simulated_over_measured": {"gap": round(ratio, 3)}}  # fmt: skip


async def check_cluster(run: dict[str, Any], costs_of: dict[str, Any], measured_s: float) -> dict[str, Any]:
    """One of the real clusters, with the CPU times that the run `costs_of` had."""
    first, further = real_cluster.FIRST_TOKENS, real_cluster.FURTHER_TOKENS
    costs = Costs(
        request_s=costs_of["router_cpu_ms"] / 1e3,
        token_s=0.0,
        redis_s=costs_of["redis_cpu_ms"] / 1e3,
        prefill_s=lambda new: real_cluster.STORED_S if new == further else real_cluster.WHOLE_S,
        transfer_s=lambda has_rows: 0.0,
        link_s=lambda has_rows: 0.0,
        step_s=lambda batch: real_cluster.PACE_S,
    )
    random.seed(run["workers"])
    number = run["workers"]
    cluster = Cluster(
        costs, spec=LLAMA.spec, routers=run["routers"], prefill=number, decode=number, max_batch=MAX_BATCH
    )
    await cluster.start()
    load = Load(
        rate=run["rate"],
        sessions=real_cluster.SESSIONS_A_WORKER * number,
        new_share=real_cluster.NEW_SHARE,
        first_tokens=first,
        further_tokens=further,
        answer_tokens=real_cluster.ANSWER_TOKENS,
    )
    found = cluster.run(load, warm_up_s=real_cluster.WARM_UP_S, measured_s=measured_s)
    await cluster.close()
    pairs = {
        f"{name}_{share}": (of_simulated, _percentiles(run[f"{name}_s"])[share])
        for name, values in (("first_token", found.first_token_s), ("per_token", found.per_token_s))
        for share, of_simulated in _percentiles(values).items()
    }
    pairs["at_their_prefill_worker"] = found.at_their_worker / found.turns, run["at_their_prefill_worker"]
    for name in ("router_cpu_ms", "redis_cpu_ms"):
        pairs[name] = costs_of[name], run[name]
    return {
        "run": f"{run['routers']} routers, {number} workers of each role",
        "turns": run["turns"],
        "measured": {name: round(measured, 3) for name, (_, measured) in pairs.items()},
        "simulated_over_measured": {name: round(a / b, 3) for name, (a, b) in pairs.items()},
    }


async def check_clusters() -> list[dict[str, Any]]:
    """The real runs with queues, which `real_cluster.py` wrote."""
    runs = json.loads((RESULTS / "scale-simulation" / "real.json").read_text())["runs"]
    return [await check_cluster(run, runs[0], SIMULATED_S) for run in runs]


def draw(result: dict[str, Any], folder: Path) -> None:
    """Write `scale.png`. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 3.6), layout="constrained")
    times, counted, bytes_ = figure.subplots(1, 3)
    cells, by_workers, by_turns = (
        result["cells"],
        result["counts"]["by_workers"],
        result["counts"]["by_turns"],
    )
    workers = [row["workers"] for row in cells]
    for name, label in (("first_token_ms", "first token"), ("per_token_ms", "a further token")):
        for share, line in (("p50", "-"), ("p99", "--")):
            times.plot(
                workers, [row[name][share] for row in cells], line, marker="o", label=f"{label}, {share}"
            )
    times.set(title="Times (modelled)", xlabel="workers", ylabel="ms", xscale="log", yscale="log")
    for name in ("looked_at_per_choice", "asked_for_a_prefix", "told_of_an_expired_session"):
        label = name.replace("_", " ")
        counted.plot(
            [row["workers"] for row in by_workers], [row[name] for row in by_workers], marker="o", label=label
        )
    counted.set(title="Workers met (counted)", xlabel="workers of each role", xscale="log", ylim=(0, 20))
    for name in ("record", "commit", "read_by_its_router", "read_by_another_router"):
        bytes_.plot(
            [row["turns"] for row in by_turns],
            [row[name] for row in by_turns],
            marker="o",
            label=name.replace("_", " "),
        )
    bytes_.set(title="A record's bytes (counted)", xlabel="turns", yscale="log")
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(folder / "scale.png", dpi=110)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 100, 300, 1000])
    parser.add_argument("--measured-s", type=float, default=20.0, help="virtual seconds of each cell")
    parser.add_argument("--output", type=Path, help="a folder for scale.json and scale.png")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    costs = gpu_costs()
    checks = [check_costs("workers", "1", number) for number in ("1", "4", "16")]
    checks += [check_costs("sessions", "100", number) for number in ("100", "10000", "100000")]
    checks.append(check_streams())
    for check in checks:
        ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in check["simulated_over_measured"].items())
        sys.stdout.write(f"{check['run']}: simulated / measured: {ratios}\n")
    clusters = await check_clusters()
    sys.stdout.writelines(f"{cluster}\n" for cluster in clusters)
    result: dict[str, Any] = {
        "command": sys.argv,
        "commit": commit(),
        "all_times_are": "modelled",
        "checks": checks,
        "clusters": clusters,
        "counts": await counts(LLAMA.spec, arguments.workers, list(TURNS)),
        "cells": [],
        "compared": [],
    }
    for kind in result["counts"].values():
        sys.stdout.writelines(f"counted: {row}\n" for row in kind)
    for workers in arguments.workers:
        result["cells"].append(await cell(workers, costs, arguments.measured_s))
        sys.stdout.write(f"modelled: {result['cells'][-1]}\n")
    if COMPARED_WORKERS in arguments.workers:
        usual = worker_pool.NUM_COMPARED
        for number in COMPARED:
            worker_pool.NUM_COMPARED = number
            found = await cell(COMPARED_WORKERS, costs, arguments.measured_s)
            result["compared"].append({"compared": number, **found})
            sys.stdout.write(f"modelled, {number} compared: {result['compared'][-1]}\n")
        worker_pool.NUM_COMPARED = usual
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "scale.json").write_text(json.dumps(result, indent=1) + "\n")
        draw(result, arguments.output)


if __name__ == "__main__":
    asyncio.run(main())
