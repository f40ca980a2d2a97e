"""The CPU stack of the repository's compose files, without Grafana, up until the block ends."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

REPOSITORY = Path(__file__).parents[4]
FILES = ("docker-compose.yml", "docker-compose.cpu.yml")
BUILD_TIMEOUT_S = 1500.0
UP_TIMEOUT_S = 900.0
API_KEY = "container-test"
VARIABLES = {
    "PORT": "8000",
    "PROMETHEUS_PORT": "9090",
    "THREADS": "1",
    "ARENA_BYTES": str(256 << 20),
    "HISTORY_BYTES": str(512 << 20),
    "REDIS_MEMORY": "256mb",
    # Long enough for a busy machine to end a stream.
    "DRAIN_S": "120",
    "STOP_GRACE": "240s",
    # The stand-in base tells pip where its wheels are.
    "TORCH_INDEX": "",
    # The stand-in base has no C compiler.
    "NATIVE": "",
}


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A running stack. `start_s` is how long it took from images to a router that is ready."""

    engine: Any
    program: Path
    environment: dict[str, str]
    start_s: float = 0.0

    @property
    def base_url(self) -> str:
        return f"http://{self.engine.address}:{VARIABLES['PORT']}"

    @property
    def prometheus_url(self) -> str:
        return f"http://{self.engine.address}:{VARIABLES['PROMETHEUS_PORT']}"

    def compose(self, *arguments: str, timeout_s: float = 300.0) -> str:
        files = [argument for name in FILES for argument in ("--file", str(REPOSITORY / name))]
        command = [str(self.program), *files, "--env-file", os.devnull, *arguments]
        return str(self.engine.run(command, timeout_s=timeout_s, env=self.environment))

    def containers(self) -> dict[str, dict[str, Any]]:
        """What the engine knows of each service's container."""
        ids = self.engine.docker(
            "ps", "--all", "--quiet", "--filter", "label=com.docker.compose.project"
        ).split()
        inspected = json.loads(self.engine.docker("inspect", *ids))
        return {entry["Config"]["Labels"]["com.docker.compose.service"]: entry for entry in inspected}

    def execute(self, service: str, *command: str) -> str:
        return self.compose("exec", "-T", service, *command)

    def kill(self, service: str) -> None:
        """End a service's process as a crash does: `docker kill` would also end its restarts."""
        os.kill(int(self.containers()[service]["State"]["Pid"]), signal.SIGKILL)


@contextlib.contextmanager
def up(engine: Any) -> Iterator[Stack]:
    """Build the image, start the services in their order, and take everything down at the end."""
    spec = importlib.util.find_spec("compose")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    environment = {
        name: value for name, value in engine.environment.items() if not name.startswith("KVFERRY_")
    }
    environment |= {**VARIABLES, "BIND": engine.address, "MONITORING_BIND": engine.address}
    program = Path(spec.submodule_search_locations[0]) / "docker-compose"
    stack = Stack(engine=engine, program=program, environment=environment)
    stack.compose("build", "router", timeout_s=BUILD_TIMEOUT_S)
    began_s = time.monotonic()
    folder = tempfile.TemporaryDirectory(prefix="kvferry-keys-")
    keys = Path(folder.name) / "keys.toml"
    digest = hashlib.sha256(API_KEY.encode()).hexdigest()
    keys.write_text(f'[[key]]\nname = "test"\nhash = "sha256:{digest}"\nscopes = ["admin"]\n')
    environment["API_KEYS_FILE"] = str(keys)
    try:
        stack.compose("up", "--detach", "--no-build", "prometheus", timeout_s=UP_TIMEOUT_S)
        yield Stack(
            engine=engine, program=program, environment=environment, start_s=time.monotonic() - began_s
        )
    except BaseException:
        with contextlib.suppress(RuntimeError, httpx.HTTPError):
            print(stack.compose("logs", "--no-color", "--tail", "60"))  # noqa: T201
        raise
    finally:
        stack.compose("down", "--volumes", "--timeout", "20")
        folder.cleanup()
