"""Plants faults in copies of the product, one at a time: which does `pytest` catch?

    python benchmarks/planted_faults.py [--only NAME,NAME] [--output FILE]

`tests/helpers/kvtest/planted_faults.py` lists them. For each one, the committed tree is cloned and gets an
environment with this one's packages and the clone's sources. First the tests nearest to the fault run, then,
if they pass, all that `pytest` runs without `--all`; both stop at the first failure. The test that failed
must pass without the fault. Tests in containers are left out, and those of this list.
Results are written after each fault. With `--only`, those of the other faults stay as the file has them.
The exit code is 1 if a fault of a known kind, or more than one of the others, was not caught.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from kvtest.planted_faults import MAX_MISSED, PLANTED_FAULTS, PlantedFault, plant  # noqa: E402

OUTPUT = ROOT / "benchmarks" / "results" / "planted-faults" / "latest.json"
LIMIT_S = 3600.0
FAST_LANE = ("-x", "-q", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")
LEFT_OUT = ("tests/containers", "tests/benchmarks/test_planted_faults.py")
PASSED, FAILED, INTERRUPTED = 0, 1, 2
"""pytest's exit codes; xdist ends with the last one where `-x` stops it."""
_LOG_BYTES = 4000


class Copy:
    """A clone of the committed tree, with an environment in `.venv`."""

    def __init__(self, folder: Path, commit: str) -> None:
        self.folder = folder
        self._log = folder.with_suffix(".log")
        _git(ROOT, "clone", "--quiet", "--no-hardlinks", str(ROOT), str(folder))
        _git(folder, "checkout", "--quiet", "--detach", commit)
        make_environment(folder)

    def restore(self, fault: PlantedFault) -> None:
        """Take the fault out again."""
        _git(self.folder, "checkout", "--quiet", "--", fault.path)

    def first_failure(self, paths: Sequence[str], deadline_s: float) -> str | None:
        """Run the fast lane's tests of these paths. Returns: the first that failed, None if all passed.

        Raises: SystemExit: pytest could not run them, or not in time.
        """
        left_out = [option for path in LEFT_OUT for option in ("--ignore", path)]
        code = self._run((*FAST_LANE, *left_out, *paths), deadline_s)
        failed = self._failed() if code in (FAILED, INTERRUPTED) else []
        if code != PASSED and not failed:
            raise SystemExit(f"pytest ended with exit code {code} and no failed test:\n{self._end_of_log()}")
        return failed[0] if failed else None

    def check_passes(self, test: str, deadline_s: float) -> None:
        """Run one test. Raises: SystemExit: it does not pass."""
        if code := self._run(("-q", test), deadline_s):
            raise SystemExit(f"{test} ends with exit code {code} without a fault:\n{self._end_of_log()}")

    def _run(self, options: Sequence[str], deadline_s: float) -> int:
        command = [str(self.folder / ".venv" / "bin" / "python"), "-m", "pytest", *options]
        own = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        env = {name: value for name, value in os.environ.items() if name not in own}
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                command, cwd=self.folder, env=env, stdout=log, stderr=log, start_new_session=True
            )
            try:
                return process.wait(max(1.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise SystemExit(f"pytest took more than {LIMIT_S:g} s:\n{self._end_of_log()}") from None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def _failed(self) -> list[str]:
        """The failed tests of the last run, in order, without the groups that xdist puts behind names."""
        path = self.folder / ".pytest_cache" / "v" / "cache" / "lastfailed"
        names = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return [re.sub(r"@[^\]/]*$", "", name) for name in names]

    def _end_of_log(self) -> str:
        return self._log.read_bytes()[-_LOG_BYTES:].decode(errors="replace")


def make_environment(folder: Path) -> None:
    """Make `.venv` in a clone: this environment's packages and commands, the clone's sources.

    The packages are linked one by one, not named in a `.pth` file, because tests make environments of their
    own from the folder that has them. The link to this repository's sources is left out.
    """
    target = folder / ".venv"
    venv.create(target, symlinks=True, with_pip=False)
    base = {"base": str(target), "platbase": str(target)}
    packages, commands = (Path(sysconfig.get_path(name, vars=base)) for name in ("purelib", "scripts"))
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(("__editable__", "__pycache__")):
            (packages / entry.name).symlink_to(entry)
    (packages / "sources.pth").write_text(f"{folder / 'src'}\n", encoding="utf-8")
    here = Path(sysconfig.get_path("scripts"))
    for entry in here.iterdir():
        command = commands / entry.name
        if command.exists():
            continue
        content = entry.read_bytes()
        if content.startswith(b"#!"):
            command.write_bytes(content.replace(os.fsencode(here), os.fsencode(commands)))
            command.chmod(0o755)
        else:
            command.symlink_to(entry)


def try_fault(fault: PlantedFault, copy: Copy) -> dict[str, Any]:
    """Plant a fault in a new copy. Returns: what the result file says of it."""
    begin_s = time.monotonic()
    deadline_s = begin_s + LIMIT_S
    plant(copy.folder, fault)
    caught_by = copy.first_failure(fault.near, deadline_s) or copy.first_failure(("tests",), deadline_s)
    seconds = time.monotonic() - begin_s
    if caught_by is not None:
        copy.restore(fault)
        copy.check_passes(caught_by, deadline_s)
    return {
        "name": fault.name,
        "what": fault.what,
        "known": fault.known,
        "caught": caught_by is not None,
        "by": caught_by,
        "seconds": round(seconds, 1),
    }


def run(faults: Sequence[PlantedFault], output: Path, *, adds: bool) -> list[dict[str, Any]]:
    """Try faults. Returns: what the result file then has. Args: adds: to those that the file has."""
    commit = _git(ROOT, "rev-parse", "HEAD")  # once: it may move before the last fault
    found = _earlier(output) if adds else {}
    for number, fault in enumerate(faults, start=1):
        with tempfile.TemporaryDirectory(prefix="kvferry-fault-", ignore_cleanup_errors=True) as folder:
            tried = found[fault.name] = try_fault(fault, Copy(Path(folder) / "copy", commit)) | {
                "commit": commit
            }
        _write(output, found)
        how = f"caught by {tried['by']}" if tried["caught"] else "NOT CAUGHT"
        sys.stderr.write(f"{number}/{len(faults)} {fault.name}: {how}, {tried['seconds']:.0f} s\n")
    return list(found.values())


def _earlier(output: Path) -> dict[str, dict[str, Any]]:
    """What the file has, by name."""
    result = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {"faults": []}
    return {tried["name"]: tried for tried in result["faults"]}


def _write(output: Path, found: dict[str, dict[str, Any]]) -> None:
    listed = [found[fault.name] for fault in PLANTED_FAULTS if fault.name in found]
    result = {
        "command": "python benchmarks/planted_faults.py",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "planted": len(listed),
        "caught": sum(tried["caught"] for tried in listed),
        "faults": listed,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="names of faults")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    only = set(filter(None, arguments.only.split(",")))
    if unknown := only - {fault.name for fault in PLANTED_FAULTS}:
        parser.error(f"there is no fault {', '.join(sorted(unknown))}")
    faults = [fault for fault in PLANTED_FAULTS if not only or fault.name in only]
    missed = [tried for tried in run(faults, arguments.output, adds=bool(only)) if not tried["caught"]]
    known = [tried for tried in missed if tried["known"]]
    sys.exit(int(bool(known) or len(missed) > MAX_MISSED))


if __name__ == "__main__":
    main()
