"""Makes tiny random models of several families, each with the demo model's tokenizer, for tests.

`python tests/tiny_models.py OUT` writes every one of them to `OUT/<name>`. The same name always gives the
same weights.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from kvferry.models import DEMO_MODEL
from kvferry.shared.model.checkpoint import quiet_libraries

VOCAB_SIZE = 704
_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    # wide enough that attention and logits are far from uniform
    "initializer_range": 0.2,
    "bos_token_id": 2,
    "eos_token_id": 6,
    "pad_token_id": 0,
}
_FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-mha": ("Llama", {"num_key_value_heads": 8}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1, "num_hidden_layers": 3}),
    "llama-8-layers": ("Llama", {"num_hidden_layers": 8}),
    "llama-yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 512,
            }
        },
    ),
    "llama-dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen2": ("Qwen2", {"head_dim": 8}),
    "qwen3": ("Qwen3", {}),
    "phi3": ("Phi3", {"head_dim": 8}),
    "gemma": ("Gemma", {}),
    "granite": ("Granite", {"head_dim": 8, "attention_multiplier": 0.3}),
}
FAMILIES = tuple(_FAMILIES)


def make_config(family: str, **overrides: Any) -> Any:
    """A tiny configuration of a family, in transformers' own class."""
    architecture, settings = _FAMILIES[family]
    config_class = getattr(transformers, f"{architecture}Config")
    return config_class(**{**_COMMON, **settings, **overrides})


def save_model(config: Any, folder: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """Write a random model of this configuration, with the demo tokenizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):  # zeros in some types, by which heads could not be told apart
                torch.nn.init.normal_(parameter)
    with quiet_libraries():
        model.save_pretrained(folder)
    copy_tokenizer(folder)
    return folder


def copy_tokenizer(folder: Path) -> None:
    """Put the demo model's tokenizer into a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO_MODEL / name, folder / name)


def make_model(family: str, folder: Path) -> Path:
    """Write a family's tiny model into a folder, which is made; returns the folder."""
    return save_model(make_config(family), folder)


if __name__ == "__main__":
    for _family in FAMILIES:
        make_model(_family, Path(sys.argv[1]) / _family)
