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


def text_type(described: Mapping[str, Any]) -> str:
    """Return the model type of a config.json's text part, which a family of models shares; "" without one."""
    text = described.get("text_config")
    return str((text if isinstance(text, dict) else described).get("model_type") or "")


def check_type(kind: str) -> None:
    """Check a text part's model type. Raises: UnsupportedModel."""
    if kind not in MODEL_TYPES:
        raise UnsupportedModel(
            f"model type {kind!r} has not been checked against transformers, and is not supported; supported "
            f"are {', '.join(sorted(MODEL_TYPES))}"
        )


def check_described(described: Mapping[str, Any]) -> None:
    """Check the model type of a config.json, unless only transformers can tell. Raises: UnsupportedModel."""
    kind = text_type(described)
    if kind and f"{kind}_text" not in MODEL_TYPES:
        check_type(kind)
