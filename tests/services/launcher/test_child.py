"""A launcher's death ends its services."""

from __future__ import annotations

import subprocess
import sys

import pytest

STUBBORN = """
import signal, sys, time
from kvferry.services.launcher import child
child.GRACE_S = 0.2
signal.signal(signal.SIGTERM, signal.{disposition})
child.watch_parent(sys.stdin.fileno())
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


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["nonsense"], 2)])
def test_the_exit_code_and_output_of_the_command_are_kept(arguments: list[str], code: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "kvferry.services.launcher.child", *arguments],
        stdin=subprocess.PIPE,  # held open, as the launcher does: its end would end the child
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        assert process.stdout is not None
        output = process.stdout.read()
        assert process.wait(timeout=100) == code
    assert "kvferry" in output
