"""The Python examples that clients' packages are published with: in their READMEs, and in a docstring.

`python published_examples.py` runs those that are passed to it, one after another. That is a process of its
own, because examples leave clients open and set variables.
"""

from __future__ import annotations

import ast
import asyncio
import importlib.metadata
import importlib.util
import inspect
import json
import re
import sys
import textwrap
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_PIECE = re.compile(r"^ *```(?P<language>\w*)\n(?P<code>.*?)^ *```|^(?:#+ |\?\?\?)", re.DOTALL | re.MULTILINE)
"""A fenced block, or the beginning of a section."""


@dataclass(frozen=True)
class Example:
    """One block of Python. Attributes: section: number of the part of the text that it is in."""

    section: int
    code: str


def examples_of(package: str) -> list[Example]:
    """Those of an installed package's README; langchain-openai's has none, and its class has."""
    if package == "langchain-openai":
        text = _docstring("langchain_openai", "chat_models/base.py", "ChatOpenAI")
    else:
        described = importlib.metadata.metadata(package)
        text = str(described.get_payload() or described["Description"])
    found, section = [], 0
    for match in _PIECE.finditer(text):
        if match["code"] is None:
            section += 1
        elif match["language"] in ("python", "py"):
            found.append(Example(section, textwrap.dedent(match["code"])))
    return found


def _docstring(package: str, file: str, name: str) -> str:
    """A class's docstring, from its source: importing the package takes seconds."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    module = ast.parse((Path(spec.origin).parent / file).read_text("utf-8"))
    (found,) = (node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name)
    return ast.get_docstring(found) or ""


def run_all(examples: list[Example], given: str) -> list[dict[str, str]]:
    """Run examples in order; what each ended with: nothing, or its error's `type` and `trace`.

    An example has the names of its section, and else those that an example before defined first: a text
    shows once how to make a client. One that awaits outside a function has an asynchronous client.

    Args: given: code that defines what the text leaves to its reader.
    """
    first: dict[str, Any] = {"__name__": "__main__"}
    exec(given, first)
    ends, names, section = [], dict(first), -1
    for example in examples:
        if example.section != section:
            names, section = dict(first), example.section
        try:
            code = compile(example.code, "example", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            if code.co_flags & inspect.CO_COROUTINE:
                names["client"] = names["AsyncOpenAI"]()
                asyncio.run(eval(code, names))
            else:
                exec(code, names)
            ends.append({})
        except Exception as error:
            ends.append({"type": type(error).__name__, "trace": traceback.format_exc()})
        for name, value in names.items():
            first.setdefault(name, value)
    return ends


if __name__ == "__main__":
    passed = json.load(sys.stdin)
    found = run_all([Example(**example) for example in passed["examples"]], passed["given"])
    Path(passed["output"]).write_text(json.dumps(found))


def as_input(examples: list[Example], *, given: str, output: Path) -> str:
    """What the process reads. Args: output: the file to which it writes what `run_all` returns."""
    return json.dumps(
        {"examples": [asdict(example) for example in examples], "given": given, "output": str(output)}
    )
