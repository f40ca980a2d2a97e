"""`kvferry bench`, from its options to its table and files.

OUT/results.json     options, commit, machine; each server's runs and their median
OUT/requests.jsonl   each request: when it was due, its first and last token, its end
OUT/*.png            with --plots
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvferry.shared.errors import KvferryError
from kvferry.shared.process.version import VERSION
from kvferry.tools.bench import plots
from kvferry.tools.bench.config import BenchConfig
from kvferry.tools.bench.load import Load, make_load, parse_mix
from kvferry.tools.bench.prompts import PromptMaker
from kvferry.tools.bench.runner import Run
from kvferry.tools.bench.sample import Sample
from kvferry.tools.bench.server import Server
from kvferry.tools.bench.summary import Figures, median_of, summarise
from kvferry.tools.evaluation.provenance import commit

_LATENCIES = {
    "first_token_ms": "first token",
    "per_token_ms": "per token",
    "between_tokens_ms": "between tokens",
    "total_ms": "total",
}


async def bench(config: BenchConfig, *, console: Console | None = None) -> int:
    """Run the load on each server, print a table, write the files. Returns the exit code: 1 if no request was
    complete.

    Raises:
        ConfigurationError: an option is wrong, or --plots finds no matplotlib.
        KvferryError: a server cannot be reached.
    """
    if config.plots:
        # Imports torch, which a client without plots does not wait for.
        from kvferry.tools.evaluation.plots import check_available

        check_available()
    prompts = PromptMaker(config.bench_tokenizer)
    parse_mix(config.mix)
    console = console or Console(highlight=False)
    samples: dict[str, list[list[Sample]]] = {}
    figures: dict[str, list[Figures]] = {}
    async with contextlib.AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(
                Server.connect("url", config.url, config.api_key, config.chat_model, config)
            )
        ]
        if config.beside:
            other = Server.connect(
                "beside", config.beside, config.beside_api_key, config.beside_model, config
            )
            servers.append(await stack.enter_async_context(other))
        with _progress(console) as progress:
            await _warm_up(servers, config, prompts)
            order = random.Random(config.seed)
            for run in range(config.repeats):
                load = make_load(config, prompts, run)
                # In a new order each time, so that other work on the machine slows all of them.
                for server in order.sample(servers, len(servers)):
                    found, cpu_s = await _run(server, load, config, progress, run)
                    samples.setdefault(server.name, []).append(found)
                    figures.setdefault(server.name, []).append(summarise(found, config, client_cpu_s=cpu_s))
    described: dict[str, dict[str, Any]] = {
        server.name: {
            "model": server.model,
            "is_kvferry": server.is_kvferry,
            "runs": figures[server.name],
            "median": median_of(figures[server.name]),
        }
        for server in servers
    }
    console.print(_table({name: entry["median"] for name, entry in described.items()}, config))
    for name, entry in described.items():
        for category, said in entry["median"]["first_errors"].items():
            console.print(f"{name}: {category}: {said}", style="red", markup=False)
    if config.out:
        _write(config, described, samples)
        console.print(f"written to {config.out}", markup=False)
    return 0 if all(entry["median"]["complete"] for entry in described.values()) else 1


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        # Drawing takes processor time from the servers.
        refresh_per_second=2,
    )


async def _warm_up(servers: list[Server], config: BenchConfig, prompts: PromptMaker) -> None:
    """Warm up the servers. Raises: KvferryError: a server answers none of the load's requests."""
    if not config.warmup:
        return
    for server in servers:
        for kind in parse_mix(config.mix):
            changed = {"mix": kind.name, "conversations": config.warmup, "turns": 1, "cancel": 0.0}
            fewer = config.model_copy(update={**changed, "arrivals": "closed", "documents": 0})
            run = Run(server, make_load(fewer, prompts, -1), fewer, lambda: None)
            await run.run()
            errors = [sample.error for sample in run.samples if sample.error is not None]
            if len(errors) == len(run.samples):
                raise KvferryError(f"{server.name} failed at {kind.name}: {': '.join(errors[0])}")


async def _run(
    server: Server, load: Load, config: BenchConfig, progress: Progress, number: int
) -> tuple[list[Sample], float]:
    """Make one run; return its samples, and the processor time that this process took."""
    title = f"{server.name}, run {number + 1} of {config.repeats}"
    task = progress.add_task(title, total=load.num_requests)
    run = Run(server, load, config, lambda: progress.advance(task))
    began_s = time.process_time()
    await run.run()
    cpu_s = time.process_time() - began_s
    progress.remove_task(task)
    return run.samples, cpu_s


def _table(medians: Mapping[str, Figures], config: BenchConfig) -> Table:
    """Make a table: a row a figure, a column a server; with two, also the first one's ratio to the second."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in medians:
        table.add_column({"url": config.url, "beside": config.beside}[name], justify="right")
    if len(medians) > 1:
        table.add_column("ratio", justify="right")

    def row(title: str, values: list[float | None], form: str) -> None:
        cells = ["" if value is None else format(value, form) for value in values]
        if len(values) > 1:
            first, second = values
            cells.append(f"{first / second:.2f}" if first and second else "")
        table.add_row(title, *cells)

    def add(title: str, *path: str, form: str = ".1f", scale: float = 1.0) -> None:
        found = [_at(figures, path) for figures in medians.values()]
        if any(value is not None for value in found):
            row(title, [None if value is None else scale * value for value in found], form)

    add("complete requests", "complete", form=".0f")
    add("cancelled", "cancelled", form=".0f")
    row("failed", [float(sum(figures["failed"].values())) for figures in medians.values()], ".0f")
    add("duration, s", "duration_s")
    add("requests a second", "requests_per_s", form=".2f")
    add("output tokens a second", "output_tokens_per_s")
    add("good requests a second", "good_requests_per_s", form=".2f")
    add("good, % of requests", "good_share", scale=100)
    for name, title in _LATENCIES.items():
        for part in ("p50", "p90", "p99"):
            add(f"{title} {part}, ms", name, part)
    add("shipped, MB", "kv", "shipped_bytes", scale=1e-6)
    add("full KV, MB", "kv", "full_bytes", scale=1e-6)
    add("reused tokens", "kv", "reused_tokens", form=".0f")
    add("client's CPU, %", "client", "cpu_share", scale=100)
    return table


def _at(figures: Figures, path: tuple[str, ...]) -> float | None:
    found: Any = figures
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return None if found is None else float(found)


def _write(
    config: BenchConfig, servers: Mapping[str, Any], samples: Mapping[str, list[list[Sample]]]
) -> None:
    folder = Path(config.out)
    folder.mkdir(parents=True, exist_ok=True)
    options = config.model_dump(exclude={"api_key", "beside_api_key", "out", "plots"})
    result = {"kvferry": VERSION, "commit": commit(), "options": options, "servers": servers}
    (folder / "results.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    with (folder / "requests.jsonl").open("w", encoding="utf-8") as file:
        for name, runs in samples.items():
            for number, run in enumerate(runs):
                for sample in run:
                    line = {"server": name, "run": number, **sample.record()}
                    file.write(json.dumps(line) + "\n")
    if config.plots:
        together = {name: [sample for run in runs for sample in run] for name, runs in samples.items()}
        plots.draw(together, config, folder)
