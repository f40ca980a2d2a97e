"""The model types that are accepted: those that tests check against transformers' `generate`.

`tests/helpers/kvtest/families.py` has a tiny configuration of each, `docs/models.md` what each is made of.
"""

from __future__ import annotations

MODEL_TYPES = frozenset((
    "afmoe", "apertus", "arcee", "aria_text", "axk1", "bailing_hybrid", "bamba", "bitnet", "cohere",
    "cohere2", "cohere2_moe", "cwm", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5", "ernie4_5_moe",
    "exaone4", "exaone_moe", "falcon_h1", "falcon_mamba", "flex_olmo", "gemma", "gemma2", "gemma3_text",
    "gemma3n_text", "gemma4_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt_neox", "gpt_oss",
    "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared",
    "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3", "jamba",
    "jetmoe", "kimi_linear", "laguna", "lfm2", "lfm2_moe", "lfm3", "llama", "llama4_text",
    "longcat_flash", "mamba", "mamba2", "mellum", "minicpm3", "minimax", "minimax_m2", "ministral",
    "ministral3", "mistral", "mixtral", "nanochat", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3",
    "olmo_hybrid", "olmoe", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "recurrent_gemma", "seed_oss",
    "smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma", "youtu", "zamba", "zamba2",
))  # fmt: skip
"""Of text configurations (`get_text_config`)."""
