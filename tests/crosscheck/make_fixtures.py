"""Records what the public kvpress release selects on tiny random models, for `test_against_kvpress.py`.

Runs in an environment of its own (`requirements-kvpress.txt`: kvpress and this package need different
transformers), and so imports nothing of this package:

    python -m venv ENV && ENV/bin/pip install -r requirements-kvpress.txt
    ENV/bin/python make_fixtures.py kvpress.npz

Presses are run as their users run them, around a model's forward pass; what they keep is read off the cache.

Legend: L layers, H_kv KV heads, G query heads per KV head, T tokens, D head_dim. The file holds

    about                                JSON: versions, and `CASES` with the case's prompt
    <prompt>/queries                     float32 [L, H_kv, G, T, D], post-RoPE
    <prompt>/keys, values                float32 [L, H_kv, T, D], keys post-RoPE
    <prompt>/pre_rope_keys               float32 [L, H_kv, T, D]
    <case>/kept                          bool [L, H_kv, T]; for ThinK [L, H_kv, D]
    <case>/sketch                        float32 [L, H_kv, D, k], Phi of the leverage cases
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvpress  # pyright: ignore[reportMissingImports]
import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

PINNED = ("torch", "transformers", "kvpress", "numpy")
VOCAB_SIZE = 1024
HEAD_DIM = 8


@dataclass(frozen=True)
class Prompt:
    """A tiny random Llama and the prompt it reads."""

    num_tokens: int
    num_layers: int
    num_kv_heads: int
    group: int


@dataclass(frozen=True)
class Case:
    """One press on one prompt. `ratio` is kvpress's: the fraction dropped."""

    press: str
    prompt: str
    ratio: float
    params: Mapping[str, float]


# 268 and 524 are 12 protected tokens and whole chunks of Compactor's 256
PROMPTS: Mapping[str, Prompt] = {
    "gqa-97": Prompt(num_tokens=97, num_layers=3, num_kv_heads=2, group=2),
    "gqa-268": Prompt(num_tokens=268, num_layers=3, num_kv_heads=2, group=2),
    "mqa-524": Prompt(num_tokens=524, num_layers=1, num_kv_heads=1, group=3),
}

ADAKV = {"window_size": 8, "kernel_size": 7, "alpha_safeguard": 0.2}
CASES: Mapping[str, Case] = {
    "snapkv-short": Case("snapkv", "gqa-97", 0.5, {"window_size": 32, "kernel_size": 7}),
    "snapkv-light": Case("snapkv", "gqa-268", 0.25, {"window_size": 32, "kernel_size": 7}),
    "snapkv-heavy": Case("snapkv", "gqa-268", 0.75, {"window_size": 16, "kernel_size": 5}),
    "snapkv-one-head": Case("snapkv", "mqa-524", 0.9, {"window_size": 32, "kernel_size": 7}),
    "streamingllm-short": Case("streamingllm", "gqa-97", 0.5, {"n_sink": 4}),
    "streamingllm-heavy": Case("streamingllm", "gqa-268", 0.9, {"n_sink": 8}),
    "pyramidkv": Case("pyramidkv", "gqa-268", 0.5, {"window_size": 8, "kernel_size": 7, "beta": 4}),
    "pyramidkv-clamped": Case("pyramidkv", "gqa-268", 0.25, {"window_size": 8, "kernel_size": 7, "beta": 4}),
    "pyramidkv-narrow": Case("pyramidkv", "gqa-268", 0.75, {"window_size": 32, "kernel_size": 7, "beta": 20}),
    "adakv-short": Case("adakv", "gqa-97", 0.5, ADAKV),
    "adakv-heavy": Case("adakv", "gqa-268", 0.8, ADAKV),
    "adakv-floored": Case("adakv", "gqa-268", 0.5, {**ADAKV, "alpha_safeguard": 0.8}),
    "think-short": Case("think", "gqa-97", 0.5, {"window_size": 32}),
    "think-light": Case("think", "gqa-268", 0.25, {"window_size": 32}),
    "leverage-exact": Case("leverage", "gqa-268", 0.5, {"sketch_dimension": 48}),
    "leverage-sketched": Case("leverage", "gqa-268", 0.75, {"sketch_dimension": 4}),
    "compactor-attention": Case("compactor", "gqa-268", 0.5, {"blending": 0.0, "chunk_size": 256}),
    "compactor-chunks": Case("compactor", "gqa-268", 0.75, {"blending": 0.0, "chunk_size": 64}),
    "compactor-padded": Case("compactor", "gqa-97", 0.5, {"blending": 0.0, "chunk_size": 64}),
    "compactor-joint": Case("compactor", "gqa-268", 0.5, {"blending": 0.3, "chunk_size": 256}),
    "compactor-light": Case("compactor", "mqa-524", 0.5, {"blending": 0.3, "chunk_size": 256}),
    "compactor-heavy": Case("compactor", "mqa-524", 0.75, {"blending": 0.3, "chunk_size": 256}),
}

PRESSES: Mapping[str, Callable[..., Any]] = {
    "snapkv": kvpress.SnapKVPress,
    "streamingllm": kvpress.StreamingLLMPress,
    "pyramidkv": kvpress.PyramidKVPress,
    "adakv": lambda alpha_safeguard, **params: kvpress.AdaKVPress(
        kvpress.SnapKVPress(**params), alpha_safeguard=alpha_safeguard
    ),
    "leverage": kvpress.LeverageScorePress,
    "compactor": kvpress.CompactorPress,
}


class Model:
    """A prompt's model, its token ids, and every layer's attention inputs."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        torch.manual_seed(prompt.num_tokens)
        self.llama = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCAB_SIZE,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=prompt.num_layers,
                num_attention_heads=prompt.num_kv_heads * prompt.group,
                num_key_value_heads=prompt.num_kv_heads,
                head_dim=HEAD_DIM,
                initializer_range=0.2,
                attn_implementation="sdpa",
            )
        ).eval()
        # the last KV head's queries are sharper, so that heads deserve different budgets
        for layer in self.llama.model.layers:
            layer.self_attn.q_proj.weight.data[-prompt.group * HEAD_DIM :] *= 3
        # no token twice: equal tokens have equal keys in the first layer, and ties say nothing
        self.ids = torch.randperm(VOCAB_SIZE)[None, : prompt.num_tokens]

    def cache(self, press: Any = None) -> DynamicCache:
        """The KV cache that a forward pass leaves, compressed by `press`."""
        cache = DynamicCache()
        with torch.no_grad():
            if press is None:
                self.llama(self.ids, past_key_values=cache)
            else:
                with press(self.llama):
                    self.llama(self.ids, past_key_values=cache)
        return cache

    def inputs(self) -> dict[str, Tensor]:
        """What our scorers take, by name, layers stacked."""
        layers: list[dict[str, Tensor]] = []

        def capture(module: nn.Module, _: Any, kwargs: dict[str, Any], __: Any) -> None:
            layers.append(self._projected(module, kwargs["hidden_states"], *kwargs["position_embeddings"]))

        attentions = [layer.self_attn for layer in self.llama.model.layers]
        hooks = [module.register_forward_hook(capture, with_kwargs=True) for module in attentions]
        cache = self.cache()
        for hook in hooks:
            hook.remove()
        for captured, cached in zip(layers, cache.layers, strict=True):
            assert torch.equal(captured["keys"], cached.keys[0])
            assert torch.equal(captured["values"], cached.values[0])
        return {name: torch.stack([captured[name] for captured in layers]) for name in layers[0]}

    def _projected(self, module: Any, hidden: Tensor, cos: Tensor, sin: Tensor) -> dict[str, Tensor]:
        def heads(projection: nn.Module) -> Tensor:
            return projection(hidden).view(1, self.prompt.num_tokens, -1, HEAD_DIM).transpose(1, 2)

        pre_rope_keys = heads(module.k_proj)
        queries, keys = apply_rotary_pos_emb(heads(module.q_proj), pre_rope_keys, cos, sin)
        return {
            "queries": queries[0].unflatten(0, (self.prompt.num_kv_heads, self.prompt.group)),
            "keys": keys[0],
            "values": heads(module.v_proj)[0],
            "pre_rope_keys": pre_rope_keys[0],
        }


def run_case(name: str, model: Model) -> dict[str, np.ndarray]:
    """The case's arrays, by the names of the module's docstring."""
    case = CASES[name]
    if case.press == "think":
        return {f"{name}/kept": _kept_channels(case, model)}
    press = PRESSES[case.press](compression_ratio=case.ratio, **case.params)
    torch.manual_seed(0)
    kept = _kept_tokens(model, press)
    arrays = {f"{name}/kept": kept}
    if case.press == "leverage":
        arrays[f"{name}/sketch"] = _sketches(int(case.params["sketch_dimension"]), model.prompt)
    return arrays


def _kept_tokens(model: Model, press: Any) -> np.ndarray:
    full, compressed = model.cache(), model.cache(press)
    kept = np.zeros((model.prompt.num_layers, model.prompt.num_kv_heads, model.prompt.num_tokens), dtype=bool)
    for layer, (before, after) in enumerate(zip(full.layers, compressed.layers, strict=True)):
        if isinstance(press, kvpress.AdaKVPress):
            # the cache stays whole; the press leaves what attention is to skip on the module
            _, heads, positions = model.llama.model.layers[layer].self_attn.masked_key_indices
            kept[layer] = True
            kept[layer, heads.numpy(), positions.numpy()] = False
            continue
        rows_before = torch.cat([before.keys[0], before.values[0]], dim=-1)
        rows_after = torch.cat([after.keys[0], after.values[0]], dim=-1)
        same = (rows_after[:, :, None] == rows_before[:, None]).all(dim=-1)
        assert bool((same.sum(dim=2) == 1).all()), "a kept row is not one row of the full cache"
        kept[layer] = same.any(dim=1).numpy()
    return kept


def _kept_channels(case: Case, model: Model) -> np.ndarray:
    press = kvpress.ThinKPress(
        key_channel_compression_ratio=case.ratio, window_size=int(case.params["window_size"])
    )
    return np.stack([(layer.keys[0] != 0).any(dim=1).numpy() for layer in model.cache(press).layers])


def _sketches(columns: int, prompt: Prompt) -> np.ndarray:
    """Phi of each layer, drawn again as the press draws it: nothing else in the pass is random."""
    torch.manual_seed(0)
    shape = (1, prompt.num_kv_heads, HEAD_DIM, columns)
    return np.stack([(torch.randn(shape) / math.sqrt(columns))[0].numpy() for _ in range(prompt.num_layers)])


def make(path: Path) -> None:
    """Write every prompt and case to `path`."""
    arrays: dict[str, np.ndarray] = {}
    models = {name: Model(prompt) for name, prompt in PROMPTS.items()}
    for name, model in models.items():
        arrays.update({f"{name}/{key}": value.numpy() for key, value in model.inputs().items()})
    for name, case in CASES.items():
        arrays.update(run_case(name, models[case.prompt]))
    about = {
        "versions": {package: version(package).split("+")[0] for package in PINNED},
        "cases": {
            name: {"press": case.press, "prompt": case.prompt, "ratio": case.ratio, "params": case.params}
            for name, case in CASES.items()
        },
    }
    np.savez_compressed(path, about=np.array(json.dumps(about)), **arrays)


if __name__ == "__main__":
    torch.set_num_threads(1)
    make(Path(sys.argv[1]))
