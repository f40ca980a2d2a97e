"""The `kvferry` command in a process of its own: help, mistakes, exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from kvferry.services.launcher import cli
from kvferry.services.launcher.config import CONFIGS, HIDDEN_FROM_SERVE, ServeConfig


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
    return subprocess.run(
        [sys.executable, "-c", "from kvferry.services.launcher.cli import main; main()", *arguments],
        env=clean | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_package_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvferry", "--version"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, run("--version").stdout)


def test_unknown_variable_ends_a_service_with_code_2_and_a_suggestion() -> None:
    done = run("decode", KVFERRY_ARENA_BYTE="1")
    assert done.returncode == 2
    assert "kvferry decode: KVFERRY_ARENA_BYTE is not a known variable" in done.stderr
    assert "did you mean KVFERRY_ARENA_BYTES?" in done.stderr


def test_one_environment_may_hold_variables_of_every_service() -> None:
    done = run(
        "decode", "--max-batch-size", "0",
        KVFERRY_ARENA_BYTES="1000000", KVFERRY_HISTORY_BYTES="5", KVFERRY_API_KEYS="x", KVFERRY_SESSION="1",
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == (
        "kvferry decode: --max-batch-size is '0'; input should be greater than or equal to 1\n"
    )


STOPPED_WHILE_IT_STARTS = """
import os, signal, sys


class Stop:
    def find_spec(self, name, path, target=None):
        if name == "kvferry.services.router.server":
            os.kill(os.getpid(), signal.SIGTERM)


sys.meta_path.insert(0, Stop())
from kvferry.services.launcher.cli import main
main()
"""


STOPPED_TWICE = """
import asyncio, os, signal
from kvferry.services.launcher import cli
from kvferry.shared.process import serving


async def serve():
    stopped = asyncio.create_task(serving.wait_for_signal())
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    await stopped
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(30)


cli.run_app = lambda app, arguments: asyncio.run(serve())
cli.main()
"""


@pytest.mark.parametrize("script", [STOPPED_WHILE_IT_STARTS, STOPPED_TWICE], ids=["while it starts", "twice"])
def test_a_service_that_is_process_1_of_a_container_ends_at_once_when_it_is_stopped(script: str) -> None:
    namespace = ("unshare", "--pid", "--fork", "--map-root-user", "--kill-child")
    if subprocess.run([*namespace, "true"], timeout=60, check=False, capture_output=True).returncode != 0:
        pytest.skip("the kernel refuses namespaces of processes")
    command = [*namespace, sys.executable, "-c", script, "router", "--insecure", "--listen", "127.0.0.1:0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert "Traceback" not in done.stderr


def call(*arguments: str) -> object:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    return caught.value.code


def test_help_and_version_need_no_service(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--help") == 0
    text = capsys.readouterr().out
    assert all(f"│ {command} " in text for command in ("serve", "chat", "router", "prefill", "decode"))
    assert call("--version") == 0
    assert capsys.readouterr().out.startswith("kvferry ")


def test_help_and_mistakes_do_not_wait_for_torch() -> None:
    script = (
        "import sys\n"
        "from kvferry.services.launcher.cli import main\n"
        "for words in sys.argv[1:]:\n"
        "    try: main(words.split())\n"
        "    except SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'openai'} & sys.modules.keys()\n"
    )
    commands = (
        "serve",
        "chat",
        "eval",
        "calibrate",
        "router",
        "prefill",
        "decode",
    )
    lines = ["--help", *(f"{command} {rest}" for command in commands for rest in ("--help", "--threads=x"))]
    subprocess.run([sys.executable, "-c", script, *lines], timeout=120, check=True, capture_output=True)


def test_no_command_or_a_wrong_one_is_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert call() == 2
    assert "serve" in capsys.readouterr().err
    assert call("serv") == 2
    assert 'Did you mean "serve"?' in capsys.readouterr().err


def test_completion_installs_itself_for_the_users_shell(tmp_path: Path) -> None:
    done = run("--install-completion", "--shell", "bash", HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    (script,) = (tmp_path / ".local/share/bash-completion/completions").iterdir()
    assert "--arena-bytes" in script.read_text(encoding="utf-8")


def test_a_configuration_error_while_running_is_code_2() -> None:
    done = run("router", "--insecure", "--listen", "192.0.2.1:80")
    assert done.returncode == 2
    assert done.stderr.startswith("kvferry router: listen is '192.0.2.1:80'; ")


def test_serve_has_every_option_of_the_services_or_sets_it_itself() -> None:
    for config in CONFIGS.values():
        assert config.model_fields.keys() <= ServeConfig.model_fields.keys()
    assert ServeConfig.model_fields.keys() >= HIDDEN_FROM_SERVE


@pytest.mark.parametrize("config", cli.command_line.known)
def test_every_option_is_described_and_has_a_default(config: type[ServeConfig]) -> None:
    for name, field in config.model_fields.items():
        assert field.description, name
        assert not field.is_required(), name


def test_a_server_with_keys_may_be_published_without_certs_of_workers() -> None:
    assert ServeConfig(listen="0.0.0.0:8000", api_keys="a").listen == "0.0.0.0:8000"
    with pytest.raises(ValidationError, match="no api_keys; give keys or api_keys_file"):
        ServeConfig(listen="0.0.0.0:8000")
    with pytest.raises(
        ValidationError, match=r"prefill_metrics_listen is '0\.0\.0\.0:9101', which other machines"
    ):
        ServeConfig(prefill_metrics_listen="0.0.0.0:9101")


def test_serve_listens_where_the_router_would() -> None:
    assert ServeConfig().listen == CONFIGS["router"]().model_dump()["listen"]


def test_train_demo_is_a_command_with_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["train-demo", "--help"])
    assert end.value.code == 0
    assert "--recipe" in capsys.readouterr().out
