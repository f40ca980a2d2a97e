"""Downloads from a hub: a small HTTP server of this test, in the place of huggingface.co."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvferry.shared.model.download import _size

SHA = "a" * 40
CONFIG = json.dumps({"model_type": "llama"}).encode()
WEIGHTS = bytes(range(256)) * 50_000
FILES = {
    "config.json": CONFIG,
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"pickled",
    "modeling.py": b"code",
}


class Hub(ThreadingHTTPServer):
    """Serves one model, `org/open`, and knows one gated model, `org/gated`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.gets: list[tuple[str, str | None]] = []
        """Files, and the range that was asked for."""
        self.breaks: list[int] = []
        """After how many bytes the next answers with weights break off."""


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/open/tree/") or path.startswith("/api/models/org/gated/tree/"):
            self._json([
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in FILES.items()
            ])  # fmt: skip
        elif path.startswith(("/api/models/org/open", "/api/models/org/gated")):
            self._json({"id": path.split("/models/")[1], "sha": SHA, "siblings": []})
        elif path.startswith("/org/gated/"):
            self._refuse(401, "GatedRepo")
        elif path.startswith("/org/open/resolve/"):
            self._file(path.rpartition("/")[2], with_body=with_body)
        else:
            self._refuse(401, "RepoNotFound")

    def _json(self, content: Any) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": "no"})

    def _file(self, name: str, *, with_body: bool) -> None:
        data, first = FILES[name], 0
        asked = self.headers.get("Range")
        if asked:
            first = int(asked.removeprefix("bytes=").split("-")[0])
        etag = f'"{hashlib.sha1(data).hexdigest()}"'
        headers = {"ETag": etag, "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        if with_body:
            self.server.gets.append((name, asked))
        body = data[first:]
        if with_body and self.server.breaks and name == "model.safetensors":
            self._head(206 if first else 200, len(body), headers)
            self.wfile.write(body[: self.server.breaks.pop(0)])
            self.close_connection = True
            return
        self._send(206 if first else 200, body, headers, with_body=with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], *, with_body: bool = True) -> None:
        self._head(status, len(body), headers)
        if with_body and self.command != "HEAD":
            self.wfile.write(body)

    def _head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join(timeout=30)
    server.server_close()


class Client:
    """Runs downloads in processes of their own, which read the hub's address when they start."""

    def __init__(self, home: Path, url: str) -> None:
        self.home = home
        own = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HF_", "TRANSFORMERS_OFFLINE"))
        }
        self.environment = {**own, "HF_HOME": str(home), "HF_ENDPOINT": url, "NO_PROXY": "127.0.0.1"}

    def command(self, model: str, *, weights: bool) -> list[str]:
        script = (
            "import sys\n"
            "from kvferry.shared.errors import ConfigurationError\n"
            "from kvferry.shared.model.checkpoint import resolve_model_path\n"
            "try:\n"
            f"    print(resolve_model_path({model!r}, weights={weights}))\n"
            "except ConfigurationError as error:\n"
            "    sys.exit(f'refused: {error}')\n"
        )
        return [sys.executable, "-c", script]

    def run(self, model: str, *, weights: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(model, weights=weights), env={**self.environment, **variables}, capture_output=True,
            text=True, timeout=120, check=False,
        )  # fmt: skip

    def refusal(self, model: str, **variables: str) -> str:
        done = self.run(model, **variables)
        assert done.returncode == 1, done
        line = done.stderr.strip().splitlines()[-1]
        assert line.startswith("refused: "), done.stderr
        return line


@pytest.fixture
def client(hub: Hub, tmp_path: Path) -> Client:
    return Client(tmp_path / "home", hub.url)


def test_configuration_and_weights_are_downloaded_once_and_nothing_else(hub: Hub, client: Client) -> None:
    done = client.run("org/open", weights=False)
    folder = Path(done.stdout.splitlines()[-1])
    assert {file.name for file in folder.iterdir()} == {"config.json"}
    done = client.run("org/open")
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert [name for name, _ in hub.gets] == ["config.json", "model.safetensors"]
    assert "org/open: 1 files, 12.8 MB" in done.stdout + done.stderr
    assert "percent=100" in done.stdout + done.stderr
    quiet = client.run("org/open")
    assert quiet.stdout.strip() == str(folder)
    assert len(hub.gets) == 2


def test_a_terminal_shows_a_bar_with_the_size(client: Client) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        client.command("org/open", weights=True),
        env={**client.environment, "TERM": "xterm", "COLUMNS": "150"},
        stderr=theirs,
        stdout=subprocess.DEVNULL,
    ) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += os.read(ours, 65536)
            except OSError:  # Linux's way to say that the other end is closed
                break
        assert process.wait(timeout=60) == 0
    os.close(ours)
    text = shown.decode()
    assert "org/open: 2 files, 12.8 MB" in text
    assert "12.8/12.8 MB" in text


def test_a_file_whose_connection_breaks_goes_on_where_it_stopped(hub: Hub, client: Client) -> None:
    hub.breaks = [11_000_000]
    done = client.run("org/open")
    assert (Path(done.stdout.splitlines()[-1]) / "model.safetensors").read_bytes() == WEIGHTS
    first, second = (asked for name, asked in hub.gets if name == "model.safetensors")
    assert first is None
    assert second is not None
    assert int(second.removeprefix("bytes=").rstrip("-")) >= 10_000_000


def test_after_a_download_that_failed_files_that_are_there_are_not_loaded_again(
    hub: Hub, client: Client
) -> None:
    hub.breaks = [0] * 100
    assert "broke off" in client.refusal("org/open")
    hub.breaks.clear()
    hub.gets.clear()
    done = client.run("org/open")
    assert (Path(done.stdout.splitlines()[-1]) / "model.safetensors").read_bytes() == WEIGHTS
    assert [name for name, _ in hub.gets] == ["model.safetensors"]


def test_a_gated_model_says_how_to_get_access(hub: Hub, client: Client) -> None:
    assert f"'org/gated' is gated: accept its terms at {hub.url}/org/gated" in client.refusal("org/gated")
    assert "set HF_TOKEN to its token" in client.refusal("org/gated")
    assert "without access" in client.refusal("org/gated", HF_TOKEN="hf_mine")


def test_an_unknown_id_says_to_check_it(hub: Hub, client: Client) -> None:
    assert f"{hub.url} has no such model, or a private one; check the id" in client.refusal("org/none")
    assert "must be 'demo', 'smollm2', a folder or GGUF file that exists, or a hub id" in client.refusal(
        "not an id"
    )


def test_without_network_the_cache_is_used_and_else_the_network_is_named(
    hub: Hub, client: Client, tmp_path: Path
) -> None:
    folder = client.run("org/open").stdout.splitlines()[-1]
    away = "http://127.0.0.1:9"
    done = client.run("org/open", HF_ENDPOINT=away)
    assert done.stdout.splitlines()[-1] == folder, done.stderr
    other = Client(tmp_path / "empty", away)
    assert f"{away} can not be reached; check the network and its proxy" in other.refusal("org/open")
    assert "HF_HUB_OFFLINE is set; unset it" in other.refusal("org/open", HF_HUB_OFFLINE="1")


def test_serve_says_it_before_it_starts_anything(client: Client) -> None:
    script = "from kvferry.services.launcher.cli import main; main(['serve', '--model', 'org/none'])"
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, env=client.environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert "has no such model, or a private one" in done.stderr
    assert "starting" not in done.stdout


def test_sizes_are_of_three_digits() -> None:
    sizes = [_size(n) for n in (7, 1500, 5_120_000, 14_900_000_000)]
    assert sizes == ["7 bytes", "1.5 kB", "5.12 MB", "14.9 GB"]
