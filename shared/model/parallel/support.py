"""Which models can be divided among ranks, and the spec of the whole model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from kvferry.shared.errors import ConfigurationError, UnsupportedModel
from kvferry.shared.model.spec import ModelSpec

PARALLEL_TYPES = frozenset((
    "apertus", "arcee", "aria_text", "cohere", "cohere2", "cohere2_moe", "cwm", "dots1", "ernie4_5",
    "ernie4_5_moe", "exaone4", "exaone_moe", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe",
    "gpt_neox", "granite", "granite_swa", "granitemoe_swa", "helium", "hy_v3", "hyperclovax", "internlm3",
    "llama", "llama4_text", "mellum", "ministral", "ministral3", "mistral", "mixtral", "nanochat",
    "nemotron", "olmo", "phi", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3",
    "solar_open", "starcoder2", "vaultgemma",
))  # fmt: skip
"""Of text configurations; those that tests check against one rank. `docs/models.md` lists them."""
_INPUTS = (("q_proj", "k_proj", "v_proj"), ("query_key_value",))
_OUTPUTS = ("o_proj", "dense")


def check_parallel(config: Any, num_ranks: int, *, is_quantised: bool) -> None:
    """Check a configuration before weights are read.

    Raises:
        UnsupportedModel: the model is not divided by KV heads.
        ConfigurationError: its KV heads cannot be divided by the number of ranks.
    """
    text = config.get_text_config()
    if text.model_type not in PARALLEL_TYPES:
        raise UnsupportedModel(
            f"model type {text.model_type!r} has not been checked with tensor_parallel {num_ranks}, and is "
            f"not supported with it; supported are {', '.join(sorted(PARALLEL_TYPES))}"
        )
    if is_quantised:
        raise UnsupportedModel(
            f"the weights are quantised, which is not supported with tensor_parallel {num_ranks}; it "
            "must be 1"
        )
    plan = getattr(text, "base_model_tp_plan", None) or {}
    styles = {name.rsplit(".", 1)[-1]: style for name, style in plan.items()}
    by_heads = any(all(styles.get(name) == "colwise" for name in names) for names in _INPUTS)
    if not by_heads or all(styles.get(name) != "rowwise" for name in _OUTPUTS):
        raise UnsupportedModel(
            f"transformers' tp_plan of model type {text.model_type!r} does not divide attention by heads; "
            "tensor_parallel must be 1"
        )
    num_kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if num_kv_heads % num_ranks:
        raise ConfigurationError(
            f"tensor_parallel is {num_ranks}, and the model has {num_kv_heads} KV heads; it must divide them"
        )


def distributed_config(num_ranks: int) -> Any:
    """transformers' configuration of so many ranks.

    Raises: ConfigurationError: transformers is too old.
    """
    try:
        from transformers.distributed.configuration_utils import DistributedConfig

        return DistributedConfig(tp_size=num_ranks)
    except (ImportError, TypeError) as error:
        raise ConfigurationError(
            f"tensor_parallel is {num_ranks}, and the installed transformers cannot divide a model with a "
            "DistributedConfig; install a newer one, or set tensor_parallel to 1"
        ) from error


def use_local_weights(model: Any) -> None:
    """Replace the linear modules' distributed tensors by this rank's part, which spares a conversion in every
    call. transformers' own hooks of these modules exchange what is needed."""
    from torch.distributed.tensor import DTensor

    for module in model.modules():
        if isinstance(module, nn.Linear):
            for name, weight in module.named_parameters(recurse=False):
                if isinstance(weight, DTensor):
                    module._parameters[name] = nn.Parameter(weight.to_local(), requires_grad=False)


def whole_spec(spec: ModelSpec, num_ranks: int) -> ModelSpec:
    """The spec of all heads.

    Args: spec: as the probe has measured it in one rank.
    Raises: UnsupportedModel: a layer cannot be divided.
    """
    for layer in range(spec.num_layers):
        its = spec.layer(layer)
        if not its.has_rows or its.latent_dim or its.heads is not None:
            raise UnsupportedModel(
                f"layer {layer} has a state, latent rows or heads of its own, which is not supported with "
                f"tensor_parallel {num_ranks}; it must be 1"
            )
    return replace(spec, num_heads=spec.num_heads * num_ranks, num_kv_heads=spec.num_kv_heads * num_ranks)
