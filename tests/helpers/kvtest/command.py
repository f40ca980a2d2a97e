"""`kvferry` commands in the tests' own process: importing torch in another one takes seconds."""

from __future__ import annotations

import contextlib
import io
import subprocess

from kvferry.services.launcher.cli import main


def kvferry(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command that starts no service, and return its exit code and output."""
    output, errors = io.StringIO(), io.StringIO()
    code: object = 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            main(list(arguments))
        except SystemExit as ended:
            code = ended.code or 0
    assert isinstance(code, int), code
    return subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())
