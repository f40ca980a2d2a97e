"""Tiny GPTQ and AWQ checkpoints, made by gptqmodel and loaded here, in a process of their own.

gptqmodel changes what transformers and torch do when it is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NUM_NEW = 48


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What came of a checkpoint.

    Attributes:
        weights: kind, as `GET /v1/models` tells it.
        expected: greedy tokens of transformers' `generate`.
        tokens: those of `load_model` and method `full`.
        num_weights: of one linear module.
        stored_bytes: of the same module, once loaded.
    """

    weights: str
    expected: list[int]
    tokens: list[int]
    num_weights: int
    stored_bytes: int


def make_and_load(method: str, folder: Path) -> Loaded:
    """Make a checkpoint of 4 bits in the folder, "gptq" or "awq", and load it on the CPU."""
    path = [str(Path(__file__).parents[1]), *filter(None, sys.path)]
    # it wants two workers, whatever the number of processors
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "GPTQMODEL_CPU_WORKERS": "2"}
    command = [sys.executable, "-W", "ignore", "-m", "kvtest.gptq_models", method, str(folder)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{method} failed: {done.stderr[-2000:]}")
    return Loaded(**json.loads(done.stdout.splitlines()[-1]))


def _make(method: str, folder: Path) -> None:
    import torch
    from gptqmodel import GPTQModel, QuantizeConfig
    from gptqmodel.quantization import AWQConfig

    from kvtest.tiny_models import copy_tokenizer, make_config, save_model
    from kvtest.transformers_model import prompt_of

    # its kernels for AWQ take float16 and bfloat16 only, and widths that are multiples of 64
    dtype = torch.float32 if method == "gptq" else torch.bfloat16
    config = make_config("llama", hidden_size=256, intermediate_size=512, num_key_value_heads=4)
    made: Any = AWQConfig if method == "awq" else QuantizeConfig
    model = GPTQModel.load(
        str(save_model(config, folder / "whole", dtype=dtype)),
        made(bits=4, group_size=32, device="cpu", offload_to_disk=False),
        dtype=dtype,
    )
    prompts = [{"input_ids": prompt_of(64, seed=seed), "attention_mask": [1] * 64} for seed in range(8)]
    model.quantize(prompts, batch_size=1)
    model.save(str(folder))
    copy_tokenizer(folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "dtype": "float32"}))


def _load(folder: Path) -> Loaded:
    from kvferry.shared.compression.presets import plan_for
    from kvferry.shared.model.bridge import _tensors_of
    from kvferry.shared.model.loading import load_model
    from kvferry.tools.oracle import OneProcessGenerator
    from kvtest.transformers_model import Reference, greedy, prompt_of

    prompt = prompt_of(60, seed=1)
    model = load_model(folder, device="cpu")
    generated = OneProcessGenerator(model).generate(prompt, plan=plan_for("full"), sampling=greedy(NUM_NEW))
    projection = model._model.model.layers[0].mlp.up_proj
    return Loaded(
        weights=model.spec.weights,
        tokens=[token.token_id for token in generated],
        expected=Reference(folder).tokens(prompt, NUM_NEW),
        num_weights=projection.in_features * projection.out_features,
        stored_bytes=sum(tensor.nbytes for tensor in _tensors_of(projection)),
    )


if __name__ == "__main__":
    _make(sys.argv[1], Path(sys.argv[2]))
    print(json.dumps(asdict(_load(Path(sys.argv[2])))))  # noqa: T201
