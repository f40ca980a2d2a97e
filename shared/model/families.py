"""The model types that are accepted: those that tests check against transformers' `generate`.

`tests/helpers/kvtest/families.py` has a tiny configuration of each, `docs/models.md` what each is made of.
"""

from __future__ import annotations

MODEL_TYPES = frozenset((
    "afmoe", "apertus", "arcee", "aria_text", "axk1", "bitnet", "cohere", "cohere2", "cohere2_moe", "cwm",
    "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo",
    "gemma", "gemma2", "gemma3_text", "gemma3n_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite",
    "gpt_neox", "gpt_oss", "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared",
    "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hyperclovax", "jetmoe", "llama", "llama4_text",
    "longcat_flash", "minicpm3", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "nanochat",
    "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "persimmon", "phi", "phi3", "phimoe", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2",
    "vaultgemma", "youtu",
))  # fmt: skip
"""Of text configurations (`get_text_config`)."""
