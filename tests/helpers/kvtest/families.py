"""The families that tests check against transformers' `generate`, each as a tiny configuration.

`shared/model/model_types.py` has these model types and no others; `docs/models.md` lists them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvtest.tiny_models import VOCAB_SIZE, save_model

WINDOW = 24
_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 2,
    "attention_chunk_size": WINDOW,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
"""Fields that a family's configuration lacks are left out."""
_SPECIAL_TOKENS: Mapping[str, Any] = {"bos_token_id": 2, "eos_token_id": None, "pad_token_id": 0}
_PATTERN = ["sliding_attention", "full_attention"] * 2


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model type and what its tiny configuration has beside the common fields."""

    model_type: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> Any:
        made = CONFIG_MAPPING[self.model_type]
        known = {name for kind in made.__mro__ for name in getattr(kind, "__annotations__", {})}
        known |= set(inspect.signature(made.__init__).parameters)
        common = {name: value for name, value in _COMMON.items() if name in known}
        return made(**{**common, **_SPECIAL_TOKENS, **self.settings})

    def save(self, folder: Path) -> Path:
        """Write a random model with the demo tokenizer; returns the folder."""
        return save_model(self.config(), folder)


_PLAIN = (
    "apertus arcee aria_text bitnet cohere dots1 ernie4_5 ernie4_5_moe flex_olmo gemma glm glm4 "
    "glm4_moe gpt_neox granite granitemoe granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe "
    "hy_v3 hyperclovax internlm3 jetmoe llama minimax_m2 nanochat nemotron olmo olmo2 olmoe persimmon phi "
    "qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm"
)
_WINDOWED = (
    "afmoe cohere2 cohere2_moe cwm exaone4 exaone_moe gemma2 gemma3_text gpt_oss granite_swa granitemoe_swa "
    "llama4_text mellum ministral ministral3 mistral mixtral olmo3 phi3 starcoder2 vaultgemma"
)
_LATENT_TYPES = "axk1 deepseek_v2 deepseek_v3 glm4_moe_lite minicpm3 youtu"
LATENT_FAMILIES = (*_LATENT_TYPES.split(), "deepseek_v3-yarn", "longcat_flash")
"""Those with latent rows (MLA)."""
_LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 16,
}
_YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_LINEAR = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
"""Gated delta rule: Qwen3-Next and its successors."""
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
_STATE_SPACE_PATTERN = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
_STATEFUL: Mapping[str, Mapping[str, Any]] = {
    "qwen3_next": _LINEAR,
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": _LINEAR,
    "jamba": {
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
    },
    "granitemoehybrid": {**_MAMBA, "layer_types": _STATE_SPACE_PATTERN},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lfm3": {"layer_types": ["conv", "sliding_attention", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "bamba": {**_MAMBA, "attn_layer_indices": [2]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
    },
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_key_value_heads": 8,
        "n_mamba_heads": 8,
        "mamba_d_state": 8,
        "mamba_ngroups": 2,
        "chunk_size": 16,
        "num_mem_blocks": 2,
        "use_shared_attention_adapter": True,
        "adapter_rank": 8,
        "use_mem_rope": True,
    },
    "mamba": {"state_size": 8},
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 16},
    "falcon_mamba": {"state_size": 8},
    "olmo_hybrid": _LINEAR,
    "minimax": {"layer_types": _STATE_SPACE_PATTERN, "sliding_window": None, "block_size": 16},
    "recurrent_gemma": {"attention_window_size": WINDOW},
    "kimi_linear": {
        **_LATENT,
        "q_lora_rank": None,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "layer_types": _STATE_SPACE_PATTERN,
    },
    "bailing_hybrid": {**_LATENT, "layer_types": _STATE_SPACE_PATTERN},
}
"""Models with recurrent, linear-attention or convolution states."""
FAMILIES: Mapping[str, Family] = {
    **{name: Family(model_type=name, settings=settings) for name, settings in _STATEFUL.items()},
    **{name: Family(model_type=name) for name in f"{_PLAIN} {_WINDOWED}".split()},
    "gemma3_text": Family(model_type="gemma3_text", settings={"layer_types": _PATTERN}),
    "gemma3-vision": Family(
        model_type="gemma3",
        settings={
            "text_config": {**_COMMON, **_SPECIAL_TOKENS, "head_dim": 16, "layer_types": _PATTERN},
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "mm_tokens_per_image": 4,
        },
    ),
    "gemma3n_text": Family(
        model_type="gemma3n_text",
        settings={
            "layer_types": _PATTERN,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        },
    ),
    "gemma4_text": Family(
        model_type="gemma4_text",
        settings={
            "layer_types": _PATTERN,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "use_bidirectional_attention": "vision",
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "top_k_experts": 2,
        },
    ),
    "gemma4_text-shared": Family(
        model_type="gemma4_text",
        settings={
            "layer_types": _PATTERN,
            "global_head_dim": 16,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "use_double_wide_mlp": True,
        },
    ),
    **{name: Family(model_type=name, settings=_LATENT) for name in _LATENT_TYPES.split()},
    "deepseek_v3-yarn": Family(
        model_type="deepseek_v3",
        settings={**_LATENT, "q_lora_rank": None, "v_head_dim": 8, "rope_parameters": _YARN},
    ),
    "longcat_flash": Family(
        model_type="longcat_flash",
        settings={
            **_LATENT,
            "num_layers": 2,
            "head_dim": 4,
            "moe_topk": 2,
            "ffn_hidden_size": 96,
            "expert_ffn_hidden_size": 32,
            "zero_expert_num": 1,
        },
    ),
    "laguna": Family(
        model_type="laguna",
        settings={"layer_types": _PATTERN, "num_attention_heads_per_layer": [4, 8, 4, 8]},
    ),
    "llama4_text": Family(model_type="llama4_text", settings={"floor_scale": 16}),
    "phi3-longrope": Family(
        model_type="phi3",
        settings={
            "sliding_window": None,
            "original_max_position_embeddings": 4,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.2],
                "long_factor": [1.0, 2.0, 4.0],
            },
        },
    ),
    "phi3-full": Family(model_type="phi3", settings={"sliding_window": None}),
    "phimoe": Family(model_type="phimoe", settings={"sliding_window": None}),
    "qwen2-window": Family(model_type="qwen2", settings={"use_sliding_window": True, "max_window_layers": 2}),
    "qwen3-window": Family(model_type="qwen3", settings={"use_sliding_window": True, "max_window_layers": 2}),
    "mistral-full": Family(model_type="mistral", settings={"sliding_window": None}),
}
"""By name; one that differs from its model type is a second configuration of it."""
ONE_OF_EACH_KIND = (
    "llama",
    "gemma3_text",  # windows
    "gpt_oss",  # windows and sinks
    "llama4_text",  # chunks
    "gemma3n_text",  # layers that share rows
    "deepseek_v3",  # latent rows
    "qwen3_next",  # linear attention
    "jamba",  # state spaces
    "lfm2",  # convolutions
    "kimi_linear",  # latent rows and linear attention
    "mamba",  # states alone
)
"""A family for each kind of layer, for tests that need not run all of them."""
