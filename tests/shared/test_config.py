"""Options and variables of a settings class: precedence, mistakes, help."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from kvferry.services.launcher.cli import command_line
from kvferry.shared.errors import ConfigurationError, KvferryError
from kvferry.shared.process.command_line import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    CommandLine,
    check_environment,
    run_app,
)
from kvferry.shared.process.config import ServiceSettings, Settings, WorkerSettings
from kvferry.shared.process.options import (
    CAPACITY,
    TIMEOUTS,
    Bytes,
    Seconds,
    parse_bytes,
    parse_seconds,
    show_bytes,
    show_seconds,
)
from kvferry.shared.process.version import VERSION


class Sample(ServiceSettings):
    """One field of each kind that services use."""

    num_blocks: int = Field(4, ge=1, description="blocks kept, 100% of them")
    buffer_bytes: Annotated[Bytes, CAPACITY] = Field(64 << 20, ge=1, description="host memory")
    wait_s: Annotated[Seconds, TIMEOUTS] = Field(0.5, ge=0, description="how long to wait")
    mode: Literal["fast", "exact"] = Field("exact", description="how to work")
    in_process: bool = Field(False, description="one process")
    keys: str = Field("", repr=False, description="secret keys")


class Other(ServiceSettings):
    """Another service's options."""

    arena_bytes: int = Field(0, ge=0, description="memory")


class Run:
    """An app with one command, and what the command got."""

    def __init__(self, settings: type[Settings] = Sample) -> None:
        self.got: list[Settings] = []
        line = CommandLine("kvferry", "Sample.")
        line.known += [Sample, Other]
        self.app = line.app

        @line.command(settings, hidden=["ready_file"])
        def sample(config: Settings) -> int:
            """A sample."""
            self.got.append(config)
            return 0

    def __call__(self, *arguments: str) -> int:
        with pytest.raises(SystemExit) as caught:
            run_app(self.app, arguments)
        assert isinstance(caught.value.code, int)
        return caught.value.code


def parse(*arguments: str) -> Sample:
    run = Run()
    assert run("sample", *arguments) == 0
    (config,) = run.got
    assert isinstance(config, Sample)
    return config


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the sample command with wrong options; returns what it says of them."""

    def refused(*arguments: str, settings: type[Settings] = Sample) -> str:
        assert Run(settings)("sample", *arguments) == EXIT_USAGE
        shown = capsys.readouterr()
        assert shown.out == ""
        return shown.err

    return refused


def test_option_beats_variable_beats_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse().num_blocks == 4
    monkeypatch.setenv("KVFERRY_NUM_BLOCKS", "5")
    assert parse().num_blocks == 5
    assert parse("--num-blocks", "6").num_blocks == 6
    assert parse("--num-blocks=7", "--wait-s", "2").wait_s == 2.0
    assert parse("--num-blocks", "7", "--num-blocks", "8").num_blocks == 8


def test_flags_can_be_set_and_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse("--in-process").in_process
    monkeypatch.setenv("KVFERRY_IN_PROCESS", "true")
    assert parse().in_process
    assert not parse("--no-in-process").in_process


def test_fields_set_tell_what_the_user_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_WAIT_S", "1")
    assert parse("--mode", "fast").model_fields_set == {"wait_s", "mode"}


def test_empty_variable_means_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_NUM_BLOCKS", "")
    assert parse().num_blocks == 4


def test_unknown_option_suggests_the_nearest(refuse: Callable[..., str]) -> None:
    assert refuse("--num-block", "3") == (
        "kvferry sample: Unknown option: --num-block. Did you mean --num-blocks? See kvferry sample --help.\n"
    )


def test_an_unknown_options_value_is_not_repeated(refuse: Callable[..., str]) -> None:
    assert "Did you mean --keys?" in (told := refuse("--key=S3CRET"))
    assert "S3CRET" not in told


def test_hidden_fields_are_no_options(refuse: Callable[..., str]) -> None:
    assert "Unknown option: --ready-file" in refuse("--ready-file", "x")


def test_unknown_variable_suggests_the_nearest(
    monkeypatch: pytest.MonkeyPatch, refuse: Callable[..., str]
) -> None:
    monkeypatch.setenv("KVFERRY_LOGLEVEL", "debug")
    assert refuse() == (
        "kvferry sample: KVFERRY_LOGLEVEL is not a known variable; did you mean KVFERRY_LOG_LEVEL?\n"
    )


def test_variables_of_other_services_are_accepted() -> None:
    check_environment([Sample, Other], {"KVFERRY_ARENA_BYTES": "1", "PATH": "/bin", "kvferry_mode": "fast"})
    with pytest.raises(ConfigurationError, match="KVFERRY_ARENA_BYTES"):
        check_environment([Sample], {"KVFERRY_ARENA_BYTES": "1"})


def test_a_name_near_to_nothing_lists_what_is_known() -> None:
    with pytest.raises(ConfigurationError, match="known are KVFERRY_BUFFER_BYTES, KVFERRY_IN_PROCESS"):
        check_environment([Sample], {"KVFERRY_ZZZZZZZZZZZZZZZZZZZZZZ": "1"})


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("--num-blocks", "0", "greater than or equal to 1"),
        ("--num-blocks", "many", "valid integer"),
        ("--wait-s", "-1", "greater than or equal to 0"),
        ("--wait-s", "5 parsecs", "a number, or one with a unit (ms, s, min, m, h, d)"),
        ("--wait-s", "soon", "a number, or one with a unit"),
        ("--buffer-bytes", "0B", "greater than or equal to 1"),
        ("--buffer-bytes", "10GiBs", "a number, or one with a unit (512MB, 10GiB)"),
        ("--buffer-bytes", "many", "a number, or one with a unit"),
        ("--mode", "slow", "'fast' or 'exact'"),
        ("--log-level", "loud", "'debug', 'info', 'warning' or 'error'"),
    ],
)
def test_invalid_option_names_itself_its_value_and_what_is_allowed(
    option: str, value: str, allowed: str, refuse: Callable[..., str]
) -> None:
    told = refuse(option, value)
    assert told.startswith(f"kvferry sample: {option} is {value!r}; ")
    assert allowed in told


def test_every_mistake_has_a_line(monkeypatch: pytest.MonkeyPatch, refuse: Callable[..., str]) -> None:
    monkeypatch.setenv("KVFERRY_WAIT_S", "-1")
    assert refuse("--num-blocks", "0", "--mode", "slow").splitlines() == [
        "kvferry sample: --num-blocks is '0'; input should be greater than or equal to 1",
        "KVFERRY_WAIT_S is '-1'; input should be greater than or equal to 0",
        "--mode is 'slow'; input should be 'fast' or 'exact'",
    ]


def test_invalid_variable_is_named_as_a_variable(
    monkeypatch: pytest.MonkeyPatch, refuse: Callable[..., str]
) -> None:
    monkeypatch.setenv("KVFERRY_NUM_BLOCKS", "-2")
    assert refuse().startswith("kvferry sample: KVFERRY_NUM_BLOCKS is '-2'; ")


def test_secret_values_are_not_repeated(refuse: Callable[..., str]) -> None:
    class Keys(ServiceSettings):
        keys: str = Field("", repr=False, pattern="^[a-z]*$", description="secret keys")

    told = refuse("--keys", "S3CRET", settings=Keys)
    assert "--keys is hidden" in told
    assert "S3CRET" not in told


def test_option_without_its_value_points_to_help(refuse: Callable[..., str]) -> None:
    told = refuse("--num-blocks")
    assert "--num-blocks requires an argument. See kvferry sample --help." in told


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("0", 0), ("4096", 4096), ("10GiB", 10 << 30), ("512MB", 512_000_000), ("1.5 kib", 1536), ("7B", 7)],
)
def test_bytes_may_have_a_unit(text: str, size_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert int(str(parse_bytes(text))) == size_bytes
    if size_bytes:
        assert parse("--buffer-bytes", text).buffer_bytes == size_bytes
        monkeypatch.setenv("KVFERRY_BUFFER_BYTES", text)
        assert parse().buffer_bytes == size_bytes


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [("0", 0.0), ("2.5", 2.5), ("1e3", 1000.0), ("30s", 30.0), ("250ms", 0.25), ("5min", 300.0),
     ("5 m", 300.0), ("1.5h", 5400.0), ("7d", 604_800.0)],
)  # fmt: skip
def test_durations_may_have_a_unit(text: str, duration_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    assert float(str(parse_seconds(text))) == duration_s
    assert parse("--wait-s", text).wait_s == duration_s
    monkeypatch.setenv("KVFERRY_WAIT_S", text)
    assert parse().wait_s == duration_s


def test_defaults_are_shown_as_an_option_takes_them() -> None:
    shown = [show_bytes(size) for size in (0, 100, 4 << 30, 3 << 19)]
    assert shown == ["0", "100B", "4GiB", "1.5MiB"]
    shown = [show_seconds(duration) for duration in (0.0, 0.25, 2.0, 2.5, 90.0, 300.0, 7200.0, 604_800.0)]
    assert shown == ["0", "250ms", "2s", "2500ms", "90s", "5min", "2h", "7d"]
    for settings in command_line.known:
        for name, field in settings.model_fields.items():
            if name.endswith("_bytes"):
                assert int(str(parse_bytes(show_bytes(field.default)))) == field.default, name
            if name.endswith("_s"):
                assert float(str(parse_seconds(show_seconds(field.default)))) == field.default, name


def test_help_shows_every_option_with_description_and_default_under_its_heading(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    assert Run()("sample", "--help") == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--num-blocks INT blocks kept, 100% of them [default: 4]" in text
    assert "--mode CHOICE how to work [choices: fast, exact] [default: exact]" in text
    assert "--keys STR secret keys [default: none]" in text
    assert "--in-process --no-in-process one process [default: off]" in text
    assert "─ Capacity ─" in text
    assert "--buffer-bytes BYTES host memory [default: 64MiB]" in text.partition("─ Capacity ─")[2]
    assert "--wait-s TIME how long to wait [default: 500ms]" in text.partition("─ Timeouts")[2]
    assert "KVFERRY_LOG_LEVEL" in text


def test_version_names_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    assert Run()("--version") == 0
    assert capsys.readouterr().out == f"kvferry {VERSION}\n"


def test_a_shell_completes_commands_options_and_choices(tmp_path: Path) -> None:
    script = tmp_path / "completion"
    script.write_text(Run().app.generate_completion(shell="bash"), encoding="utf-8")

    def completed(*words: str) -> set[str]:
        line = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _kvferry"
        done = subprocess.run(
            ["bash", "-c", f"source {script}; {line}; printf '%s\\n' \"${{COMPREPLY[@]}}\""],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        return set(done.stdout.split())

    assert "sample" in completed("kvferry", "sa")
    assert completed("kvferry", "sample", "--num") == {"--num-blocks"}
    assert completed("kvferry", "sample", "--mode", "''") == {"fast", "exact"}


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ConfigurationError("--x is 1; it must be 2"), EXIT_USAGE, "--x is 1; it must be 2"),
        (KvferryError("no router"), EXIT_FAILED, "no router"),
        (KeyboardInterrupt(), EXIT_INTERRUPTED, ""),
    ],
)
def test_a_command_that_fails_ends_with_its_message_and_code(
    error: BaseException, code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = CommandLine("kvferry", "Sample.")

    @line.command(Sample)
    def sample(config: Sample) -> int:
        raise error

    with pytest.raises(SystemExit) as caught:
        run_app(line.app, ["sample"])
    assert caught.value.code == code
    assert capsys.readouterr().err == (f"kvferry sample: {told}\n" if told else "")


def test_every_worker_option_has_a_description() -> None:
    assert all(field.description for field in WorkerSettings.model_fields.values())
