"""What idle connections cost a router: memory, descriptors, and the requests of others.

    python benchmarks/idle_connections.py [--count 2000] [--output FILE]

A real router with a prefill and a decode worker. `--count` connections of each kind are opened to it and left
alone: `silent` ones have sent nothing, `kept` ones have had an answer, and those after a `refused` request
have sent 100 kB that were refused. Memory is the router's resident set, before and while they are open, and
again with as many after the first have gone. CPU time is that of the router for the same chats with and
without them.
"""

from __future__ import annotations

import argparse
import json
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import httpx  # noqa: E402
from kvtest.processes import START_TIMEOUT_S, Process, started  # noqa: E402

NUM_CHATS = 30
REFUSED_BYTES = 100_000
OTHER_FILES = 256
SETTLE_TIMEOUT_S = 20.0
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "the red castle ."}], "max_tokens": 2}


def post(body: bytes) -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


KINDS: dict[str, bytes] = {
    "silent": b"",
    "kept": b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "refused": post(json.dumps({"model": "demo", "prompt": "a" * REFUSED_BYTES, "max_tokens": 0}).encode()),
}
"""What each connection has sent before it is idle."""


class Router:
    """The router under measurement."""

    def __init__(self, process: Process) -> None:
        self._pid = process.popen.pid
        self.host, _, port = process.addresses["address"].rpartition(":")
        self.port = int(port)
        self.url = f"http://{process.addresses['address']}"

    @property
    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self._pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    @property
    def num_descriptors(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self._pid}/fd").iterdir())

    @property
    def cpu_s(self) -> float:
        """CPU time of its threads."""
        tasks = Path(f"/proc/{self._pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def wait_for_descriptors(self, holds: Callable[[int], bool]) -> int:
        deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
        while not holds(count := self.num_descriptors):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the router has {count} descriptors after {SETTLE_TIMEOUT_S:.0f} s")
            time.sleep(0.05)
        return count

    def chats(self, client: httpx.Client) -> tuple[float, float]:
        """CPU time of the router and median wall time of one chat, in milliseconds."""
        took_s, before_s = [], self.cpu_s
        for _ in range(NUM_CHATS):
            begin_s = time.perf_counter()
            client.post("/v1/chat/completions", json=CHAT).raise_for_status()
            took_s.append(time.perf_counter() - begin_s)
        cpu_ms = 1000 * (self.cpu_s - before_s) / NUM_CHATS
        return round(cpu_ms, 2), round(1000 * statistics.median(took_s), 2)


@contextmanager
def connections(router: Router, count: int, sent: bytes) -> Iterator[None]:
    """So many connections, each idle after what it has sent was answered."""
    opened: list[socket.socket] = []
    try:
        for _ in range(count):
            opened.append(socket.create_connection((router.host, router.port), timeout=30))
            if sent:
                opened[-1].sendall(sent)
                if not opened[-1].recv(65_536).startswith(b"HTTP/1.1"):
                    raise RuntimeError("the router closed a connection")
        yield
    finally:
        for connection in opened:
            connection.close()


def measure(router: Router, count: int) -> dict[str, Any]:
    result: dict[str, Any] = {"connections": count, "kinds": {}}
    with httpx.Client(base_url=router.url, timeout=60, trust_env=False) as client:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while client.post("/v1/chat/completions", json=CHAT).status_code != 200:
            if time.monotonic() > deadline_s:
                raise TimeoutError("the router did not answer a first chat")
            time.sleep(0.1)
        router.chats(client)  # what is made once is made
        idle = router.num_descriptors
        for name, sent in KINDS.items():
            with connections(router, 50, sent):
                pass
            router.wait_for_descriptors(lambda n: n <= idle)
            cpu_ms, wall_ms = router.chats(client)
            resident = router.resident_bytes
            row: dict[str, Any] = {"chat_cpu_ms_without": cpu_ms, "chat_ms_without": wall_ms}
            with connections(router, count, sent):
                begun_s, cpu_s = time.monotonic(), router.cpu_s
                row["descriptors"] = router.wait_for_descriptors(lambda n: n >= idle + count) - idle
                row["resident_bytes_each"] = round((router.resident_bytes - resident) / count)
                time.sleep(1.0)
                busy = (router.cpu_s - cpu_s) / (time.monotonic() - begun_s)
                row["cpu_share_while_idle"] = round(busy, 4)
                row["chat_cpu_ms"], row["chat_ms"] = router.chats(client)
            row["descriptors_left"] = router.wait_for_descriptors(lambda n: n <= idle) - idle
            first = router.resident_bytes
            with connections(router, count, sent):
                router.wait_for_descriptors(lambda n: n >= idle + count)
            router.wait_for_descriptors(lambda n: n <= idle)
            row["growth_bytes_each_of_as_many_again"] = round((router.resident_bytes - first) / count)
            result["kinds"][name] = row
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = options.count + OTHER_FILES
    if hard not in (-1, resource.RLIM_INFINITY) and hard < needed:
        raise SystemExit(f"The limit of open files is {hard}; {options.count} connections need {needed}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with started(folder, "prefill") as prefill, started(folder, "decode") as decode:
            workers = [prefill().addresses["address"], decode().addresses["address"]]
            arguments = ["--listen", "127.0.0.1:0", "--prefill-workers", workers[0], "--decode-workers"]
            with started(folder, "router", *arguments, workers[1]) as router:
                result = measure(Router(router()), options.count)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT
    ).stdout.strip()
    result = {"commit": commit, **result}
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
