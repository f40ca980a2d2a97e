"""Fuzzing guided by coverage: atheris (libFuzzer) changes inputs and keeps those that reach new code of ours.

    python benchmarks/fuzz_guided.py records [--runs 100000] [--seed 1] [--corpus tests/fuzz/guided.jsonl]

Begins with the corpus and with seeded cases of `tests/helpers/kvtest/fuzz/`. With `--corpus` the inputs that
reach code which the others do not are written back, the shortest of them. A finding is an exception that is
no named error, or an input that takes over 10 s; libFuzzer prints it, and the exit code is not 0. `make
atheris` installs atheris into a folder, which ATHERIS_PATH names if it is not on Python's path.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "helpers"), *filter(None, [os.environ.get("ATHERIS_PATH")])]

NAMES = ("records", "control", "sessions", "stored", "frames")
NUM_SEEDS = 60
MAX_INPUT_BYTES = 4096
MAX_COMMITTED_BYTES = 1024
NUM_COMMITTED = 60
FINDINGS = f"{tempfile.gettempdir()}/kvferry-fuzz-"
"""Where libFuzzer writes an input that is a finding; it prints the name."""


def fuzz(name: str, folder: Path, options: list[str]) -> None:
    """Fuzz one target in this process, which ends with it."""
    import atheris

    with atheris.instrument_imports(include=["kvferry"]):
        import structlog
        from kvtest.fuzz import TARGETS
        from kvtest.fuzz.guided import GUIDED, seeds

    structlog.configure(logger_factory=structlog.ReturnLoggerFactory(), cache_logger_on_first_use=False)
    target, case_of = TARGETS[name](), GUIDED[name].case_of
    for number, data in enumerate(seeds(name, NUM_SEEDS)):
        (folder / f"seed-{number}").write_bytes(data)

    def read(data: bytes) -> None:
        target.read(case_of(data))

    atheris.Setup(["fuzz", str(folder), *options], read)
    atheris.Fuzz()


def entries(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(name: str, folder: Path, *options: str) -> int:
    command = [sys.executable, __file__, name, "--in", str(folder), "--", f"-max_len={MAX_INPUT_BYTES}"]
    command += ["-timeout=10", f"-artifact_prefix={FINDINGS}", *options]
    return subprocess.run(command, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("targets", nargs="*", choices=[*NAMES, []], help="all without any")
    parser.add_argument("--runs", type=int, default=20_000, help="inputs of each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path, help="file whose inputs of these targets are replaced")
    parser.add_argument("--in", dest="folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("options", nargs="*", help=argparse.SUPPRESS)
    if "--" in sys.argv:
        place = sys.argv.index("--")
        arguments, options = parser.parse_args(sys.argv[1:place]), sys.argv[place + 1 :]
        fuzz(arguments.targets[0], arguments.folder, options)
    arguments = parser.parse_args()
    committed = ROOT / "tests" / "fuzz" / "guided.jsonl"
    for name in arguments.targets or NAMES:
        with tempfile.TemporaryDirectory() as place:
            found, least = Path(place) / "found", Path(place) / "least"
            found.mkdir()
            least.mkdir()
            for number, entry in enumerate(entries(committed)):
                if entry["target"] == name:
                    (found / f"committed-{number}").write_bytes(base64.b64decode(entry["input"]))
            code = run(name, found, f"-runs={arguments.runs}", f"-seed={arguments.seed}")
            if code:
                return code
            if arguments.corpus is None:
                continue
            if code := run(name, least, "-merge=1", str(found)):
                return code
            inputs = sorted(
                (path.read_bytes() for path in least.iterdir()), key=lambda data: (len(data), data)
            )
            short = [data for data in inputs if len(data) <= MAX_COMMITTED_BYTES][:NUM_COMMITTED]
            kept = [entry for entry in entries(arguments.corpus) if entry["target"] != name]
            kept += [{"target": name, "input": base64.b64encode(data).decode()} for data in short]
            arguments.corpus.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
    return 0


if __name__ == "__main__":
    sys.exit(main())
