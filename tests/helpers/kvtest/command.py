"""`kvferry` commands in forked processes: importing torch in one of its own takes seconds."""

from __future__ import annotations

import importlib
import os
import subprocess
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kvferry.services.launcher.cli import main
from kvtest.forked import Forked

TIMEOUT_S = 250.0


def kvferry(*arguments: str, changes: Mapping[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, and return its exit code and output.

    Args: changes: what attributes of modules are in that process, by their dotted names.
    """
    with tempfile.TemporaryDirectory(prefix="kvferry-command-") as folder:
        output, errors = Path(folder) / "output", Path(folder) / "errors"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
        command = Forked(
            partial(_main, dict(changes or {})), arguments, log=output, errors=errors, environment=clean
        )
        code = command.wait(TIMEOUT_S)
        return subprocess.CompletedProcess(arguments, code, output.read_text(), errors.read_text())


def _main(changes: Mapping[str, Any]) -> None:
    for name, value in changes.items():
        module, _, attribute = name.rpartition(".")
        setattr(importlib.import_module(module), attribute, value)
    main()
