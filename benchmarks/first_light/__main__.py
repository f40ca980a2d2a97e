"""Is kvferry right, and how fast is it, on this machine with an NVIDIA GPU? `python benchmarks/first_light`.

    python benchmarks/first_light                               all stages, one after another
    python benchmarks/first_light env opchecks+tokens+serve     these; joined by + they run side by side
    python benchmarks/first_light steps --limit steps=120 --cells 1x131072

    env       60 s   machine, driver, packages, compiler
    opchecks 170 s   the self-test's kernels against torch at four shapes, each in a process of its own
    kernels  200 s   every kernel at real shapes against its reference, then against the clock
    tokens   150 s   greedy tokens of the demo model: device against CPU, captured steps against eager ones
    doctor   150 s   kvferry doctor --json
    serve    240 s   kvferry serve: seconds until it is ready, the README's call, 16 streams at a time
    long     240 s   a 32K prompt through the services, by a random model of Llama-3.2-1B's shape
    steps    300 s   whole decode steps of a random Llama-3.1-8B, beside torch's own attention
    prefill  150 s   a prompt of 32K tokens with and without compression
    peers    150 s   transformers' generate at 32K: eager, and with its static cache compiled

A stage that fails or runs out of time does not stop the next one. OUT (default first-light) gets results.json
with every row, written as it is measured, log.txt with all that was printed, and summary.txt, which is
printed last. The status is 1 where something failed: a wrong or quarantined kernel, steps that are not
captured and should be, a stage that ended in an error or did not end.

Without a GPU the stages run at tiny shapes, kernels in Triton's interpreter. Where kvferry is not installed,
its sources run as they are, with the wheels in .whl; kernels compiled before are taken from .triton.tgz
(`make first-light-bundle` makes both).
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
import tempfile
from pathlib import Path

from machine import find_gpu, prepare
from processes import Results, run_group
from stages import Options, make_stages


def main() -> int:
    arguments = _arguments()
    has_gpu = find_gpu() and not arguments.check
    stages = make_stages(
        Options(
            seed=arguments.seed, is_tiny=not has_gpu, model=arguments.model,
            cells=tuple(arguments.cells), methods=tuple(arguments.methods), limits=dict(arguments.limit),
        )
    )  # fmt: skip
    groups = [name.split("+") for name in arguments.stages] or [[name] for name in stages]
    if unknown := {name for group in groups for name in group} - stages.keys():
        sys.exit(f"no stage is called {', '.join(sorted(unknown))}; there are {', '.join(stages)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the summary is still written
    # a process that is killed leaves no image of its memory
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = Results(arguments.out, sys.argv)
    with tempfile.TemporaryDirectory() as work, (arguments.out / "log.txt").open("w") as log:
        environment = prepare(Path(work), log, has_gpu=has_gpu)
        try:
            for group in groups:
                run_group([stages[name] for name in group], environment, Path(work), log, results)
        finally:
            sys.stdout.write("\n" + results.write_summary())
    return 1 if results.failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="to run; joined by + side by side")
    parser.add_argument("--limit", nargs="*", default=[], type=_limit, metavar="STAGE=SECONDS")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "first-light")))
    parser.add_argument("--check", action="store_true", help="tiny shapes, also on a machine with a GPU")
    parser.add_argument("--seed", type=int, default=1, help="of the random inputs")
    parser.add_argument("--model", default="Llama-3.1-8B", help="shape of steps, prefill and peers")
    parser.add_argument("--cells", nargs="*", default=[], help="of steps: BATCHxCONTEXT")
    parser.add_argument("--methods", nargs="*", default=[], help="of steps")
    return parser.parse_args()


def _limit(text: str) -> tuple[str, float]:
    stage, _, seconds = text.partition("=")
    return stage, float(seconds)


if __name__ == "__main__":
    sys.exit(main())
