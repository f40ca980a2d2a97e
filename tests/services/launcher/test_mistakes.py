"""Mistakes in the options are answered at once: by real processes that import neither torch nor transformers,
start no other process, and say the value and what to do."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from kvtest.ports import free_port

from kvferry.models import DEMO_MODEL
from kvferry.services.decode.config import GROWTH_TOKENS, DecodeConfig
from kvferry.services.launcher import checks
from kvferry.services.launcher.process import may_use_gpu
from kvferry.shared.errors import ConfigurationError
from kvferry.shared.model.loading import load_model

MAX_CPU_S = 4.0
"""Of the process and its children, which on an idle machine is the wall time."""
RUN = """
import json, os, sys
from kvferry.services.launcher.cli import main
try:
    main()
finally:
    heavy = sorted({"torch", "transformers", "kvferry.services.launcher.processes"} & sys.modules.keys())
    print(json.dumps([heavy, sum(os.times()[:4])]))
"""

Mistake = tuple[str, str, int]
"""The command's arguments, what it says, and its exit code. Names in braces are files of `things`."""
MISTAKES: dict[str, Mistake] = {
    "a method of no such name": (
        "serve --default-method snapvk",
        r"default_method is 'snapvk'; did you mean snapkv\? There are full, snapkv, ",
        2,
    ),
    "an allowed method of no such name": (
        "router --allowed-methods full,magic --default-method full",
        r"allowed_methods is 'magic'; There are full, ",
        2,
    ),
    "a default that is not allowed": (
        "serve --allowed-methods full",
        r"default_method is 'rdkv'; allowed_methods are full",
        2,
    ),
    "no key file": (
        "serve --api-keys-file {folder}/none.toml",
        r"api_keys_file '.*/none\.toml' cannot be read: .*No such file",
        2,
    ),
    "a key in clear in the key file": (
        "router --api-keys-file {clear}",
        r"api_keys_file '.*clear\.toml': key\.0\.hash: .*pattern.*sha256",
        2,
    ),
    "no certificates": (
        "serve --certs {empty}",
        r"certs has no readable '.*/ca\.pem': No such file or directory; kvferry certs makes it",
        2,
    ),
    "a worker's certificates that are not there": (
        "decode --certs {folder}/none",
        r"certs has no readable '.*none/ca\.pem': .*; kvferry certs makes it",
        2,
    ),
    "a TLS certificate without its key": (
        "serve --tls-cert {text}",
        r"tls_cert is '.*' and tls_key is empty; both are needed",
        2,
    ),
    "a TLS certificate that is none": (
        "serve --tls-cert {text} --tls-key {text}",
        r"tls_cert is '.*' and tls_key '.*'; they do not load: ",
        2,
    ),
    "a short key for what is stored": (
        "prefill --at-rest-keys {short}",
        r"at_rest_keys '.*', line 1, has 3 bytes; a key has 32",
        2,
    ),
    "no such device": ("serve --device gpu", r"device is 'gpu'; it must be auto, cpu, cuda or cuda:N", 2),
    "a GPU where there is none": (
        "serve --device cuda:1",
        r"device is 'cuda:1', and torch finds no CUDA device: .*(install|give it a GPU|look at)",
        2,
    ),
    "a dtype of another program": (
        "serve --dtype fp16",
        r"--dtype is 'fp16'; input should be 'auto', 'float32', 'float16' or 'bfloat16'",
        2,
    ),
    "a model type that is not served": (
        "serve --model {t5}",
        r"model type 't5' has not been checked .* supported are afmoe, ",
        1,
    ),
    "an empty folder": ("serve --model {empty}", r"model '.*empty' has no config\.json", 2),
    "weights that are no safetensors": (
        "prefill --model {pickled}",
        r"model\.safetensors is missing in .*pickled; weights must be safetensors files",
        2,
    ),
    "a file that is no GGUF file": (
        "serve --model {text}",
        r"model is '.*text'; it must be demo, a folder, a GGUF file that can be read, or a hub id",
        2,
    ),
    "a model that is not there": (
        "serve --model /nowhere/at/all",
        r"model is '/nowhere/at/all'; it must be 'demo', .*or a hub id such as org/name",
        2,
    ),
    "an arena that is too small": (
        "serve --arena-bytes 1KB",
        r"arena_bytes is 1000; it must be at least \d+, which 64 tokens of this model take",
        2,
    ),
    "an address that is no Redis URL": (
        "serve --history-redis 127.0.0.1:6379",
        r"history_redis is not a Redis URL: .*; it must look like redis://host:6379/0",
        2,
    ),
    "a Redis that does not answer": (
        "serve --history-redis redis://127.0.0.1:{port}",
        r"history_redis cannot be used: .*127\.0\.0\.1:\d+.*refused; start that Redis, or give another's",
        2,
    ),
    "a port that is taken": (
        "serve --listen 127.0.0.1:{taken}",
        r"listen is '127\.0\.0\.1:\d+'; it cannot be bound: ",
        2,
    ),
    "an open server without keys": (
        "serve --host 0.0.0.0",
        r"listen is '0\.0\.0\.0:8000', which other machines may reach, .*; give keys or api_keys_file",
        2,
    ),
    "a flag without its value": ("serve demo --port", r"--port has no value", 2),
    "another server's flag that changes answers": (
        "serve demo --enable-lora",
        r"--enable-lora is no option of kvferry serve: adapters are not served",
        2,
    ),
    "ranks in one process": (
        "serve --tensor-parallel 2 --in-process",
        r"tensor_parallel is 2 with in_process; it must be 1, or in_process not be set",
        2,
    ),
    "no folder of calibrations": (
        "decode --calibration {folder}/none",
        r"calibration is '.*/none'; it must be a folder",
        2,
    ),
    "a plan's method of no such name": (
        "plan --methods full,snapkw",
        r"--methods is 'snapkw'; did you mean snapkv\? There are full, ",
        2,
    ),
    "a plan's machine that is not known": (
        "plan --machine H1000",
        r"--machine is 'H1000'; it must be one",
        2,
    ),
    "a plan's bound without curves": (
        "plan --max-loss 2 --model {qwen3}",
        r"--max-loss is 2, .* of its family \(qwen3\).*kvferry calibrate --model .*--curves-of \(demo-",
        2,
    ),
}


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    """Files, folders and ports of the mistakes, by name."""
    folder = tmp_path_factory.mktemp("mistakes")
    for name in ("empty", "t5", "pickled", "qwen3"):
        (folder / name).mkdir()
    demo = json.loads((DEMO_MODEL / "config.json").read_text())
    (folder / "t5" / "config.json").write_text('{"model_type": "t5", "is_encoder_decoder": true}')
    (folder / "pickled" / "config.json").write_text(json.dumps(demo))
    (folder / "pickled" / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    (folder / "qwen3" / "config.json").write_text(json.dumps(demo | {"model_type": "qwen3"}))
    (folder / "clear.toml").write_text('[[key]]\nname = "alice"\nhash = "secret"\n')
    (folder / "short").write_text("YWJj\n")
    (folder / "text").write_text("words\n")
    names = {path.stem: path for path in folder.iterdir()}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield {**names, "folder": folder, "port": free_port(), "taken": taken.getsockname()[1]}


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=clean | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_at_once_with_its_value_and_what_to_do(
    mistake: str, things: dict[str, object]
) -> None:
    arguments, told, code = MISTAKES[mistake]
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("this machine has GPUs")
    words = [word.format(**things) for word in arguments.split()]
    done = run(RUN, *words)
    assert done.returncode == code, done.stderr
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(f"kvferry {words[0]}: .*{told}.*", line), line
    heavy, cpu_s = json.loads(done.stdout)
    assert not heavy
    assert cpu_s < MAX_CPU_S


def test_a_service_of_a_fleet_starts_while_redis_is_away_and_says_so() -> None:
    script = (
        "import sys\n"
        "from kvferry.services.launcher.checks import check\n"
        "from kvferry.services.prefill.config import PrefillConfig\n"
        "check(PrefillConfig(history_redis=sys.argv[1]), 'prefill')\n"
    )
    port = free_port()
    done = run(script, f"redis://user:S3CRET@127.0.0.1:{port}")
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stderr)
    assert (line["level"], line["service"]) == ("warning", "prefill")
    assert line["event"].startswith("history_redis cannot be used: Redis: ConnectionError: ")
    assert f"127.0.0.1:{port}" in line["event"]
    assert "S3CRET" not in done.stderr


@pytest.mark.parametrize("family", ["llama", "llama-mqa", "qwen2", "gemma"])
def test_the_least_arena_is_known_from_the_configuration(
    family: str, tiny_model_dir: Callable[[str], Path]
) -> None:
    folder = tiny_model_dir(family)
    described = json.loads((folder / "config.json").read_text())
    in_16_bits = load_model(folder, device="cpu").spec.full_bytes(GROWTH_TOKENS) // 2
    checks._arena(DecodeConfig(arena_bytes=in_16_bits), described)
    with pytest.raises(ConfigurationError, match=f"it must be at least {in_16_bits}"):
        checks._arena(DecodeConfig(arena_bytes=in_16_bits - 1), described)


@pytest.mark.parametrize(
    ("build", "has_gpu", "told"),
    [
        ((None, None), True, "this torch is a build for CPUs"),
        (("12.8", None), False, "no NVIDIA driver is loaded|look at nvidia-smi"),
        (("12.8", None), True, None),
        ((None, "6.4"), False, None),
    ],
)
def test_a_gpu_is_missed_where_torchs_build_or_the_machine_has_none(
    monkeypatch: pytest.MonkeyPatch, build: tuple[str | None, str | None], has_gpu: bool, told: str | None
) -> None:
    monkeypatch.setattr(checks, "torch_build", lambda: build)
    monkeypatch.setattr(checks, "may_use_gpu", lambda device: has_gpu)
    checks._device(DecodeConfig(device="auto"))
    if told is None:
        checks._device(DecodeConfig(device="cuda"))
        return
    with pytest.raises(ConfigurationError, match=told):
        checks._device(DecodeConfig(device="cuda"))


def test_the_build_of_torch_is_read_without_importing_it() -> None:
    assert checks.torch_build() == (torch.version.cuda, torch.version.hip)
    assert may_use_gpu("cpu") is False
