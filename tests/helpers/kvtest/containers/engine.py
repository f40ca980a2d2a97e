"""A Docker engine for a test: dockerd in a network namespace of its own, everything below one folder.

The namespace holds the engine's bridges and packet filter rules, and takes them along when it is removed. A
pair of virtual interfaces joins it to the machine, so that published ports can be reached.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 120.0
PROGRAMS = {
    "docker": "docker.io",
    "dockerd": "docker.io",
    "mmdebstrap": "mmdebstrap",
    "ip": "iproute2",
    "iptables": "iptables",
    "nsenter": "util-linux",
}


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A running engine. `address` is where its published ports are reached."""

    folder: Path
    address: str
    environment: dict[str, str]

    def docker(self, *arguments: str, timeout_s: float = 300.0, input: str | None = None) -> str:
        """Run the docker client; returns what it printed."""
        # Its builds need nothing of BuildKit, which some clients have only as a plugin.
        environment = {**self.environment, "DOCKER_BUILDKIT": "0"}
        return run(["docker", *arguments], timeout_s=timeout_s, input=input, env=environment)

    @staticmethod
    def run(command: list[str], *, timeout_s: float, env: dict[str, str]) -> str:
        """Any command; raises with what it printed if it fails."""
        return run(command, timeout_s=timeout_s, env=env)


def run(
    command: list[str],
    *,
    timeout_s: float = 60.0,
    input: str | None = None,
    env: dict[str, str] | None = None,
) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, input=input, env=env, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}")
    return done.stdout


def why_impossible() -> str:
    """Why this machine cannot run an engine; empty if it can, and then it must."""
    if os.geteuid() != 0:
        return "the tests do not run as root"
    for program, package in PROGRAMS.items():
        if shutil.which(program) is None:
            return f"{program} is not installed; on Debian: apt install {package}"
    probe = subprocess.run(
        ["unshare", "--mount", "--net", "--pid", "--fork", "true"], capture_output=True, text=True, timeout=60
    )
    return "" if probe.returncode == 0 else f"the kernel refuses namespaces: {probe.stderr.strip()}"


@contextlib.contextmanager
def running_engine(folder: Path) -> Iterator[Engine]:
    """An engine with its data below `folder` until the block ends; raises with its log if it fails."""
    name, number = f"kvferry{os.getpid()}", os.getpid() % 64
    ours, theirs = f"169.254.77.{number * 4 + 1}", f"169.254.77.{number * 4 + 2}"
    socket = f"unix://{folder / 'docker.sock'}"
    environment = {**os.environ, "DOCKER_HOST": socket, "DOCKER_CONFIG": str(folder / "client")}
    environment.pop("DOCKER_CONTEXT", None)
    with _namespace(name, ours, theirs), (folder / "dockerd.log").open("w+") as log:
        process = subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{name}", "dockerd", "--host", socket,
             "--data-root", str(folder / "data"), "--exec-root", str(folder / "exec"),
             "--pidfile", str(folder / "docker.pid")],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            engine = Engine(folder=folder, address=theirs, environment=environment)
            _await_start(engine, process, folder / "dockerd.log")
            yield engine
            for container in engine.docker("ps", "--quiet").split():
                engine.docker("kill", container)
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            finally:
                process.kill()
                process.wait(STOP_TIMEOUT_S)
                _unmount(folder)


@contextlib.contextmanager
def _namespace(name: str, ours: str, theirs: str) -> Iterator[None]:
    run(["ip", "netns", "add", name])
    try:
        inside = ["ip", "-n", name]
        run(["ip", "link", "add", name, "type", "veth", "peer", "name", "outside", "netns", name])
        run(["ip", "address", "add", f"{ours}/30", "dev", name])
        run(["ip", "link", "set", name, "up"])
        run([*inside, "address", "add", f"{theirs}/30", "dev", "outside"])
        run([*inside, "link", "set", "outside", "up"])
        run([*inside, "link", "set", "lo", "up"])
        yield
    finally:
        # The interface on our side goes with its peer.
        run(["ip", "netns", "del", name])


def _await_start(engine: Engine, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"dockerd did not start:\n{log.read_text()[-4000:]}")
        with contextlib.suppress(RuntimeError):
            engine.docker("version")
            return
        time.sleep(0.2)


def _unmount(folder: Path) -> None:
    """What the engine left mounted below its folder, the latest first."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    for mount in reversed([mount for mount in mounts if mount.startswith(f"{folder}/")]):
        run(["umount", "--lazy", mount])
