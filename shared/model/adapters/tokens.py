"""For layers whose scan of several tokens begins without a state (Mamba 1, Jamba, Zamba)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor


def continue_by_token(model: Any) -> None:
    """Let the mixers run tokens that continue from a state one at a time, in transformers' recurrent form."""
    for mixer in model.modules():
        if hasattr(mixer, "time_step_rank"):
            mixer.forward = partial(_forward, mixer.forward, mixer.layer_idx)


def _forward(
    forward: Any, layer: int, hidden_states: Tensor, cache_params: Any = None, **kwargs: Any
) -> Tensor:
    if hidden_states.shape[1] == 1 or cache_params is None or not cache_params.has_previous_state(layer):
        mixed: Tensor = forward(hidden_states, cache_params=cache_params, **kwargs)
        return mixed
    tokens = torch.split(hidden_states, 1, dim=1)
    return torch.cat([forward(token, cache_params=cache_params, **kwargs) for token in tokens], 1)
