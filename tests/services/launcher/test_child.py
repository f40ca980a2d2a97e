"""A launcher's death ends its services."""

from __future__ import annotations

import subprocess
import sys

import pytest

STUBBORN = """
import signal, sys, time
from kvferry.services.launcher import process
process.GRACE_S = 0.2
signal.signal(signal.SIGTERM, signal.{disposition})
process.watch_parent(sys.stdin.fileno())
print("up", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("disposition", "code"), [("SIG_DFL", -15), ("SIG_IGN", 1)])
def test_the_end_of_the_pipe_terminates_the_process_even_a_stubborn_one(disposition: str, code: int) -> None:
    script = STUBBORN.format(disposition=disposition)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "up\n"
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(timeout=30) == code
    finally:
        process.kill()
        process.wait(timeout=30)
        process.stdout.close()  # type: ignore[union-attr]


RUN = """
import sys
from multiprocessing import Pipe
from kvferry.services.launcher.process import run_service
ours, theirs = Pipe(duplex=False)  # both ends are held here: the end of one would end the service
run_service(sys.argv[1:], {}, ours)
"""


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["nonsense"], 2)])
def test_the_exit_code_and_output_of_the_command_are_kept(arguments: list[str], code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == code
    assert "kvferry" in done.stdout
