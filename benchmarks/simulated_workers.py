"""Prefill and decode workers without a model, behind the real control protocol: part of `router_scale.py`.

    python benchmarks/simulated_workers.py --workers 16 --pace-s 0.02 --ready-file FILE

So many workers of each role listen on ports of their own in one process. Their engine gives a token every
`--pace-s`; nothing is computed and no KV is shipped. Runs until its standard input ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from kvtest.router import SPEC, scripted_token  # noqa: E402
from kvtest.scripted_workers import Script, ScriptedDecode, ScriptedPrefill, Wire  # noqa: E402

from kvferry.models import DEMO_MODEL  # noqa: E402
from kvferry.shared.control.server import serve_control  # noqa: E402
from kvferry.shared.model.text import TextAssembler  # noqa: E402
from kvferry.shared.model.tokenizer import ChatTokenizer  # noqa: E402


async def run(arguments: argparse.Namespace) -> None:
    tokenizer = ChatTokenizer.load(DEMO_MODEL)
    script = Script(
        spec=SPEC,
        token=scripted_token,
        new_assembler=lambda sampling: TextAssembler(tokenizer, sampling.stop),
        token_delay_s=arguments.pace_s,
    )
    wire, listen = Wire(), "127.0.0.1:0"
    prefill, decode = [
        [await serve_control(listen=listen, **{role: kind(script, wire)}) for _ in range(arguments.workers)]
        for role, kind in (("prefill", ScriptedPrefill), ("decode", ScriptedDecode))
    ]
    addresses = {
        role: ",".join(its.address for its in servers)
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
    parser.add_argument("--ready-file", type=Path, required=True)
    asyncio.run(run(parser.parse_args()))
