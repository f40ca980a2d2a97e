"""The supported models by the type that config.json names, which is known before transformers is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvferry.shared.errors import UnsupportedModel

PARALLEL_TYPES = frozenset((
    "apertus", "arcee", "aria_text", "cohere", "cohere2", "cohere2_moe", "cwm", "dots1", "ernie4_5",
    "ernie4_5_moe", "exaone4", "exaone_moe", "gemma", "gemma2", "gemma3_text", "glm", "glm4",
    "glm4_moe", "gpt_neox", "granite", "granite_swa", "granitemoe_swa", "helium", "hy_v3",
    "hyperclovax", "internlm3", "llama", "llama4_text", "mellum", "ministral", "ministral3", "mistral",
    "mixtral", "nanochat", "nemotron", "olmo", "phi", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "seed_oss", "smollm3", "solar_open", "starcoder2", "vaultgemma",
))  # fmt: skip
"""The model types that tests compare in several ranks with one. `docs/models.md` lists them."""
MODEL_TYPES = PARALLEL_TYPES | frozenset((
    "afmoe", "axk1", "bailing_hybrid", "bamba", "bitnet", "deepseek_v2", "deepseek_v3", "falcon_h1",
    "falcon_mamba", "flex_olmo", "gemma3n_text", "gemma4_text", "glm4_moe_lite", "gpt_oss",
    "granitemoe", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_dense", "hunyuan_v1_moe", "jamba",
    "jetmoe", "kimi_linear", "laguna", "lfm2", "lfm2_moe", "lfm3", "longcat_flash", "mamba", "mamba2",
    "minicpm3", "minimax", "minimax_m2", "nemotron_h", "olmo2", "olmo3", "olmo_hybrid", "olmoe",
    "persimmon", "phi3", "phimoe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma",
    "stablelm", "youtu", "zamba", "zamba2",
))  # fmt: skip
"""The model types that are accepted, of text configurations: those that tests check against transformers'
`generate`. `tests/helpers/kvtest/families.py` has a tiny configuration of each, `docs/models.md` what each is
made of."""


def check_type(described: Mapping[str, Any]) -> None:
    """Refuse a config.json whose model type is there and is unsupported, whatever transformers reads from it.

    Raises: UnsupportedModel.
    """
    kind = described.get("model_type")
    nested = str([part for name, part in described.items() if name.endswith("_config")])
    if isinstance(kind, str) and "model_type" not in nested and not {kind, f"{kind}_text"} & MODEL_TYPES:
        raise unchecked_type(kind)


def unchecked_type(kind: str) -> UnsupportedModel:
    """Return the error of a model type that is not supported."""
    return UnsupportedModel(
        f"model type {kind!r} has not been checked against transformers, and is not supported; supported are "
        f"{', '.join(sorted(MODEL_TYPES))}"
    )
