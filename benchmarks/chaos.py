"""Conversations with a cluster of real processes while seeded faults strike it: what broke, if anything.

    python benchmarks/chaos.py [--rounds 100] [--seed 1] [--planted ROLE=NAME] [--output FILE]

Two routers on one Redis, two prefill and two decode workers with the demo model, and a proxy before each. A
round has eight conversations of two turns and twenty faults (`tests/helpers/kvtest/chaos/`). A request must
end in 60 s with exactly the tokens of the one-process oracle, or with a named error; repeated, it must
succeed once the faults are over; after each round the arenas must be free. `--only SEED,SEED` runs single
rounds again.
The exit code is 1 after a violation.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import torch  # noqa: E402
from kvtest.chaos.cluster import running  # noqa: E402
from kvtest.chaos.run import Report, run_round  # noqa: E402
from kvtest.chaos.script import METHODS, make_script  # noqa: E402

from kvferry.models import DEMO_MODEL  # noqa: E402
from kvferry.shared.model.loading import load_model  # noqa: E402
from kvferry.shared.model.tokenizer import ChatTokenizer  # noqa: E402

MAX_TOKENS = (12, 24, 48)


async def run(arguments: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    model = load_model(str(DEMO_MODEL), name="demo", device="cpu", dtype="float32", max_model_len=0)
    tokenizer = ChatTokenizer.load(DEMO_MODEL)
    scripts = [
        make_script(number, method, model, tokenizer, max_tokens=MAX_TOKENS[number % len(MAX_TOKENS)])
        for number, method in enumerate(METHODS * 2)
    ]
    report = Report()
    seeds = range(arguments.seed, arguments.seed + arguments.rounds)
    if arguments.only:
        seeds = [int(seed) for seed in arguments.only.split(",")]
    role, _, planted = arguments.planted.partition("=")
    folder = Path(arguments.logs or tempfile.mkdtemp(prefix="kvferry-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    async with running(folder, {role: planted} if planted else None) as cluster:
        for seed in seeds:
            before = len(report.outcome.violations)
            await run_round(cluster, scripts, seed, report)
            for violation in report.outcome.violations[before:]:
                sys.stderr.write(f"{violation}\n")
            sys.stderr.write(
                f"round {seed}: {report.num_faults} faults, {report.outcome.right} right, "
                f"{report.outcome.errors.total()} errors, {report.seconds:.0f} s\n"
            )
            _write(arguments, report)
    return int(bool(report.outcome.violations))


def _write(arguments: argparse.Namespace, report: Report) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT
    ).stdout.strip()
    command = f"python benchmarks/chaos.py --rounds {arguments.rounds} --seed {arguments.seed}"
    result = {"command": command, "commit": commit, **report.as_json()}
    text = json.dumps(result, indent=2) + "\n"
    if arguments.output:
        Path(arguments.output).write_text(text)
    else:
        sys.stdout.write(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="seeds of single rounds")
    parser.add_argument("--planted", default="", help="ROLE=NAME of planted.py")
    parser.add_argument("--logs", default="", help="folder for the processes' logs")
    parser.add_argument("--output", default="")
    sys.exit(asyncio.run(run(parser.parse_args())))


if __name__ == "__main__":
    main()
