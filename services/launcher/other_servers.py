"""The flags of vLLM and llama.cpp, which people type from habit, as options of `kvferry serve`.

    kvferry serve Qwen/Qwen3-4B --host 0.0.0.0 --port 8000 --max-num-seqs 32
    kvferry serve --model Qwen/Qwen3-4B --listen 0.0.0.0:8000 --max-batch-size 32

A flag without a counterpart is left out if it changes no answer, and refused if it would. Either way a
sentence says so.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence

from kvferry.shared.errors import ConfigurationError

_FLAG = re.compile("--?[A-Za-z]")


def _each(table: Mapping[str, str]) -> dict[str, str]:
    """Return a table with an entry for each of the flags that share one."""
    return {flag: entry for flags, entry in table.items() for flag in flags.split()}


_SAME = _each(
    {
        "--served-model-name -a --alias": "--model-name",
        "--tensor-parallel-size -tp": "--tensor-parallel",
        "--max-num-seqs --parallel -np": "--max-batch-size",
        "--api-key": "--api-keys",
        "--ssl-certfile --ssl-cert-file": "--tls-cert",
        "--ssl-keyfile --ssl-key-file": "--tls-key",
        "--allowed-origins": "--cors-origins",
        "-m": "--model",
        "-c --ctx-size": "--max-model-len",
        "-t": "--threads",
    }
)
"""Options of ours by theirs, with the same value."""
_NEEDLESS = _each(
    {
        "--enable-prefix-caching": "prompts are always reused",
        "--enable-chunked-prefill": "a short prompt overtakes a long one",
        "--enable-auto-tool-choice": "tools are always on",
        "--enforce-eager": "steps are captured where a GPU can",
        "--jinja": "the model's own template is used",
        "--disable-log-requests --no-enable-log-requests": "requests are not logged",
        "-cb --cont-batching": "requests are always batched as they come",
        "--metrics": "there is always /metrics",
    }
)
"""Switches without a value that nothing is lost by leaving out, and why."""
_DECIDED = _each(
    {
        "--tool-call-parser": "the form of calls is read from the model's template",
        "--reasoning-parser": "thoughts are found by the model's template",
        "--gpu-memory-utilization": "set --arena-bytes",
        "--block-size": "KV is not paged",
        "--max-num-batched-tokens -b --batch-size -ub --ubatch-size": "prompts and answers have steps apart",
        "--kv-cache-dtype -ctk --cache-type-k -ctv --cache-type-v": "a request's kv_compression says it",
        "-ngl --n-gpu-layers": "--device says where the model runs",
        "-fa --flash-attn": "it is chosen for the machine",
        "--quantization -q": "the checkpoint says it",
        "--seed -s": "a request's seed says it",
        "--swap-space": "sequences that wait have the host memory that they need",
    }
)
"""Options that may have a value, likewise."""
_REFUSED = _each(
    {
        "--trust-remote-code": "code of a checkpoint is never run",
        "--speculative-config -md --model-draft": "there is no speculative decoding",
        "--enable-lora --lora-modules --lora": "adapters are not served",
        "--mmproj": "images are not served",
        "--embedding --embeddings --reranking": "only text is generated",
        "--pipeline-parallel-size -pp": "a model is divided by --tensor-parallel alone",
        "--data-parallel-size -dp": "start further prefill and decode workers, and name them to a router",
        "--kv-transfer-config": "prefill and decode are services, which kvferry prefill and decode start",
        "-hf --hf-repo": "give --model a GGUF file, a folder or the hub id of a model in safetensors",
        "--chat-template --chat-template-file": "put the template into the model's folder",
    }
)
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
            if words and not _FLAG.match(words[0]):
                value = words.popleft()
            elif name not in _DECIDED:
                raise ConfigurationError(f"{name} has no value")
        if name in address:
            address[name] = value
        elif name in _SAME:
            ours += [_SAME[name], value]
        elif name in _NEEDLESS:
            notes.append(f"{name} is left out: {_NEEDLESS[name]}")
        elif name in _DECIDED:
            notes.append(f"{name} {value}".rstrip() + f" is left out: {_DECIDED[name]}")
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
