"""How long one request holds the router's event loop, over the largest and worst requests that may be sent.

    python benchmarks/loop_holds.py [--repeats 3] [--output FILE]

A real router, prefill and decode worker. In the router's process every callback of the event loop is timed by
the CPU time of the loop's thread, so that other work on the machine does not count; garbage collection in
that thread does. Each request is sent by itself; the longest callback while it was answered is its hold, and
of several repeats the largest is said. Beside it is how late a timer of the loop was at most, as another
client's request would have been: that includes waits for Python's lock, which other threads may have, and for
a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import httpx  # noqa: E402
from kvtest.processes import started  # noqa: E402

GOAL_S = 0.05
BODY_BYTES = 8 << 20
"""The default of --max-body-bytes."""
START_TIMEOUT_S = 180.0
USER = {"role": "user", "content": "the red castle ."}
TICK_S = 0.002


# ---- the router's process --------------------------------------------------------------------------------


def run_router(arguments: list[str], record: Path) -> None:
    """Be `kvferry router`; on SIGUSR1 write the longest callback since the last signal, what it was, and how
    late a timer was at most."""
    from kvferry.services.launcher.cli import main

    nothing: dict[str, Any] = {"held_s": 0.0, "callback": "", "late_s": 0.0}
    longest = dict(nothing)
    run = asyncio.Handle._run  # type: ignore[attr-defined]
    ticking: list[asyncio.AbstractEventLoop] = []

    def tick(loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        now_s = loop.time()
        longest["late_s"] = max(longest["late_s"], now_s - due_s)
        loop.call_later(TICK_S, tick, loop, now_s + TICK_S)

    def timed(handle: Any) -> None:
        if not ticking:
            ticking.append(asyncio.get_running_loop())
            ticking[0].call_later(TICK_S, tick, ticking[0], ticking[0].time() + TICK_S)
        begin_s = time.thread_time()
        run(handle)
        held_s = time.thread_time() - begin_s
        if held_s > longest["held_s"]:
            longest.update(held_s=held_s, callback=repr(handle)[:300])

    def write(*_: Any) -> None:
        partial = record.with_suffix(".part")
        partial.write_text(json.dumps(longest))
        os.replace(partial, record)
        longest.update(nothing)

    asyncio.Handle._run = timed  # type: ignore[attr-defined]
    signal.signal(signal.SIGUSR1, write)
    sys.argv = ["kvferry", "router", *arguments]
    main()


# ---- requests --------------------------------------------------------------------------------------------


def filled(unit: str, around: int = 300) -> str:
    """A text of the unit, as long as a body may be."""
    return unit * ((BODY_BYTES - around) // len(unit.encode()))


def many(item: Any, around: int = 600) -> list[Any]:
    """A list of the item, as long as a body may be."""
    return [item] * ((BODY_BYTES - around) // (len(json.dumps(item)) + 2))


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"model": "demo", "messages": [USER], "max_tokens": 2, **fields}


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def schema_of(num_fields: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"field_{n}": {"type": "string"} for n in range(num_fields)}}


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def requests(session: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Name, path and body of each. Args: session: an exported one."""
    words = "the red castle . "
    yield ("a first chat", *chat())
    short = {"model": "demo", "max_tokens": 2}
    yield "a first completion", "/v1/completions", {**short, "prompt": "the"}
    yield "a first response", "/v1/responses", {"model": "demo", "input": [USER], "max_output_tokens": 2}
    yield "a first message", "/v1/messages", {**short, "messages": [USER]}
    yield ("empty messages (S3)", *chat(messages=many({})))
    yield ("messages", *chat(messages=many({"role": "user", "content": "a"})))
    yield ("empty parts", *chat(messages=[{"role": "user", "content": many({})}]))
    yield ("parts", *chat(messages=[{"role": "user", "content": many({"type": "text", "text": "a"})}]))
    yield ("unknown fields", *chat(**{f"k{n}": 1 for n in range(500_000)}))
    yield ("one long text (S4)", *chat(messages=[{"role": "user", "content": filled(words)}]))
    yield ("one long word (S4)", *chat(messages=[{"role": "user", "content": filled("a")}]))
    yield ("escaped characters", *chat(messages=[{"role": "user", "content": filled("\\u00e9")}]))
    yield ("role markers", *chat(messages=[{"role": "user", "content": filled("<|im_start|>")}]))
    yield ("biases", *chat(logit_bias={str(n): 1 for n in range(500_000)}))
    yield ("stop strings", *chat(stop=many("a")))
    yield ("stop tokens", *chat(stop_token_ids=many(7)))
    yield ("tools", *chat(tools=many(tool("a", {"type": "object"}))))
    wide = [tool(f"f{n}", schema_of(1_500)) for n in range(100)]
    yield ("128 tools of large schemas", *chat(tools=wide))
    yield ("tool of a deep schema", *chat(tools=[tool("f", nested(90))], tool_choice="required"))
    listed = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema_of(150_000)}}
    yield ("a large schema", *chat(response_format=listed))
    enum = {"name": "s", "schema": {"enum": [f"word {n}" for n in range(400_000)]}}
    yield ("a schema of many values", *chat(response_format={"type": "json_schema", "json_schema": enum}))
    yield ("a long pattern", *chat(structured_outputs={"regex": filled("(a|b)")}))
    yield ("a long grammar", *chat(structured_outputs={"grammar": 'root ::= "' + filled("a") + '"'}))
    yield ("many choices", *chat(structured_outputs={"choice": [f"c{n}" for n in range(500_000)]}))
    yield ("template variables", *chat(chat_template_kwargs={f"k{n}": n for n in range(400_000)}))
    completions = "/v1/completions"
    base = {"model": "demo", "max_tokens": 2}
    yield "prompt of tokens", completions, {**base, "prompt": many(7)}
    yield "many prompts", completions, {**base, "prompt": many("a")}
    yield "a long prompt", completions, {**base, "prompt": filled(words)}
    item = {"role": "user", "content": "a"}
    yield (
        "items of a response",
        "/v1/responses",
        {"model": "demo", "input": many(item), "max_output_tokens": 2},
    )
    yield (
        "text of a response",
        "/v1/responses",
        {"model": "demo", "input": filled(words), "max_output_tokens": 2},
    )
    yield "blocks of a message", "/v1/messages", {
        **base, "messages": [{"role": "user", "content": many({"type": "text", "text": "a"})}]
    }  # fmt: skip
    yield "tokens to count", "/v1/messages/count_tokens", {
        "model": "demo", "messages": [{"role": "user", "content": filled(words)}]
    }  # fmt: skip
    yield "text to tokenize", "/tokenize", {"model": "demo", "prompt": filled(words)}
    yield "tokens to detokenize", "/detokenize", {"model": "demo", "tokens": many(7)}
    yield "a document", "/v1/documents", {"id": "d", "text": filled(words)}
    importing = "/v1/sessions/import?session_id=t"
    yield (
        "import with many messages",
        importing,
        {**session, "messages": many({"role": "user", "content": "a"})},
    )
    yield "import with many tokens", importing, {**session, "token_ids": many(7)}
    long = [{"role": "user", "content": filled(words, 20_000)}]
    yield "import with a long text", importing, {**session, "messages": long}
    # Just below the limit of values in a body (MAX_VALUES), of each kind.
    yield ("most messages", *chat(messages=[{"role": "user", "content": "a"}] * 5_400))
    yield (
        "most parts",
        *chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 5_400}]),
    )
    yield ("most fields of schemas", *chat(tools=[tool(f"f{n}", schema_of(60)) for n in range(128)]))
    most = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema_of(8_000)}}
    yield ("largest schema", *chat(response_format=most))
    yield ("most choices", *chat(structured_outputs={"choice": [f"c{n}" for n in range(16_000)]}))
    yield "most items", "/v1/responses", {"model": "demo", "input": [item] * 5_400, "max_output_tokens": 2}
    blocks = [{"type": "text", "text": "a"}] * 5_400
    yield "most blocks", "/v1/messages", {**base, "messages": [{"role": "user", "content": blocks}]}
    yield "most prompts", completions, {**base, "prompt": ["a"] * 16_000}
    yield (
        "most imported messages",
        importing,
        {**session, "messages": [{"role": "user", "content": "a"}] * 5_400},
    )
    yield "not JSON", "/v1/chat/completions", "[" * BODY_BYTES
    yield "deep lists", "/v1/chat/completions", "[" * (BODY_BYTES // 2) + "]" * (BODY_BYTES // 2)
    yield ("an ordinary request", *chat())


# ---- measuring -------------------------------------------------------------------------------------------


class Router:
    """The router under measurement."""

    def __init__(self, popen: subprocess.Popen[bytes], url: str, record: Path) -> None:
        self._popen, self.url, self._record = popen, url, record

    def longest(self) -> dict[str, Any]:
        """The longest callback since the last call."""
        # The callback that wrote an answer goes on after it; the next request is read when it has ended.
        httpx.get(f"{self.url}/health", timeout=120).raise_for_status()
        self._record.unlink(missing_ok=True)
        os.kill(self._popen.pid, signal.SIGUSR1)
        deadline_s = time.monotonic() + 60
        while not self._record.exists():
            if time.monotonic() > deadline_s:
                raise TimeoutError("the router wrote no record within 60 s")
            time.sleep(0.01)
        return dict(json.loads(self._record.read_text()))


def measure(router: Router, repeats: int) -> list[dict[str, Any]]:
    rows = []
    with httpx.Client(base_url=router.url, timeout=120, trust_env=False) as client:
        path, body = chat(session_id="s", max_tokens=2)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while client.post(path, json=body).status_code != 200:
            if time.monotonic() > deadline_s:
                raise TimeoutError("the router did not answer a first request")
            time.sleep(0.1)
        session = client.get("/v1/sessions/s/export").raise_for_status().json()
        for name, path, body in requests(session):
            content = (body if isinstance(body, str) else json.dumps(body)).encode()
            del body
            gc.collect()
            held: list[dict[str, Any]] = []
            router.longest()
            for _ in range(repeats):
                begin_s = time.perf_counter()
                answer = client.post(path, content=content, headers={"content-type": "application/json"})
                took_s = time.perf_counter() - begin_s
                held.append(router.longest() | {"status": answer.status_code, "took_s": round(took_s, 3)})
            worst = max(held, key=lambda entry: float(entry["held_s"]))
            rows.append(
                {
                    "request": name,
                    "body_bytes": len(content),
                    "status": worst["status"],
                    "held_ms": round(1000 * worst["held_s"], 1),
                    "late_ms": round(1000 * max(entry["late_s"] for entry in held), 1),
                    "callback": worst["callback"] if worst["held_s"] > GOAL_S else "",
                    "took_s": worst["took_s"],
                }
            )
            row = rows[-1]
            sys.stdout.write(
                f"{row['held_ms']:9.1f} ms {row['late_ms']:9.1f} ms late  {worst['status']}  "
                f"{len(content):9d}  {name}\n"
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with started(folder, "prefill") as prefill, started(folder, "decode") as decode:
            workers = [prefill().addresses["address"], decode().addresses["address"]]
            ready, record = folder / "router.json", folder / "record.json"
            arguments = ["--listen", "127.0.0.1:0", "--ready-file", str(ready)]
            arguments += ["--prefill-workers", workers[0], "--decode-workers", workers[1]]
            command = [sys.executable, __file__, "--as-router", str(record), *arguments]
            with (folder / "router.log").open("wb") as log:
                popen = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            try:
                deadline_s = time.monotonic() + START_TIMEOUT_S
                while not ready.exists():
                    if popen.poll() is not None or time.monotonic() > deadline_s:
                        raise RuntimeError((folder / "router.log").read_text()[-4000:])
                    time.sleep(0.05)
                url = f"http://{json.loads(ready.read_text())['address']}"
                rows = measure(Router(popen, url, record), options.repeats)
            finally:
                popen.kill()
                popen.wait(30)
    worst = max(rows, key=lambda row: float(row["held_ms"]))
    sys.stdout.write(f"longest: {worst['held_ms']} ms, {worst['request']}\n")
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        result = {"goal_ms": 1000 * GOAL_S, "repeats": options.repeats, "requests": rows}
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-router"]:
        run_router(sys.argv[3:], Path(sys.argv[2]))
    else:
        main()
