"""Changes to models whose code does not pass our attention all that it needs.

`loading.py` calls `adapt` once, on a loaded model. transformers' classes and checkpoints stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvferry.shared.model.adapters.latent import pass_latent_rows
from kvferry.shared.model.adapters.layers import pass_arguments, run_every_token, scale_queries_by_position
from kvferry.shared.model.adapters.states import continue_by_token, pass_states

_LATENT = (
    "axk1", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear", "longcat_flash",
    "minicpm3", "youtu",
)  # fmt: skip
ADAPTERS: Mapping[str, Callable[[Any], None]] = {
    **dict.fromkeys(_LATENT, pass_latent_rows),
    "falcon_mamba": continue_by_token,
    "gemma4_text": run_every_token,
    "jamba": continue_by_token,
    "llama4_text": scale_queries_by_position,
    "mamba": continue_by_token,
    "nemotron": pass_arguments,
    "recurrent_gemma": pass_states,
    "stablelm": pass_arguments,
    "zamba": continue_by_token,
}
"""By model type of the text configuration."""


def adapt(model: Any) -> None:
    """Change a model so that our attention can run it, if it needs that."""
    adapter = ADAPTERS.get(model.config.get_text_config().model_type)
    if adapter is not None:
        adapter(model)
