"""What a request and a streamed token cost the router, by the number of workers and of stored sessions.

    python benchmarks/router_scale.py [--workers 1 4 16] [--sessions 100 10000 100000] [--rounds 5]
        [--requests 200] [--output FILE]

A real router process, simulated workers (`simulated_workers.py`) behind the real control protocol, and a
real Redis. `--workers` is of each role. CPU times are those of the router's process, and of Redis': a request
of few and one of many tokens give the costs of a request and of a token. Settings take turns in every round,
so that other work on the machine meets them alike, in the opposite order in every other round; figures are
medians over rounds. Every decode worker has as many streams as in the other settings, because the tokens of
its step travel in one message. Each request makes a new session, and the quota is checked, where there is a
Redis.

`streams`: 64 streams at the engines' pace, beside 64 streams of the same bytes at the same pace from a bare
uvicorn application: the time between tokens at the client, and the CPU time a token of either process; and
what gRPC alone takes to read a message of a token's size in a process that does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from kvtest.processes import started  # noqa: E402
from kvtest.redis_server import RedisServer  # noqa: E402

from kvferry.services.router.sessions.record import SessionRecord  # noqa: E402
from kvferry.services.router.sessions.redis_records import RedisRecords  # noqa: E402
from kvferry.shared.control.messages import SessionKey  # noqa: E402
from kvferry.shared.history.redis_client import AsyncRedisLink, RedisOptions  # noqa: E402
from kvferry.tools.evaluation.provenance import commit  # noqa: E402

FEW, MANY = 4, 68
"""Tokens of the two kinds of requests."""
STREAMS_PER_WORKER = 16
NUM_STREAMS = 64
PACE_S, STREAM_PACE_S = 0.002, 0.05
OWNER = hashlib.sha256(b"").hexdigest()
START_TIMEOUT_S = 120.0
EVENT_BYTES = 60
"""Of a token's message from decode, about."""
BARE = """
import asyncio, sys
tokens, pace_s, content = int(sys.argv[2]), float(sys.argv[3]), sys.argv[4].encode().ljust(220) + b"\\n\\n"
step = None
async def steps():
    global step
    while True:
        step = asyncio.Event()
        await asyncio.sleep(pace_s)
        step.set()
async def app(scope, receive, send):
    if scope["type"] != "http": return
    if step is None: app.steps = asyncio.create_task(steps()); await asyncio.sleep(0)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for _ in range(tokens):
        await step.wait()
        await send({"type": "http.response.body", "body": content, "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\\n\\n"})
import uvicorn
uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
"""  # noqa: E501
READER = """
import asyncio, json, sys, time
import grpc.aio
STREAMS, TOKENS, PACE_S, SIZE = map(float, sys.argv[2:])
async def messages(request, context):
    for _ in range(int(TOKENS)):
        await asyncio.sleep(PACE_S)
        await context.write(bytes(int(SIZE)))
class Handler(grpc.GenericRpcHandler):
    def service(self, details): return grpc.unary_stream_rpc_method_handler(messages)
async def serve():
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Handler(),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()
async def read(port):
    async def one(index):
        await asyncio.sleep(index * PACE_S / STREAMS)
        call = channel.unary_stream("/tokens/all")(b"")
        return sum([1 async for _ in call])
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        before_s = time.process_time()
        number = sum(await asyncio.gather(*map(one, range(int(STREAMS)))))
        print(json.dumps(1e3 * (time.process_time() - before_s) / number))
asyncio.run(serve() if sys.argv[1] == "serve" else read(int(sys.argv[1])))
"""


@dataclass
class Router:
    """A router's process, and the Redis behind it."""

    address: str
    pid: int
    at_once: int = STREAMS_PER_WORKER
    redis_pid: int = 0
    sent: int = 0
    cpu_s: dict[str, list[float]] = field(default_factory=dict)
    """Per round: `request`, `token`, `redis` a request."""

    async def measure(self, num_requests: int) -> None:
        """One round."""
        router_s, redis_s = [], []
        for num_tokens in (FEW, MANY):
            before = cpu_s(self.pid), cpu_s(self.redis_pid)
            await self._send(num_requests, num_tokens)
            router_s.append((cpu_s(self.pid) - before[0]) / num_requests)
            redis_s.append((cpu_s(self.redis_pid) - before[1]) / num_requests)
        token_s = (router_s[1] - router_s[0]) / (MANY - FEW)
        found = {"token": token_s, "request": router_s[0] - FEW * token_s, "redis": statistics.mean(redis_s)}
        for name, value in found.items():
            self.cpu_s.setdefault(name, []).append(value)

    async def _send(self, num_requests: int, num_tokens: int) -> None:
        queue = iter(range(num_requests))

        async def client() -> None:
            for _ in queue:
                self.sent += 1
                fields = {"session_id": f"new-{self.sent}"} if self.redis_pid else {}
                await stream(self.address, num_tokens, **fields)

        await asyncio.gather(*(client() for _ in range(self.at_once)))

    def medians(self) -> dict[str, Any]:
        return {f"{name}_cpu_ms": 1e3 * statistics.median(values) for name, values in self.cpu_s.items()} | {
            "rounds_cpu_s": self.cpu_s
        }


def cpu_s(pid: int) -> float:
    """CPU time of a process's threads; 0 without one."""
    if not pid:
        return 0.0
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


async def stream(address: str, num_tokens: int, **fields: Any) -> list[float]:
    """One streamed answer; returns when each token came."""
    arrivals_s, _ = await answer(address, num_tokens, **fields)
    return arrivals_s


async def answer(address: str, num_tokens: int, **fields: Any) -> tuple[list[float], dict[str, Any]]:
    """One streamed answer; returns when each token came, and the last chunk."""
    host, port = address.rsplit(":", 1)
    body = json.dumps(
        {
            "model": "demo", "prompt": [101, 102, 103], "stream": True, "temperature": 0,
            "max_tokens": num_tokens, "ignore_eos": True, **fields,
        }
    ).encode()  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.encode() + body)
    arrivals_s, done, last = [], False, b"{}"
    async for line in reader:
        if line.startswith(b"data: {"):
            arrivals_s.append(time.perf_counter())
            last = line[len(b"data: ") :]
        done = done or line.startswith(b"data: [DONE]")
    writer.close()
    if not done or len(arrivals_s) < num_tokens:
        raise RuntimeError(f"{len(arrivals_s)} tokens came of {num_tokens}; done: {done}")
    return arrivals_s[:num_tokens], json.loads(last)


@contextlib.contextmanager
def workers(folder: Path, number: int, pace_s: float, *more: str) -> Iterator[list[str]]:
    """The router's options for so many simulated workers of each role. Args: more: options of theirs."""
    ready = folder / f"workers-{number}-{pace_s}.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "simulated_workers.py")]
    options = ["--workers", str(number), "--pace-s", str(pace_s), "--ready-file", str(ready)]
    process = subprocess.Popen([*command, *options, *more], stdin=subprocess.PIPE)
    try:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError("the simulated workers do not listen")
            time.sleep(0.05)
        addresses = json.loads(ready.read_text())
        yield ["--prefill-workers", addresses["prefill"], "--decode-workers", addresses["decode"]]
    finally:
        process.kill()
        process.wait(30)


async def store_sessions(url: str, number: int) -> None:
    """Sessions of the key that the requests have: none is given, so it is that of everybody."""
    records = RedisRecords(
        AsyncRedisLink(RedisOptions(url=url, timeout_s=30.0)), clock=time.time, name="made"
    )
    record = SessionRecord(
        kind="text", model_fingerprint="feedc0de", token_ids=tuple(range(101, 165)), messages=(),
        assistant_ends=(), turns=1, last_plan={}, prefill_addresses=(), expires_at_s=time.time() + 86_400.0,
    )  # fmt: skip
    numbers = iter(range(number))

    async def put() -> None:
        for index in numbers:
            key = SessionKey(owner=OWNER, session_id=f"stored-{index}")
            await records.commit(key, "made.0", "", record)

    await asyncio.gather(*(put() for _ in range(50)))
    await records.close()


async def measure_all(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        by_workers, by_sessions = {}, {}
        for number in arguments.workers:
            found = stack.enter_context(workers(folder, number, PACE_S))
            by_workers[number] = start_router(stack, folder, f"router-w{number}", found)
            by_workers[number].at_once *= number
        found = stack.enter_context(workers(folder, 2, PACE_S))
        for number in arguments.sessions:
            redis = stack.enter_context(RedisServer.running())
            await store_sessions(redis.url, number)
            options = ["--history-redis", redis.url, "--max-sessions-per-key", "10000000"]
            options += ["--max-history-tokens-per-key", "1000000000000"]
            router = start_router(stack, folder, f"router-s{number}", [*found, *options])
            router.at_once *= 2
            router.redis_pid = redis.pid
            by_sessions[number] = router
        every = (*by_workers.values(), *by_sessions.values())
        for router in every:  # warms up
            await router._send(router.at_once, FEW)
        for index in range(arguments.rounds):
            for router in every[:: -1 if index % 2 else 1]:
                await router.measure(arguments.requests)
    return {
        "workers": {number: router.medians() for number, router in by_workers.items()},
        "sessions": {number: router.medians() for number, router in by_sessions.items()},
    }


def start_router(stack: contextlib.ExitStack, folder: Path, name: str, options: Sequence[str]) -> Router:
    always = ["--listen", "127.0.0.1:0", "--implicit-sessions", "0", "--log-level", "warning"]
    process = stack.enter_context(started(folder, name, *always, *options))()
    return Router(address=process.addresses["address"], pid=process.popen.pid)


async def measure_streams(folder: Path, rounds: int, num_tokens: int) -> dict[str, Any]:
    """64 streams through a router and from bare uvicorn, in turn."""
    from kvtest.ports import free_port

    figures: dict[str, dict[str, list[float]]] = {
        name: {"gap_ms": [], "cpu_ms_per_token": []} for name in ("router", "bare")
    }
    with contextlib.ExitStack() as stack:
        router = start_router(
            stack, folder, "router-streams", stack.enter_context(workers(folder, 1, STREAM_PACE_S))
        )
        port = free_port()
        sizes = [str(size) for size in (port, num_tokens, STREAM_PACE_S)]
        bare = subprocess.Popen([sys.executable, "-c", BARE, *sizes, 'data: {"choices": []}'])
        stack.callback(bare.wait, 30)
        stack.callback(bare.kill)
        targets = {"router": (router.address, router.pid), "bare": (f"127.0.0.1:{port}", bare.pid)}
        for address, _ in targets.values():
            for _ in range(100):
                with contextlib.suppress(OSError):
                    await stream(address, num_tokens)
                    break
                await asyncio.sleep(0.1)
        for _ in range(rounds):
            for name, (address, pid) in targets.items():
                before_s = cpu_s(pid)

                async def late(index: int, address: str = address) -> list[float]:
                    await asyncio.sleep(index * STREAM_PACE_S / NUM_STREAMS)
                    return await stream(address, num_tokens)

                came = await asyncio.gather(*(late(index) for index in range(NUM_STREAMS)))
                gaps_s = [b - a for times_s in came for a, b in itertools.pairwise(times_s)]
                figures[name]["gap_ms"].append(1e3 * statistics.median(gaps_s))
                used_s = cpu_s(pid) - before_s
                figures[name]["cpu_ms_per_token"].append(1e3 * used_s / (NUM_STREAMS * num_tokens))
    medians = {
        name: {figure: statistics.median(values) for figure, values in by_figure.items()}
        for name, by_figure in figures.items()
    }
    reading_ms = [read_alone(num_tokens) for _ in range(rounds)]
    added = {
        figure: medians["router"][figure] - medians["bare"][figure]
        for figure in ("gap_ms", "cpu_ms_per_token")
    }
    return {
        "medians": medians,
        "added": added,
        "grpc_read_cpu_ms_per_token": statistics.median(reading_ms),
        "rounds": figures | {"grpc_read_cpu_ms_per_token": reading_ms},
    }


def read_alone(num_tokens: int) -> float:
    """CPU milliseconds that a process takes to read one message of 64 gRPC streams, and nothing else."""
    script = [sys.executable, "-c", READER]
    sizes = [str(size) for size in (NUM_STREAMS, num_tokens, STREAM_PACE_S, EVENT_BYTES)]
    with subprocess.Popen([*script, "serve", *sizes], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            done = subprocess.run(
                [*script, port, *sizes], capture_output=True, text=True, check=True, timeout=START_TIMEOUT_S
            )
        finally:
            server.kill()
    return float(done.stdout)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 4, 16], help="of each role")
    parser.add_argument("--sessions", type=int, nargs="*", default=[100, 10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=200, help="of each kind in a round")
    parser.add_argument("--stream-tokens", type=int, default=150, help="of each of the 64 streams")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvferry-scale-") as folder:
        results = await measure_all(arguments, Path(folder))
        results["streams"] = await measure_streams(Path(folder), arguments.rounds, arguments.stream_tokens)
    for kind in ("workers", "sessions"):
        for number, figures in results[kind].items():
            costs = ", ".join(
                f"{name.removesuffix('_cpu_ms')} {value:.3f}"
                for name, value in figures.items()
                if "ms" in name
            )
            sys.stdout.write(f"{number} {kind}: CPU ms a {costs}\n")
    added = results["streams"]["added"]
    sys.stdout.write(
        f"{NUM_STREAMS} streams: a token adds {added['cpu_ms_per_token']:.3f} ms of CPU to bare uvicorn's "
        f"and {added['gap_ms']:.3f} ms to the median time between tokens; gRPC alone takes "
        f"{results['streams']['grpc_read_cpu_ms_per_token']:.3f} ms to read one\n"
    )
    if arguments.output:
        about = {"command": sys.argv, "commit": commit(), "cores": os.cpu_count()}
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps({**about, **results}, indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
