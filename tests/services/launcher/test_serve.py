"""`kvferry serve` as processes: answers, supervision, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from kvtest.processes import is_running

from kvferry.shared.compression.rdkv.epsilon import EpsilonTable
from kvferry.tools.certs import make_certs
from kvferry.tools.evaluation.epsilon import save_table

MESSAGE = "the access code of the blue lighthouse is 9 0 5 3 . what is the pin of the red castle ?"
COMMAND = (sys.executable, "-c", "from kvferry.services.launcher.cli import main; main()")
ROLES = ("prefill", "decode", "router")


def ask(url: str, **fields: Any) -> httpx.Response:
    body = {"model": "demo", "messages": [{"role": "user", "content": MESSAGE}], "temperature": 0}
    return httpx.post(f"{url}/v1/chat/completions", json=body | fields, timeout=120, trust_env=False)


def get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=30, trust_env=False)


def test_a_stack_of_processes_serves_recovers_and_leaves_nothing(serve: Any, tmp_path: Path) -> None:
    save_table(tmp_path / "mine.json", EpsilonTable(keys=(0.2, 0.01, 0.0), values=(0.3, 0.02, 0.0)))
    with serve("--epsilon-tables", str(tmp_path)) as served:
        ready = served.ready
        pids = {role: int(ready[f"{role}_pid"]) for role in ROLES}
        assert all(is_running(pid) for pid in pids.values())

        # The line that was printed works as it stands.
        (line,) = (line for line in served.output.splitlines() if line.startswith("curl"))
        done = subprocess.run(["bash", "-c", line], capture_output=True, timeout=120, check=True)
        example = json.loads(done.stdout)
        assert example["choices"][0]["message"]["content"].split() == ["6", "5", "6", "3"]
        assert 3 * example["kv"]["shipped_bytes"] < example["kv"]["full_bytes"]

        # Every service knows the folder's distortion tables, by name alone.
        for name, status in (("mine", 200), ("other", 400), (str(tmp_path / "mine.json"), 400)):
            wanted = {"method": "rdkv", "token_budget": 16, "parameters": {"epsilon_table": name}}
            answer = ask(served.url, kv_compression=wanted, max_tokens=4)
            assert answer.status_code == status
            if status == 200:
                assert answer.json()["kv"]["method"] == "rdkv"
            else:
                assert "it must be" in answer.json()["error"]["message"]
                assert "Qwen3-4B, mine" in answer.json()["error"]["message"]

        # Each metrics address that was printed serves its role's families; the router joins them all.
        assert "kvferry_kv_transfer_bytes_total" in get(f"http://{ready['prefill_metrics']}/metrics").text
        assert "kvferry_arena_bytes" in get(f"http://{ready['decode_metrics']}/metrics").text
        everything = get(f"{served.url}/metrics?all=1").text
        assert "kvferry_arena_bytes" in everything
        assert "kvferry_kv_transfer_bytes_total" in everything

        # No key or setting is on a command line.
        for pid in pids.values():
            assert b"arena" not in Path(f"/proc/{pid}/cmdline").read_bytes()

        # A killed service comes back on its address, and serves.
        os.kill(pids["decode"], signal.SIGKILL)
        served.wait_until("decode is back", lambda: int(served.ready["decode_pid"]) != pids["decode"])
        assert served.ready["decode_metrics"] == ready["decode_metrics"]
        served.wait_until("a turn goes through again", lambda: ask(served.url).status_code == 200)
        pids["decode"] = int(served.ready["decode_pid"])

        assert served.stop() == 0
        assert not [role for role, pid in pids.items() if is_running(pid)]
        assert "killed" not in served.output


def test_one_process_serves_the_same(serve: Any) -> None:
    with serve("--in-process") as served:
        answer = ask(served.url, kv_compression={"method": "rocketkv", "token_budget": 16}).json()
        assert answer["choices"][0]["message"]["content"]
        assert answer["kv"]["method"] == "rocketkv"
        assert "kvferry_arena_bytes" in get(f"{served.url}/metrics?all=1").text
        children = Path(f"/proc/{served.process.pid}/task/{served.process.pid}/children").read_text()
        assert children == ""
        assert served.stop(signal.SIGINT) == 0


def test_settings_reach_the_services_and_nothing_outlives_a_killed_launcher(
    serve: Any, tmp_path: Path
) -> None:
    """With keys and TLS a server is published by one command, and its workers stay on this machine."""
    make_certs(tmp_path, days=2, everything=False)
    worker = tmp_path / "decode"  # any certificate for servers will do
    published = (
        "--api-keys",
        "sk-one",
        "--tls-cert",
        str(worker / "tls.pem"),
        "--tls-key",
        str(worker / "tls.key"),
    )
    settings = ("--model-name", "tiny", "--max-model-len", "300")
    context = ssl.create_default_context(cafile=str(worker / "ca.pem"))
    context.check_hostname = False
    with serve(*published, *settings, listen="0.0.0.0:0") as served:
        with pytest.raises(httpx.TransportError):
            get(served.url)
        with httpx.Client(
            base_url=f"https://{served.address}", verify=context, timeout=30, trust_env=False
        ) as client:
            assert client.get("/v1/models").status_code == 401
            assert client.get("/").status_code == 200
            models = client.get("/v1/models", headers={"Authorization": "Bearer sk-one"}).json()
        assert [(model["id"], model["max_model_len"]) for model in models["data"]] == [("tiny", 300)]
        assert f"curl -s https://{served.address}/v1/chat/completions" in served.output
        assert "Authorization: Bearer YOUR_KEY" in served.output
        assert "sk-one" not in served.output
        arena = get(f"http://{served.ready['decode_metrics']}/metrics").text
        free = [line for line in arena.splitlines() if line.startswith('kvferry_arena_bytes{state="free"}')]
        assert float(free[0].split()[1]) == pytest.approx(64 << 20, rel=0.01)

        pids = [int(served.ready[f"{role}_pid"]) for role in ROLES]
        for pid in pids:
            assert b"OMP_WAIT_POLICY=PASSIVE" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        served.stop(signal.SIGKILL)
        served.wait_until(
            "no service is left", lambda: not any(is_running(pid) for pid in pids), timeout_s=60
        )


@pytest.mark.parametrize("mode", [[], ["--in-process"]], ids=["processes", "in-process"])
def test_an_occupied_port_is_told_and_ends_with_code_2(mode: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = subprocess.run(
            [*COMMAND, "serve", "--listen", address, "--threads", "1", *mode],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    assert done.returncode == 2
    assert f"listen is '{address}'; it cannot be bound" in done.stderr


def test_a_model_that_is_not_there_ends_with_code_2() -> None:
    done = subprocess.run(
        [*COMMAND, "serve", "--listen", "127.0.0.1:0", "--model", "/nowhere/at/all"],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 2
    assert "model is '/nowhere/at/all'" in done.stderr
