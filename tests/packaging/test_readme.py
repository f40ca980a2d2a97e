"""README and docs stay true: their commands run, their options, variables, methods and paths exist."""

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
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import Parameter
from kvtest.methods import PRESETS
from prometheus_client.parser import text_string_to_metric_families

from kvferry.services.launcher.cli import command_line
from kvferry.services.launcher.config import CONFIGS, ServeConfig
from kvferry.shared.process.command_line import option_name, variable_name
from kvferry.tools.bench.config import BenchConfig
from kvferry.tools.chat.config import ChatConfig
from kvferry.tools.doctor.config import DoctorConfig
from kvferry.tools.evaluation.calibration_config import CalibrateConfig
from kvferry.tools.evaluation.config import EvalConfig
from kvferry.tools.kernel_cache.config import CompileConfig
from kvferry.tools.operate.config import KeysConfig, StoredConfig
from kvferry.tools.plan.config import CalibrateMachineConfig, PlanConfig

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
FIRST_STEPS = (REPOSITORY / "docs" / "first-steps.md").read_text(encoding="utf-8")
PAGES = {
    path.name: path.read_text(encoding="utf-8")
    for path in (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md")))
}
EVERYTHING = "\n".join(text for name, text in PAGES.items() if name != "api.md")
DEFAULT_ADDRESS = "127.0.0.1:8000"
MAX_README_LINES = 200
COMMANDS = {
    **CONFIGS,
    "serve": ServeConfig,
    "chat": ChatConfig,
    "eval": EvalConfig,
    "calibrate": CalibrateConfig,
    "calibrate machine": CalibrateMachineConfig,
    "bench": BenchConfig,
    "doctor": DoctorConfig,
    "compile": CompileConfig,
    "plan": PlanConfig,
    "sessions": StoredConfig,
    "documents": StoredConfig,
    "keys": KeysConfig,
}


def options_of(command: str) -> set[str]:
    """By their fields' names, or by names of their own."""
    fields = COMMANDS[command].model_fields
    parameters = [
        parameter
        for field in fields.values()
        for parameter in field.metadata
        if isinstance(parameter, Parameter)
    ]
    return {option_name(name) for name in fields} | {
        name for parameter in parameters for name in parameter.name or ()
    }


def blocks(page: str, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


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
        deadline_s = time.monotonic() + 300
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
        command,
        input=given,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        env=clean,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_first_call_shows_compression_as_the_readme_says(address: str) -> None:
    (curl,) = blocks(README, "bash")
    (shown,) = blocks(README, "json")
    assert DEFAULT_ADDRESS in curl
    answer = json.loads(run(["bash", "-c", curl.replace(DEFAULT_ADDRESS, address)]))
    expected = json.loads(shown)
    (message,) = (choice["message"] for choice in expected["choices"])
    assert message.items() <= answer["choices"][0]["message"].items()
    assert expected["usage"].items() <= answer["usage"].items()
    assert expected["kv"].items() <= answer["kv"].items()
    assert answer["kv"]["shipped_bytes"] < 0.5 * answer["kv"]["full_bytes"]


def test_the_readme_is_a_front_door() -> None:
    assert len(README.splitlines()) <= MAX_README_LINES


def test_curl_line_python_snippet_and_chat_work_one_after_the_other(address: str) -> None:
    curl, chat = blocks(FIRST_STEPS, "bash")
    (snippet,) = blocks(FIRST_STEPS, "python")
    assert all(DEFAULT_ADDRESS in text for text in (curl, snippet))

    answer = json.loads(run(["bash", "-c", curl.replace(DEFAULT_ADDRESS, address)]))
    assert answer["choices"][0]["message"]["content"].split() == ["6", "5", "6", "3"]
    assert 3 * answer["kv"]["shipped_bytes"] < answer["kv"]["full_bytes"]

    first, first_kv, second, second_kv = run(
        [sys.executable, "-c", snippet.replace(DEFAULT_ADDRESS, address)]
    ).splitlines()
    assert f"It answers `{first}` and `{second}`." in FIRST_STEPS
    turns = [ast.literal_eval(text) for text in (first_kv, second_kv)]
    assert [turn["method"] for turn in turns] == ["rdkv", "rdkv"]
    assert turns[0]["reused_tokens"] == 0
    assert turns[1]["reused_tokens"] >= turns[0]["prompt_tokens"]
    assert all(3 * turn["shipped_bytes"] < turn["full_bytes"] for turn in turns)

    command = chat.strip().replace(".venv/bin/kvferry", f"'{Path(sys.executable).parent}/kvferry'")
    shown = run(
        ["bash", "-c", f"{command} --url http://{address}"],
        given="what is the magic number of the green library ?\n",
    )
    assert "session hello" in shown
    assert "8 8 1 9" in shown
    assert "shipped" in shown


def test_a_stored_document_is_asked_about(address: str) -> None:
    store, ask = blocks(PAGES["documents.md"], "bash")
    stored = json.loads(run(["bash", "-c", store.replace(DEFAULT_ADDRESS, address)]))
    assert stored["id"] == "castle"
    answer = json.loads(run(["bash", "-c", ask.replace(DEFAULT_ADDRESS, address)]))
    assert answer["choices"][0]["message"]["content"] == "4 2 7 1"


def test_metrics_have_the_names_of_vllm_that_the_page_lists(address: str) -> None:
    text = run(["curl", "-s", f"http://{address}/metrics"])
    families = {family.name for family in text_string_to_metric_families(text)}
    rows = re.findall(r"^\| `(vllm:\w+)` \| (.*) \|$", PAGES["coming-from-vllm.md"], flags=re.MULTILINE)
    assert {name.removesuffix("_total") for name, _ in rows} == {
        name for name in families if name.startswith("vllm:")
    }
    ours = {name for _, origin in rows for name in re.findall(r"kvferry_\w+", origin)}
    assert {name.removesuffix("_total") for name in ours} <= families


def test_the_transcript_is_a_real_one(address: str) -> None:
    (transcript,) = blocks(FIRST_STEPS, "text")
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
    found = re.findall(r"^(?:\.venv/bin/)?kvferry (\w+) +(--.*)$", EVERYTHING, flags=re.MULTILINE)
    assert {"prefill", "decode", "router", "bench", "plan"} <= {command for command, _ in found}
    for command, options in found:
        assert set(re.findall(r"--[a-z-]+", options)) <= options_of(command)


def test_options_in_tables_exist_where_they_are_said_to() -> None:
    rows = re.findall(r"^\| (`--[^|]*) \| ([^|]*) \|", PAGES["configuration.md"], flags=re.MULTILINE)
    assert rows
    roles = {"all": list(CONFIGS), "workers": ["prefill", "decode"]}
    for options, owners in rows:
        commands = [c for owner in owners.strip().split(", ") for c in roles.get(owner, [owner])]
        for option in re.findall(r"--[a-z-]+", options):
            for command in commands:
                assert option in options_of(command), (option, command)


def test_variables_exist() -> None:
    known = {variable_name(field) for settings in command_line.known for field in settings.model_fields}
    assert set(re.findall(r"KVFERRY_[A-Z][A-Z_]*", EVERYTHING)) <= known


def test_make_targets_exist() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"`?\bmake ([a-z]+\d*(?:-[a-z]+)*)\b", commands_in(EVERYTHING)))
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_methods_in_the_table_are_those_that_exist() -> None:
    table = PAGES["methods.md"].partition("# Methods")[2].partition("## ")[0].partition("What they cost")[0]
    assert set(re.findall(r"^\| `([\w-]+)` \|", table, flags=re.MULTILINE)) == set(PRESETS)


def test_paths_that_are_named_exist() -> None:
    paths = re.findall(r"`([a-z]+/[a-z_/]+(?:\.py)?/?)`", EVERYTHING)
    paths += re.findall(r"\]\(([A-Z]+)\)", README)
    tree = PAGES["architecture.md"].partition("## Map of the repository")[2].partition("## ")[0]
    paths += (mapped := re.findall(r"^([a-z]+/\S*)", tree, flags=re.MULTILINE))
    assert len(mapped) > 15
    assert not [path for path in paths if not (REPOSITORY / path).exists()]


def commands_in(text: str) -> str:
    """What stands in code spans and code blocks."""
    return "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, flags=re.DOTALL))


def test_the_method_of_the_page_is_found_by_its_entry_point_and_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source,) = blocks(PAGES["writing-a-method.md"], "python")
    (entry_points,) = blocks(PAGES["writing-a-method.md"], "toml")
    (group, entries) = tomllib.loads(entry_points)["project"]["entry-points"].popitem()
    (tmp_path / "my_package.py").write_text(source)
    info = tmp_path / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    lines = "\n".join(f"{name} = {target}" for name, target in entries.items())
    (info / "entry_points.txt").write_text(f"[{group}]\n{lines}\n")
    script = (
        "from kvferry.shared.compression.plan import Budget\n"
        "from kvferry.shared.compression.presets import plan_for\n"
        "from kvferry.shared.model.loading import load_model\n"
        "from kvferry.tools.oracle import OneProcessGenerator\n"
        "from kvferry.shared.sampling.params import SamplingParams\n"
        "plan = plan_for('every-other', budget=Budget(tokens=20), overrides={'offset': 0})\n"
        "model = load_model('demo', device='cpu')\n"
        "sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)\n"
        "tokens = OneProcessGenerator(model).generate(list(range(10, 50)), plan=plan, sampling=sampling)\n"
        "print(len(tokens))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert run([sys.executable, "-c", script]).split() == ["4"]
