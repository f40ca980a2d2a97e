"""A model's shapes and what it costs to compute, from its configuration: no weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvferry.shared.errors import ConfigurationError, UnsupportedModel
from kvferry.shared.model.checkpoint import (
    DEMO_NAME,
    model_fingerprint,
    quiet_libraries,
    resolve_model_path,
)
from kvferry.shared.model.spec import DTYPE_BYTES, DTypeName, LayerSpec, ModelSpec
from kvferry.shared.model.support import check_config


@dataclass(frozen=True, kw_only=True)
class ModelCost:
    """What one token costs to compute.

    Attributes:
        num_parameters: all of them, which are in memory.
        num_active: those that one token meets: of a mixture of experts, its chosen experts' only.
    """

    spec: ModelSpec
    num_parameters: int
    num_active: int

    @property
    def weights_bytes(self) -> int:
        return self.num_parameters * DTYPE_BYTES[self.spec.dtype]

    def prefill_flops(self, num_tokens: int) -> float:
        """Count a prompt's operations: two a parameter and token, and causal attention's two products."""
        return 2.0 * self.num_active * num_tokens + sum(
            2.0
            * self.spec.num_heads
            * self.spec.head_dim
            * num_tokens
            * min(num_tokens, layer_spec.window or num_tokens)
            for layer_spec in (self.spec.layer(layer) for layer in self.spec.row_layers)
        )


def read_model(path_or_id: str, *, dtype: DTypeName | None = None) -> ModelCost:
    """Read the costs of a model.

    Args:
        path_or_id: as `resolve_model_path` takes it; a folder needs no weights.
        dtype: of weights, K and V; None: the checkpoint's own.
    Raises:
        ConfigurationError: there is no such model.
        UnsupportedModel: kvferry does not serve it, or sizes of its layers are known only once it is loaded.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = resolve_model_path(path_or_id, weights=False)
    with quiet_libraries():
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except (OSError, KeyError, ValueError) as error:
            raise ConfigurationError(f"config.json of {path_or_id!r} does not load: {error}") from error
        text = config.get_text_config()
        max_model_len = int(getattr(text, "max_position_embeddings", 0) or 0)
        layers = check_config(config, max_model_len=max_model_len)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    if not all(layer.has_rows for layer in layers) or not hasattr(text, "num_attention_heads"):
        raise UnsupportedModel(
            f"model {path_or_id!r} has layers with a state, whose size is known only once it is loaded"
        )
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    latent_dim = int(getattr(text, "kv_lora_rank", 0) or 0)
    is_plain = not getattr(text, "attn_logit_softcapping", None) and not any("sink" in name for name in sizes)
    if latent_dim or not is_plain:
        layers = tuple(
            replace(layer, latent_dim=latent_dim, has_plain_softmax=is_plain)
            for layer in layers or (LayerSpec(),) * int(text.num_hidden_layers)
        )
    num_heads = int(text.num_attention_heads)
    # JetMoE's attention repeats the KV heads before it calls us.
    repeats = text.model_type == "jetmoe"
    num_kv_heads = num_heads if repeats else int(getattr(text, "num_key_value_heads", None) or num_heads)
    head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // num_heads)
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    share = _active_share(text)
    checkpoint_dtype = str(config.dtype or text.dtype or "bfloat16").removeprefix("torch.")
    chosen_dtype = dtype or checkpoint_dtype
    spec = ModelSpec(
        name=DEMO_NAME if path_or_id == DEMO_NAME else Path(path_or_id).name,
        fingerprint=_fingerprint(folder, chosen_dtype),
        num_layers=len(layers) or int(text.num_hidden_layers),
        num_heads=num_heads,
        num_kv_heads=1 if latent_dim else num_kv_heads,
        head_dim=latent_dim + int(text.qk_rope_head_dim) if latent_dim else head_dim,
        vocab_size=int(text.vocab_size),
        max_model_len=max_model_len,
        dtype=chosen_dtype,  # type: ignore[arg-type]
        eos_token_ids=(),
        layers=layers,
        checkpoint_dtype=checkpoint_dtype,  # type: ignore[arg-type]
    )
    total = sum(sizes.values())
    return ModelCost(spec=spec, num_parameters=total, num_active=total - experts + round(share * experts))


def _fingerprint(folder: Path, dtype: str) -> str:
    """Return the fingerprint of a model's own curves; "" if its weights are not on this machine."""
    try:
        return model_fingerprint(folder, dtype=dtype)
    except ConfigurationError:
        return ""


def _active_share(config: Any) -> float:
    """Return the share of the experts' parameters that a token uses."""
    number = next(
        (
            getattr(config, n)
            for n in ("num_local_experts", "num_experts", "n_routed_experts")
            if getattr(config, n, None)
        ),
        0,
    )
    return float(config.num_experts_per_tok) / number if number else 1.0
