"""Agents and chat programs as they are published, against the whole server: each has an empty environment but
what `kvferry launch` wrote, a dummy key, and no network but this server. A prompt is answered, a tool's
result is used, and a second turn reuses KV.

`make agents` installs them; AGENTS names the folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kvtest.demands import SAID, DemandingProxy, Exchange, demanding
from kvtest.stack import Stack, serving
from kvtest.text_models import HERMES, make_text_model, text_tokenizer

FOLDER = os.environ.get("AGENTS") or None
ROOT = Path(__file__).parents[2]
PORT = 8000
TIMEOUT_S = 280
MIN_REUSED = 64

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(FOLDER is None, reason="the agents are missing; make agents installs them"),
    pytest.mark.skipif(
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "-rn", "ip", "link"], capture_output=True, check=False).returncode != 0,
        reason="a process may have no network of its own here",
    ),
]

Run = Callable[[str], str]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("model")
    make_text_model(folder, template=HERMES, tokenizer=text_tokenizer(), max_position_embeddings=65_536)
    with serving("--model", str(folder), "--model-name", "demo", "--in-process") as stack:
        yield stack


@pytest.fixture
def proxy(served: Stack, tmp_path: Path) -> Iterator[DemandingProxy]:
    with demanding(served.base_url, tmp_path / "server") as demanding_proxy:
        yield demanding_proxy


@pytest.fixture
def run(proxy: DemandingProxy, tmp_path: Path) -> Run:
    """Runs a shell's line in an empty home; returns what it printed."""
    home = tmp_path / "home"
    home.mkdir()
    assert FOLDER is not None
    programs = [
        Path(FOLDER) / "node_modules" / ".bin",
        Path(FOLDER) / "llm" / "bin",
        Path(FOLDER) / "aider-chat" / "bin",
    ]
    path = ":".join(map(str, [*programs, Path(sys.executable).parent, "/usr/local/bin", "/usr/bin", "/bin"]))
    environment = {"HOME": str(home), "PATH": path, "LANG": "C.UTF-8", "TERM": "dumb"}

    def run(line: str) -> str:
        forward = [
            sys.executable,
            str(ROOT / "tests/helpers/kvtest/loopback.py"),
            str(PORT),
            str(tmp_path / "server"),
        ]
        done = subprocess.run(
            ["unshare", "-rn", *forward, "sh", "-c", line],
            cwd=home,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        said = done.stdout[-8000:] + done.stderr[-8000:]
        assert done.returncode == 0, said
        return said

    return run


def launch(name: str) -> str:
    return f"kvferry launch {name} --url http://127.0.0.1:{PORT} --api-key dummy --write"


def answered(proxy: DemandingProxy) -> list[Exchange]:
    """The exchanges that ask the model for something; all of them succeeded."""
    found = [
        exchange
        for exchange in proxy.exchanges
        if exchange.body and not exchange.path.endswith("count_tokens")
    ]
    assert found
    assert {exchange.status for exchange in found} == {200}, [
        exchange.text[:400] for exchange in found if exchange.status != 200
    ]
    return found


def check_tool_was_used(proxy: DemandingProxy) -> None:
    found = answered(proxy)
    results = [
        exchange
        for exchange in found
        if SAID in str(exchange.body.get("messages") or exchange.body.get("input"))
    ]
    with_results = [exchange for exchange in results if exchange.has_result]
    assert with_results, [str(exchange.body)[-600:] for exchange in found]
    assert with_results[0].reused_tokens > MIN_REUSED


def test_codex(run: Run, proxy: DemandingProxy) -> None:
    run(launch("codex"))
    options = "--skip-git-repo-check --dangerously-bypass-approvals-and-sandbox"
    run(f"KVFERRY_API_KEY=dummy codex exec {options} 'say where you are'")
    check_tool_was_used(proxy)
    before = len(answered(proxy))
    run(f"KVFERRY_API_KEY=dummy codex exec resume --last {options} 'and again'")
    again = answered(proxy)[before:]
    assert again[0].reused_tokens > MIN_REUSED


def test_opencode(run: Run, proxy: DemandingProxy) -> None:
    run(launch("opencode"))
    run("opencode run 'say where you are'")
    check_tool_was_used(proxy)
    before = len(answered(proxy))
    run("opencode run --continue 'and again'")
    again = answered(proxy)[before:]
    assert max(exchange.reused_tokens for exchange in again) > MIN_REUSED


def test_llm(run: Run, proxy: DemandingProxy) -> None:
    run(launch("llm"))
    run("llm keys set kvferry --value dummy")
    assert run(f"llm -m kvferry '{'say where you are. ' * 40}'").strip()
    run("llm -c 'and again'")
    assert answered(proxy)[-1].reused_tokens > MIN_REUSED
    before = len(answered(proxy))
    run("llm -m kvferry -T llm_version 'which version is this?'")
    called = answered(proxy)[before:]
    assert [exchange.has_result for exchange in called] == [False, True]


def test_aider(run: Run, proxy: DemandingProxy) -> None:
    run(launch("aider"))
    options = "--no-git --yes-always --no-check-update --analytics-disable --no-gitignore --no-pretty"
    run(f"aider {options} --message 'say where you are'")
    before = len(answered(proxy))
    run(f"aider {options} --restore-chat-history --message 'and again'")
    assert answered(proxy)[before].reused_tokens > MIN_REUSED
