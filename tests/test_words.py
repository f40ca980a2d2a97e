"""A variable has the name of what it is."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_no_variable_is_called_its() -> None:
    found = []
    for path in subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True).splitlines():
        for node in ast.walk(ast.parse((ROOT / path).read_bytes(), path)):
            name = node.id if isinstance(node, ast.Name) else node.arg if isinstance(node, ast.arg) else ""
            if name == "its":
                found.append(f"{path}:{node.lineno}")
    assert found == []
