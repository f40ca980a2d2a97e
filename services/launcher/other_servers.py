"""The flags of vLLM and llama.cpp, which people type from habit, as options of `kvferry serve`.

    kvferry serve Qwen/Qwen3-4B --host 0.0.0.0 --port 8000 --max-num-seqs 32
    kvferry serve --model Qwen/Qwen3-4B --listen 0.0.0.0:8000 --max-batch-size 32

A flag without a counterpart is left out if it changes no answer, and refused if it would. Either way a
sentence says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvferry.shared.errors import ConfigurationError

_SAME = {
    "--served-model-name": "--model-name",
    "--tensor-parallel-size": "--tensor-parallel",
    "-tp": "--tensor-parallel",
    "--max-num-seqs": "--max-batch-size",
    "--parallel": "--max-batch-size",
    "-np": "--max-batch-size",
    "--api-key": "--api-keys",
    "--ssl-certfile": "--tls-cert",
    "--ssl-keyfile": "--tls-key",
    "--allowed-origins": "--cors-origins",
    "-m": "--model",
    "-c": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "-t": "--threads",
}
"""Options of ours by theirs, with the same value."""
_NEEDLESS = {
    "--enable-prefix-caching": "prompts are always reused",
    "--enable-chunked-prefill": "a short prompt overtakes a long one",
    "--enable-auto-tool-choice": "tools are always on",
    "--enforce-eager": "steps are captured where a GPU can",
    "--jinja": "the model's own template is used",
    "-fa": "it is chosen for the machine",
    "--flash-attn": "it is chosen for the machine",
    "--disable-log-requests": "requests are not logged",
}
"""Switches without a value that nothing is lost by leaving out, and why."""
_DECIDED = {
    "--tool-call-parser": "the form of calls is read from the model's template",
    "--reasoning-parser": "thoughts are found by the model's template",
    "--gpu-memory-utilization": "set --arena-bytes",
    "--block-size": "KV is not paged",
    "--kv-cache-dtype": "a request's kv_compression says how KV is stored",
    "-ngl": "--device says where the model runs",
    "--n-gpu-layers": "--device says where the model runs",
    "--quantization": "the checkpoint says it",
    "-q": "the checkpoint says it",
}
"""Options with a value, likewise."""
_REFUSED = {
    "--trust-remote-code": "code of a checkpoint is never run",
    "--speculative-config": "there is no speculative decoding",
    "--enable-lora": "adapters are not served",
    "--lora-modules": "adapters are not served",
    "--pipeline-parallel-size": "a model is divided by --tensor-parallel alone",
    "--data-parallel-size": "start further prefill and decode workers, and name them to a router",
    "--chat-template": "put the template into the model's folder",
}
"""Those that would change answers or what is served."""


def as_ours(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments of `kvferry serve` with our options in place of theirs.

    Returns: the arguments, and a sentence for each that was left out.
    Raises: ConfigurationError: one that would change what is served.
    """
    ours, notes = list[str](), list[str]()
    address = {"--host": "", "--port": ""}
    words = deque(arguments)
    while words:
        word = words.popleft()
        name, equals, value = word.partition("=")
        if not equals and name in {*address, *_SAME, *_DECIDED}:
            if not words:
                raise ConfigurationError(f"{name} has no value")
            value = words.popleft()
        if name in address:
            address[name] = value
        elif name in _SAME:
            ours += [_SAME[name], value]
        elif name in _NEEDLESS:
            notes.append(f"{name} is left out: {_NEEDLESS[name]}")
        elif name in _DECIDED:
            notes.append(f"{name} {value} is left out: {_DECIDED[name]}")
        elif name in _REFUSED:
            raise ConfigurationError(f"{name} is no option of kvferry serve: {_REFUSED[name]}")
        elif len(words) == len(arguments) - 1 and not word.startswith("-"):
            ours += ["--model", word]
        else:
            ours.append(word)
    host, port = address.values()
    if host or port:
        name = f"[{host}]" if ":" in host else host or "127.0.0.1"
        ours += ["--listen", f"{name}:{port or '8000'}"]
    return ours, notes
