"""Which kernels requests would compile after a worker's warm-up: python specialisations.py

Runs a worker's own calls in a rehearsal, in which Triton derives the key of every launch and nothing is
compiled. Prints JSON: how many kernels the warm-up has, those that later requests add, and how many these
would have had without it. Needs a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime.jit import JITFunction

from kvferry.services.decode.slots import StepRunner
from kvferry.services.decode.step import StepInput
from kvferry.shared.cache.arena import ByteArena, sequence_layout
from kvferry.shared.compression.compress import compress_prompt
from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.device.step_device import StepDevice
from kvferry.shared.device.warm_up import CollectingPass
from kvferry.shared.model.bridge import TransformersModel
from kvferry.shared.sampling.params import SamplingParams
from kvferry.shared.sampling.sampler import SequenceSampler
from kvferry.tools.kernel_cache.compile import rehearse_worker
from kvferry.tools.kernel_cache.random_model import random_model
from kvferry.tools.kernel_cache.rehearsal import GPUS, rehearsal
from kvferry.tools.kernel_cache.shapes import Shape

MAX_MODEL_LEN = 8192
SHAPE = Shape(
    name="tiny", model_type="qwen3", num_layers=1, hidden_size=128, intermediate_size=32, num_heads=4,
    num_kv_heads=2, head_dim=32, vocab_size=64,
)  # fmt: skip
REQUESTS: tuple[tuple[str, int, int | None, dict[str, Any]], ...] = (
    ("full", 37, None, {}),
    # pages of one token; of a few; of many, with few channels
    ("rocketkv", 600, 400, {}),
    ("rocketkv", 1000, 250, {}),
    ("rocketkv", 4000, 40, {}),
    ("rocketkv", 40, 3, {}),
    ("exact-topk", 120, 60, {}),
    ("snapkv", 99, 17, {"window": 7}),
    ("snapkv", 1024, 512, {"window": 1}),
    ("adakv", 77, 30, {}),
    ("h2o", 200, 31, {}),
    ("compactor", 30, 10, {}),
    ("compactor", 700, 100, {"chunk_tokens": 40}),
    ("rdkv", 60, 16, {"window": 5, "rebudget_tokens": 0}),
    ("rdkv", 532, 200, {"rebudget_tokens": 0}),
    # sixteen chunks of packed K
    ("rdkv", 8000, 300, {"rebudget_tokens": 0}),
    ("kivi", 61, None, {"bits": 2}),
    ("kivi", 300, None, {"bits": 8}),
)
"""Method, prompt tokens, budget and options."""


def main() -> int:
    compiled: list[str] = []
    kernels: set[Any] = set()

    def record(kernel: Any, key: str, signature: Any, device: int, *rest: Any, **_: Any) -> Any:
        kernels.add(kernel)
        compiled.append(f"{kernel.__name__} {key}")
        stand_in = SimpleNamespace(hash=compiled[-1])
        kernel.device_caches[device][0][key] = stand_in
        return stand_in

    model = random_model(SHAPE, torch.device("cpu"), max_model_len=MAX_MODEL_LEN)
    with patch.object(JITFunction, "_do_compile", record), rehearsal(GPUS["sm_90"]), torch.inference_mode():
        rehearse_worker(model)
        num_warm = len(compiled)
        later = {}
        for method, num_tokens, tokens, options in REQUESTS:
            before = len(compiled)
            serve(model, method, num_tokens, tokens, options)
            if len(compiled) > before:
                later[f"{method} {num_tokens} {tokens} {options}"] = compiled[before:]
        for kernel in kernels:
            kernel.device_caches.clear()
        before = len(compiled)
        for method, num_tokens, tokens, options in REQUESTS[:4]:
            serve(model, method, num_tokens, tokens, options)
    result = {"warm": num_warm, "later": later, "without_warm_up": len(compiled) - before}
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


def serve(
    model: TransformersModel, method: str, num_tokens: int, tokens: int | None, options: dict[str, Any]
) -> None:
    """A request: prefill, compression, what the receiver checks, and a step of decode."""
    spec = model.spec
    budget = Budget(tokens=tokens) if tokens is not None else None
    resolved = resolve_plan(
        plan_for(method, budget=budget, overrides=options),
        num_prompt_tokens=num_tokens, max_new_tokens=4, num_layers=spec.num_layers, head_dim=spec.head_dim,
        layers=spec.layers,
    )  # fmt: skip
    pass_ = CollectingPass(model)
    model.prefill(torch.arange(num_tokens) % spec.vocab_size, start=0, observer=pass_)
    resolved, compressed = compress_prompt(spec, resolved, pass_.layers, pass_.states)
    layout = sequence_layout(make_formats(spec, resolved))
    arena = ByteArena(layout.size_bytes + 4096, model.device)
    buffer = arena.buffer(arena.reserve(layout.size_bytes, owner="one", state="running"))
    caches = tuple(
        layer.place(buffer, tensors) for layer, tensors in zip(layout.layers, compressed, strict=True)
    )
    params = SamplingParams(max_tokens=4, temperature=0.0)
    runner = StepRunner(model, StepDevice(), max_batch_size=1, warn=print)
    runner.join(
        StepInput(
            caches=caches, num_appended=0, token_id=1, position=num_tokens, num_left=3,
            stop_ids=frozenset(), sampler=SequenceSampler(params, (1,), spec.vocab_size),
        )
    )  # fmt: skip
    runner.launch().wait(60)


if __name__ == "__main__":
    sys.exit(main())
