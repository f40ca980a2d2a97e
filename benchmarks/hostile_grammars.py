"""Random hostile grammars through the whole server: each must end soon, in an answer or an error by name.

    python benchmarks/hostile_grammars.py [--count 1000] [--seed 33] [--at-once 4] [--output FILE]

Serves a tiny random model with a byte-level tokenizer, its three services in processes of their own, and asks
it for answers of JSON schemas, regular expressions and grammars that are made to cost time, memory or stack
(`tests/helpers/kvtest/hostile_grammars.py`), in every API that takes them. Meanwhile another key's chats go
on, every other one with a small schema. Every request must end within 10 s: with an answer that has ended, or
with a 4xx whose message says why. No chat may fail or take longer, and no process may end. `--only 17,203`
asks for single requests again. The exit code is 1 after a violation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import httpx  # noqa: E402
from kvtest.hostile_grammars import MODEL, hostile_request  # noqa: E402
from kvtest.stack import Stack, serving  # noqa: E402
from kvtest.text_models import HERMES, make_text_model  # noqa: E402
from rich.progress import Progress  # noqa: E402

LIMIT_S, TIMEOUT_S = 10.0, 60.0
PAUSE_S = 0.1
ROLES = ("router", "prefill", "decode")
ENDED = {
    "stop",
    "length",
    "tool_calls",
    "completed",
    "incomplete",
    "end_turn",
    "max_tokens",
    "tool_use",
    "stop_sequence",
}
NUM_SLOWEST = 10


@dataclass
class Report:
    """What the requests and the chats got."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)
    chats_s: list[float] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def add(self, kind: str, status: str, **request: Any) -> None:
        self.counts.setdefault(kind, Counter())[status] += 1
        self.requests.append({"kind": kind, "status": status, **request})

    def as_json(self) -> dict[str, Any]:
        slowest = sorted(self.requests, key=lambda request: -request["seconds"])
        chats_s = sorted(self.chats_s)
        return {
            "requests": len(self.requests),
            "by_status": dict(sum(self.counts.values(), Counter())),
            "by_kind": {kind: dict(sorted(found.items())) for kind, found in sorted(self.counts.items())},
            "slowest": slowest[:NUM_SLOWEST],
            "chats": {
                "count": len(chats_s),
                "median_s": round(statistics.median(chats_s), 3) if chats_s else None,
                "slowest_s": round(chats_s[-1], 3) if chats_s else None,
            },
            "violations": self.violations,
        }


def problem_of(response: httpx.Response) -> str | None:
    """What is wrong with an answer."""
    status = response.status_code
    try:
        found = response.json()
    except ValueError:
        return f"{status} without JSON"
    if 400 <= status < 500:
        return None if found.get("error", {}).get("message") else f"{status} without a message"
    if status != 200:
        return f"{status}: {response.text[:300]}"
    ends = [found.get("stop_reason") or found.get("status")]
    if "choices" in found:
        ends = [choice["finish_reason"] for choice in found["choices"]]
    return None if ENDED.issuperset(ends) else f"200, and it ended with {ends}"


def ask(client: httpx.Client, number: int, seed: int, report: Report) -> None:
    request = hostile_request(seed, number)
    begin_s = time.perf_counter()
    try:
        response = client.post(request.path, content=request.body)
        status, problem = str(response.status_code), problem_of(response)
    except httpx.HTTPError as error:
        status, problem = type(error).__name__, repr(error)
    seconds = time.perf_counter() - begin_s
    if problem is None and seconds > LIMIT_S:
        problem = f"{status} after {seconds:.1f} s"
    if problem is not None:
        report.violations.append(f"{number} ({request.kind}, {request.path} {request.field}): {problem}")
        sys.stderr.write(f"{report.violations[-1]}\n")
    where = f"{request.path} {request.field}"
    report.add(request.kind, status, number=number, asked_by=where, seconds=round(seconds, 3))


def chat(client: httpx.Client, stop: threading.Event, report: Report) -> None:
    """Another key's chats, until the event is set."""
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    while not stop.wait(PAUSE_S):
        number, begin_s = len(report.chats_s), time.perf_counter()
        structure = {"guided_json": {"const": number}} if number % 2 else {}
        try:
            response = client.post("/v1/chat/completions", json=body | structure)
            problem = (
                None if response.status_code == 200 else f"{response.status_code}: {response.text[:300]}"
            )
        except httpx.HTTPError as error:
            problem = repr(error)
        report.chats_s.append(time.perf_counter() - begin_s)
        if problem is None and report.chats_s[-1] > LIMIT_S:
            problem = f"an answer after {report.chats_s[-1]:.1f} s"
        if problem is not None:
            report.violations.append(f"chat {number}: {problem}")


def rss_mib(pids: dict[str, str]) -> dict[str, float]:
    """Resident memory."""
    found = {}
    for role, pid in pids.items():
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
        found[role] = next(
            round(int(line.split()[1]) / 1024, 1) for line in lines if line.startswith("VmRSS")
        )
    return found


def pids_of(stack: Stack) -> dict[str, str]:
    """The services' process ids, which change where one is started again."""
    addresses = json.loads(stack.ready_path.read_text(encoding="utf-8"))
    return {role: addresses[f"{role}_pid"] for role in ROLES}


def run(stack: Stack, numbers: list[int], arguments: argparse.Namespace) -> dict[str, Any]:
    report, stop = Report(), threading.Event()

    def client(key: str) -> httpx.Client:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        return httpx.Client(base_url=stack.base_url, headers=headers, timeout=TIMEOUT_S, trust_env=False)

    with client("honest") as honest, client("hostile") as hostile, Progress() as bar:
        task = bar.add_task("requests", total=len(numbers))
        chats = threading.Thread(target=chat, args=(honest, stop, report))

        def ask_and_show(number: int) -> None:
            ask(hostile, number, arguments.seed, report)
            bar.advance(task)

        before, memory = pids_of(stack), rss_mib(pids_of(stack))
        chats.start()
        with ThreadPoolExecutor(arguments.at_once) as pool:
            list(pool.map(ask_and_show, numbers))
        stop.set()
        chats.join()
    after = pids_of(stack)
    restarted = [role for role in ROLES if after[role] != before[role]]
    report.violations += [f"the {role} process ended and was started again" for role in restarted]
    return {
        **report.as_json(),
        "restarts": len(restarted),
        "rss_mib": {"before": memory, "after": rss_mib(after)},
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=33)
    parser.add_argument("--at-once", type=int, default=4, help="requests under way")
    parser.add_argument("--only", default="", help="numbers of single requests")
    parser.add_argument("--output", type=Path, help="also write the result to this JSON file")
    arguments = parser.parse_args()
    numbers = [int(number) for number in arguments.only.split(",") if number] or list(range(arguments.count))
    with tempfile.TemporaryDirectory(prefix="kvferry-hostile-") as folder:
        make_text_model(Path(folder), template=HERMES)
        options = ["--model", folder, "--model-name", MODEL, "--threads", "1", "--api-keys", "hostile,honest"]
        with serving(*options) as stack:
            found = run(stack, numbers, arguments)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT
    ).stdout.strip()
    result = {
        "command": ["benchmarks/hostile_grammars.py", *sys.argv[1:]],
        "commit": commit,
        "seed": arguments.seed,
        **found,
    }
    text = json.dumps(result, indent=1) + "\n"
    sys.stdout.write(text)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text, encoding="utf-8")
    return int(bool(found["violations"]))


if __name__ == "__main__":
    sys.exit(main())
