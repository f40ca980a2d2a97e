"""The built wheel, installed outside the repository: what it holds, and that it serves from there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import zipfile
from pathlib import Path

import httpx
import pytest

REPOSITORY = Path(__file__).parents[2]
START_TIMEOUT_S = 180.0


def test_wheel_holds_the_demo_model_protocol_and_typing_marker(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in (
        "kvferry/models/demo/config.json",
        "kvferry/models/demo/model.safetensors",
        "kvferry/models/demo/tokenizer.json",
        "kvferry/models/calibration/demo.epsilon.json",
        "kvferry/models/calibration/text/README.md",
        "kvferry/models/calibration/text/engineers-thumb.txt",
        "kvferry/proto/control.proto",
        "kvferry/proto/control_pb2.py",
        "kvferry/proto/control_pb2.pyi",
        "kvferry/proto/control_pb2_grpc.py",
        "kvferry/proto/BLOCKS.md",
        "kvferry/py.typed",
        "kvferry/services/launcher/cli.py",
        "kvferry/tools/evaluation/command.py",
        "kvferry/tools/recall/recipes/cpu.json",
    ):
        assert name in names, name


def test_wheel_is_for_every_platform_and_so_are_its_dependencies(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        needed = [
            line for line in archive.read(name).decode().splitlines() if line.startswith("Requires-Dist:")
        ]
    assert len(needed) > 20
    for_some = [line for line in needed if "platform" in line or "os_name" in line]
    assert all("extra ==" in line for line in for_some), for_some


def test_wheel_holds_nothing_outside_the_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvferry"}
    assert not [name for name in names if "/tests/" in name or name.endswith((".pyc", ".log"))]


def test_modules_come_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    script = (
        "import kvferry, kvferry.shared.wire.frames as m; print(list(kvferry.__path__)); print(m.__file__)"
    )
    done = subprocess.run(
        [str(installed / "bin" / "python"), "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=800,
        check=True,
    )
    path, module = done.stdout.splitlines()
    assert str(REPOSITORY) not in done.stdout
    assert path.startswith(f"['{installed}")
    assert module.startswith(str(installed))


@pytest.mark.parametrize("command", [("eval",), ("calibrate",), ("calibrate", "machine"), ("train-demo",)])
def test_tools_are_commands_of_the_installed_wheel(
    installed: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    done = subprocess.run(
        [str(installed / "bin" / "kvferry"), *command, "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=800,
        check=True,
    )
    assert f"kvferry {' '.join(command)}" in done.stdout


def test_installed_wheel_serves_the_demo_model_through_real_processes(
    installed: Path, tmp_path: Path
) -> None:
    ready_file = tmp_path / "ready"
    log = (tmp_path / "serve.log").open("w+", encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
    process = subprocess.Popen(
        [str(installed / "bin" / "kvferry"), "serve", "--listen", "127.0.0.1:0", "--threads", "1",
         "--arena-bytes", str(64 << 20), "--ready-file", str(ready_file)],
        cwd=tmp_path, env=environment, stdout=log, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not ready_file.exists():
            assert process.poll() is None, (tmp_path / "serve.log").read_text()
            assert time.monotonic() < deadline_s, (tmp_path / "serve.log").read_text()
            time.sleep(0.1)
        ready = json.loads(ready_file.read_text(encoding="utf-8"))
        for role in ("prefill", "decode", "router"):
            assert _executable_environment(int(ready[f"{role}_pid"])) == installed
        reply = httpx.post(
            f"http://{ready['address']}/v1/chat/completions",
            json={
                "model": "demo",
                "messages": [{"role": "user", "content": "the pin of the red castle is 4 2 7 1 ."}],
                "max_tokens": 4,
            },
            timeout=60,
            trust_env=False,
        )
        assert reply.status_code == 200, reply.text
        assert reply.json()["kv"]["shipped_bytes"] > 0
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=60)
        log.close()
    assert code == 0, (tmp_path / "serve.log").read_text()


def _executable_environment(pid: int) -> Path:
    """The environment whose interpreter a process was started with."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return Path(os.fsdecode(command[0])).parents[1]
