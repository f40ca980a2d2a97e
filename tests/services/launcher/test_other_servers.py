"""The flags of other servers: what becomes of each."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvferry.services.launcher import other_servers
from kvferry.services.launcher.config import HIDDEN_FROM_SERVE, ServeConfig
from kvferry.services.launcher.other_servers import as_ours
from kvferry.shared.errors import ConfigurationError


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (["Qwen/Qwen3-4B"], ["--model", "Qwen/Qwen3-4B"]),
        (["--port", "9000"], ["--listen", "127.0.0.1:9000"]),
        (["--port=9000", "--host=::"], ["--listen", "[::]:9000"]),
        (["--host", "0.0.0.0"], ["--listen", "0.0.0.0:8000"]),
        (["m", "-tp", "2", "--api-key=k"], ["--model", "m", "--tensor-parallel", "2", "--api-keys", "k"]),
        (["-m", "a.gguf", "-c", "4096"], ["--model", "a.gguf", "--max-model-len", "4096"]),
        (["--model", "m", "--in-process"], ["--model", "m", "--in-process"]),
        (["--listen=127.0.0.1:0"], ["--listen=127.0.0.1:0"]),
        ([], []),
    ],
)
def test_flags_become_options_of_ours(theirs: list[str], ours: list[str]) -> None:
    assert as_ours(theirs) == (ours, [])


def test_every_option_that_they_become_is_one() -> None:
    options = {
        f"--{name.replace('_', '-')}" for name in ServeConfig.model_fields if name not in HIDDEN_FROM_SERVE
    }
    assert set(other_servers._SAME.values()) <= options
    every = (other_servers._SAME, other_servers._NEEDLESS, other_servers._DECIDED, other_servers._REFUSED)
    assert not options & {flag for flags in every for flag in flags}


def test_what_changes_nothing_is_left_out_with_a_sentence() -> None:
    ours, notes = as_ours(
        ["m", "--enable-prefix-caching", "--gpu-memory-utilization", "0.9", "--threads", "1"]
    )
    assert ours == ["--model", "m", "--threads", "1"]
    assert notes == [
        "--enable-prefix-caching is left out: prompts are always reused",
        "--gpu-memory-utilization 0.9 is left out: set --arena-bytes",
    ]


@pytest.mark.parametrize(
    ("theirs", "ours", "notes"),
    [
        (["m", "-fa", "-c", "4096"], ["--model", "m", "--max-model-len", "4096"], ["-fa"]),
        (["m", "-fa", "on", "--seed", "-1"], ["--model", "m"], ["-fa on", "--seed -1"]),
        (["m", "-ctk", "q8_0", "-ctv=q8_0"], ["--model", "m"], ["-ctk q8_0", "-ctv q8_0"]),
        (["--alias", "mine", "--ssl-key-file=k"], ["--model-name", "mine", "--tls-key", "k"], []),
    ],
)
def test_a_flag_takes_the_value_that_it_has(theirs: list[str], ours: list[str], notes: list[str]) -> None:
    found, told = as_ours(theirs)
    assert found == ours
    assert [note.partition(" is left out: ")[0] for note in told] == notes


@pytest.mark.parametrize("flag", sorted(other_servers._REFUSED))
def test_what_would_change_answers_is_refused_with_a_sentence(flag: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{flag} is no option of kvferry serve: "):
        as_ours(["m", flag, "x"])


def test_a_flag_without_its_value_is_a_mistake() -> None:
    with pytest.raises(ConfigurationError, match="--port has no value"):
        as_ours(["m", "--port"])
    with pytest.raises(ConfigurationError, match="--host has no value"):
        as_ours(["m", "--host", "--port", "1"])


def test_the_command_says_it_and_ends_with_code_2() -> None:
    script = "from kvferry.services.launcher.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "serve", "m", "--enforce-eager", "--trust-remote-code"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    told = "--trust-remote-code is no option of kvferry serve: code of a checkpoint is never run"
    assert done.stderr == f"kvferry serve: {told}\n"
