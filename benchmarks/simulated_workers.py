"""Prefill and decode workers without a model, behind the real control protocol: part of `router_scale.py` and
of `real_cluster.py`.

    python benchmarks/simulated_workers.py --workers 16 --pace-s 0.02 --ready-file FILE

So many workers of each role listen on ports of their own in one process. Their engine takes a step every
`--pace-s`, which gives each running request a token; nothing is computed and no KV is shipped. Prefill takes
one prompt after another, for `--stored-s` where it has the session's history and for `--whole-s` otherwise.
Runs until its standard input ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from kvtest.router import SPEC, scripted_token  # noqa: E402
from kvtest.scripted_workers import Script, ScriptedDecode, ScriptedPrefill, Wire  # noqa: E402

from kvferry.models import DEMO_MODEL  # noqa: E402
from kvferry.shared.control.messages import PrefillEvent, PrefillRequest, WorkerStatus  # noqa: E402
from kvferry.shared.control.server import serve_control  # noqa: E402
from kvferry.shared.model.text import TextAssembler  # noqa: E402
from kvferry.shared.model.tokenizer import ChatTokenizer  # noqa: E402

MOST_NEW_TOKENS = 16
"""Of a prompt whose session's history is there."""


class QueuedPrefill(ScriptedPrefill):
    """Takes one prompt after another.

    Args: stored_s, whole_s: how long it takes for a prompt whose session it has the history of, but for the
        last turn's last token and the new prompt, and for any other.
    """

    def __init__(self, script: Script, wire: Wire, *, stored_s: float, whole_s: float) -> None:
        super().__init__(script, wire)
        self._engine, self._waiting = asyncio.Lock(), 0
        self._stored_s, self._whole_s = stored_s, whole_s

    async def status(self, *, timeout_s: float) -> WorkerStatus:
        return replace(await super().status(timeout_s=timeout_s), waiting=self._waiting)

    async def prefill(
        self, request: PrefillRequest, *, timeout_s: float
    ) -> AsyncGenerator[PrefillEvent, None]:
        if not request.probe and self._whole_s:
            self._waiting += 1
            try:
                async with self._engine:
                    missing = len(request.prompt_token_ids) - self._reused(request)
                    await asyncio.sleep(self._stored_s if missing <= MOST_NEW_TOKENS else self._whole_s)
            finally:
                self._waiting -= 1
        async for event in super().prefill(request, timeout_s=timeout_s):
            yield event


class SteppedDecode(ScriptedDecode):
    """Gives all running requests a token at the same time, once a step, as decode does.

    Made in a running event loop.
    """

    def __init__(self, script: Script, wire: Wire) -> None:
        super().__init__(script, wire)
        self._step = asyncio.Event()
        self._steps = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self.script.token_delay_s)
            step, self._step = self._step, asyncio.Event()
            step.set()

    async def next_step(self) -> None:
        await self._step.wait()


async def run(arguments: argparse.Namespace) -> None:
    tokenizer = ChatTokenizer.load(DEMO_MODEL)
    script = Script(
        spec=SPEC,
        token=scripted_token,
        new_assembler=lambda sampling: TextAssembler(tokenizer, sampling.stop),
        token_delay_s=arguments.pace_s,
    )
    wire, listen = Wire(), "127.0.0.1:0"
    times = {"stored_s": arguments.stored_s, "whole_s": arguments.whole_s}
    numbers = range(arguments.workers)
    prefill = [
        await serve_control(listen=listen, prefill=QueuedPrefill(script, wire, **times)) for _ in numbers
    ]
    decode = [await serve_control(listen=listen, decode=SteppedDecode(script, wire)) for _ in numbers]
    addresses = {
        role: ",".join(worker.address for worker in servers)
        for role, servers in (("prefill", prefill), ("decode", decode))
    }
    partial = arguments.ready_file.with_suffix(".part")
    partial.write_text(json.dumps(addresses))
    partial.rename(arguments.ready_file)
    await asyncio.to_thread(sys.stdin.read)
    for server in (*prefill, *decode):
        await server.close(0.0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--pace-s", type=float, required=True)
    parser.add_argument("--stored-s", type=float, default=0.0)
    parser.add_argument("--whole-s", type=float, default=0.0)
    parser.add_argument("--ready-file", type=Path, required=True)
    asyncio.run(run(parser.parse_args()))
