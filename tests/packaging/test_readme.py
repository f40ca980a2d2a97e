"""The README does not rot: its commands run, its options, variables and paths exist."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.services.launcher.config import CONFIGS, KNOWN_CONFIGS, ChatConfig, ServeConfig
from kvferry.services.launcher.display import EXAMPLE_ANSWER
from kvferry.shared.command_line import option_name, variable_name
from kvferry.shared.compression.presets import PRESETS

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
DEFAULT_ADDRESS = "127.0.0.1:8000"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
COMMANDS = {**CONFIGS, "serve": ServeConfig, "chat": ChatConfig}

pytestmark = pytest.mark.xdist_group("readme")


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A served stack, as `make serve` starts it."""
    folder = tmp_path_factory.mktemp("readme")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", "from kvferry.services.launcher.cli import main; main()", "serve",
             "--listen", "127.0.0.1:0", "--ready-file", str(folder / "ready")],
            env=clean, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        deadline_s = time.monotonic() + 180
        while not (folder / "ready").exists():
            assert process.poll() is None, (folder / "output").read_text()
            assert time.monotonic() < deadline_s, (folder / "output").read_text()
            time.sleep(0.1)
        yield json.loads((folder / "ready").read_text())["address"]
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=60)
        process.kill()
        process.wait(timeout=60)


def run(command: list[str], given: str = "") -> str:
    clean = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, timeout=200, check=False, env=clean
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_curl_line_python_snippet_and_chat_work_one_after_the_other(address: str) -> None:
    curl, chat = blocks("bash")
    (snippet,) = blocks("python")
    assert all(DEFAULT_ADDRESS in text for text in (curl, snippet))

    answer = json.loads(run(["bash", "-c", curl.replace(DEFAULT_ADDRESS, address)]))
    assert answer["choices"][0]["message"]["content"].split() == EXAMPLE_ANSWER.split()

    first, first_kv, second, second_kv = run(
        [sys.executable, "-c", snippet.replace(DEFAULT_ADDRESS, address)]
    ).splitlines()
    assert f"It answers `{first}` and `{second}`." in README
    turns = [ast.literal_eval(text) for text in (first_kv, second_kv)]
    assert [turn["method"] for turn in turns] == ["rocketkv", "rocketkv"]
    assert turns[0]["reused_tokens"] == 0
    assert turns[1]["reused_tokens"] >= turns[0]["prompt_tokens"]
    assert all(turn["shipped_bytes"] < turn["full_bytes"] for turn in turns)

    command = chat.strip().replace(".venv/bin/kvferry", f"'{Path(sys.executable).parent}/kvferry'")
    shown = run(
        ["bash", "-c", f"{command} --url http://{address}"], given="what is the pin of the red castle ?\n"
    )
    assert "session hello" in shown
    assert "shipped" in shown


def test_the_transcript_is_a_real_one(address: str) -> None:
    (transcript,) = blocks("text")
    lines = transcript.splitlines()
    asked, answered = lines[::2], lines[1::2]
    assert all(line.startswith("> ") for line in asked)
    given = "".join(f"{line.removeprefix('> ')}\n" for line in asked)
    shown = run(
        [
            f"{Path(sys.executable).parent}/kvferry",
            "chat",
            "--session",
            "transcript",
            "--url",
            f"http://{address}",
        ],
        given=given,
    )
    assert [line.rstrip() for line in shown.splitlines() if line.rstrip() in answered] == answered


def test_options_of_commands_exist() -> None:
    found = re.findall(r"^kvferry (\w+) +(--.*)$", README, flags=re.MULTILINE)
    assert {command for command, _ in found} == {"prefill", "decode", "router"}
    for command, options in found:
        known = {option_name(field) for field in COMMANDS[command].model_fields}
        assert set(re.findall(r"--[a-z-]+", options)) <= known


def test_options_in_tables_exist_where_they_are_said_to() -> None:
    rows = re.findall(r"^\| (`--[^|]*) \| ([^|]*) \|", README, flags=re.MULTILINE)
    assert rows
    roles = {"all": list(CONFIGS), "workers": ["prefill", "decode"]}
    for options, owners in rows:
        commands = [c for owner in owners.strip().split(", ") for c in roles.get(owner, [owner])]
        for option in re.findall(r"--[a-z-]+", options):
            for command in commands:
                assert option in {option_name(f) for f in COMMANDS[command].model_fields}, (option, command)


def test_variables_exist() -> None:
    known = {variable_name(field) for settings in KNOWN_CONFIGS for field in settings.model_fields}
    assert set(re.findall(r"KVFERRY_[A-Z][A-Z_]*", README)) <= known


def test_make_targets_exist() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"\bmake ([a-z]+)\b", README)) - {"must"}
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_methods_in_the_table_are_those_that_exist() -> None:
    table = README.partition("## Methods")[2].partition("## ")[0]
    assert set(re.findall(r"^\| `([\w-]+)` \|", table, flags=re.MULTILINE)) == set(PRESETS)


def test_paths_and_sections_that_are_named_exist() -> None:
    tree = README.partition("## Map of the repository")[2].partition("## ")[0]
    paths = re.findall(r"^([a-z]+/\S*)", tree, flags=re.MULTILINE)
    paths += re.findall(r"`([a-z]+/[a-z_/]+(?:\.py)?/?)`", README)
    paths += re.findall(r"\]\(([A-Z]+)\)", README)
    assert len(paths) > 15
    assert not [path for path in paths if not (REPOSITORY / path).exists()]
    for anchor in re.findall(r"\]\(#([a-z-]+)\)", README):
        assert re.search(rf"^## {anchor.replace('-', ' ')}$", README, flags=re.MULTILINE | re.IGNORECASE)
