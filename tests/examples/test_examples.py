"""The examples, each as its own process, against a real server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from kvtest.stack import serving
from kvtest.text_models import HERMES, make_text_model

EXAMPLES = Path(__file__).parents[2] / "examples"
PIN = "4 2 7 1"
OF_THE_DEMO = {
    "openai_client.py": f"second: {PIN}",
    "anthropic_client.py": f"answer: {PIN}",
    "litellm_chat.py": f"streamed: {PIN}",
    "document_questions.py": "blue tower: 9 0 3 5",
    "python_api.py": f"answer: {PIN}",
}
WITH_TOOLS = {"agent.py": "  look_up(", "langchain_chat.py": "calls: [('count_words'"}


def run(name: str, url: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        env={**os.environ, "KVFERRY_URL": url, "KVFERRY_API_KEY": "examples"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def demo() -> Iterator[str]:
    with serving("--in-process") as stack:
        yield stack.base_url


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = make_text_model(tmp_path_factory.mktemp("tools"), template=HERMES)
    with serving("--model", str(folder), "--model-name", "tools", "--in-process") as stack:
        yield stack.base_url


@pytest.mark.parametrize("name", OF_THE_DEMO)
def test_it_runs_with_the_demo_model(demo: str, name: str) -> None:
    assert OF_THE_DEMO[name] in run(name, demo)


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_it_runs_with_a_model_that_has_tools(tool_model: str, name: str) -> None:
    output = run(name, tool_model)
    assert WITH_TOOLS[name] in output
    if name == "agent.py":
        counts = [(int(a), int(b)) for a, b in re.findall(r"(\d+) tokens, (\d+) cached", output)]
        assert len(counts) == 3
        assert all(cached > 0 for _, cached in counts[1:])


@pytest.mark.full
def test_the_notebook_runs() -> None:
    notebook: Any = nbformat.read(EXAMPLES / "compression.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=800, kernel_name="python3").execute()
    texts = [output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ())]
    assert "snapkv" in "".join(texts)


def test_every_example_is_listed_and_run() -> None:
    names = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    assert names == {*OF_THE_DEMO, *WITH_TOOLS, "compression.ipynb"}
    assert set(re.findall(r"^\| `([\w.]+)`", (EXAMPLES / "README.md").read_text(), re.MULTILINE)) == names
