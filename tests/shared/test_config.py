"""Options and variables of a settings class: precedence, mistakes, help."""

from __future__ import annotations

from typing import Literal

import pytest
from pydantic import Field

from kvferry.shared.command_line import check_environment, exit_with_usage, parse_settings
from kvferry.shared.config import ServiceSettings, WorkerSettings
from kvferry.shared.errors import ConfigurationError


class Sample(ServiceSettings):
    """One field of each kind that services use."""

    num_blocks: int = Field(4, ge=1, description="blocks kept, 100% of them")
    wait_s: float = Field(0.5, ge=0, description="seconds to wait")
    mode: Literal["fast", "exact"] = Field("exact", description="how to work")
    in_process: bool = Field(False, description="one process")
    keys: str = Field("", repr=False, description="secret keys")


class Other(ServiceSettings):
    """Another service's options."""

    arena_bytes: int = Field(0, ge=0, description="memory")


def parse(*arguments: str) -> Sample:
    return parse_settings(
        Sample,
        arguments,
        command="kvferry sample",
        description="Sample.",
        known=[Other],
        hidden=["ready_file"],
    )


def test_option_beats_variable_beats_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse().num_blocks == 4
    monkeypatch.setenv("KVFERRY_NUM_BLOCKS", "5")
    assert parse().num_blocks == 5
    assert parse("--num-blocks", "6").num_blocks == 6
    assert parse("--num-blocks=7", "--wait-s", "2").wait_s == 2.0


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


def test_unknown_option_suggests_the_nearest() -> None:
    with pytest.raises(
        ConfigurationError, match=r"--num-block is not an option .* did you mean --num-blocks\?"
    ):
        parse("--num-block", "3")


def test_hidden_fields_are_no_options() -> None:
    with pytest.raises(ConfigurationError, match="--ready-file is not an option"):
        parse("--ready-file", "x")


def test_unknown_variable_suggests_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_LOGLEVEL", "debug")
    with pytest.raises(
        ConfigurationError,
        match=r"KVFERRY_LOGLEVEL is not a known variable; did you mean KVFERRY_LOG_LEVEL\?",
    ):
        parse()


def test_variables_of_other_services_are_accepted() -> None:
    check_environment([Sample, Other], {"KVFERRY_ARENA_BYTES": "1", "PATH": "/bin", "kvferry_mode": "fast"})
    with pytest.raises(ConfigurationError, match="KVFERRY_ARENA_BYTES"):
        check_environment([Sample], {"KVFERRY_ARENA_BYTES": "1"})


def test_a_name_near_to_nothing_lists_what_is_known() -> None:
    with pytest.raises(ConfigurationError, match="known are KVFERRY_IN_PROCESS, KVFERRY_KEYS"):
        check_environment([Sample], {"KVFERRY_ZZZZZZZZZZZZZZZZZZZZZZ": "1"})


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("--num-blocks", "0", "greater than or equal to 1"),
        ("--num-blocks", "many", "valid integer"),
        ("--wait-s", "-1", "greater than or equal to 0"),
        ("--mode", "slow", "'fast' or 'exact'"),
        ("--log-level", "loud", "'debug', 'info', 'warning' or 'error'"),
    ],
)
def test_invalid_option_names_itself_its_value_and_what_is_allowed(
    option: str, value: str, allowed: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(option, value)
    assert caught.value.message.startswith(f"{option} is {value!r}; ")
    assert allowed in caught.value.message


def test_invalid_variable_is_named_as_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_NUM_BLOCKS", "-2")
    with pytest.raises(ConfigurationError, match=r"^KVFERRY_NUM_BLOCKS is '-2'; .* 1"):
        parse()


def test_secret_values_are_not_repeated() -> None:
    class Keys(ServiceSettings):
        keys: str = Field("", repr=False, pattern="^[a-z]*$", description="secret keys")

    with pytest.raises(ConfigurationError, match="--keys is hidden") as caught:
        parse_settings(Keys, ["--keys", "S3CRET"], command="kvferry keys", description="Keys.")
    assert "S3CRET" not in caught.value.message


def test_option_without_its_value_points_to_help() -> None:
    with pytest.raises(ConfigurationError, match=r"--num-blocks.*see kvferry sample --help"):
        parse("--num-blocks")


def test_help_shows_every_option_with_description_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--num-blocks N blocks kept, 100% of them (default: 4)" in text
    assert "--mode {fast,exact} how to work (default: exact)" in text
    assert "--keys VALUE secret keys (default: none)" in text
    assert "--in-process, --no-in-process one process (default: off)" in text
    assert "KVFERRY_LOG_LEVEL" in text


def test_version_names_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--version")
    assert capsys.readouterr().out.startswith("kvferry ")


def test_exit_with_usage_is_code_2_with_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        exit_with_usage(ConfigurationError("--x is 1; it must be 2"), "kvferry sample")
    assert caught.value.code == 2
    assert capsys.readouterr().err == "kvferry sample: --x is 1; it must be 2\n"


def test_every_worker_option_has_a_description() -> None:
    assert all(field.description for field in WorkerSettings.model_fields.values())
