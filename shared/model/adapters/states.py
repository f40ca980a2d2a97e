"""For layers whose states are not as our passes need them.

States are attributes of modules (RecurrentGemma), or the scan of several tokens cannot begin with one (Mamba
1, Jamba, Zamba).
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvferry.shared.errors import UnsupportedModel
from kvferry.shared.model.adapters.layers import decoder_of

_PARTS = ("linear_x", "linear_y", "linear_out", "conv_1d", "rg_lru", "act_fn")


def continue_by_token(model: Any) -> None:
    """Let the mixers run tokens that continue from a state one at a time, in transformers' recurrent form."""
    for mixer in model.modules():
        if hasattr(mixer, "time_step_rank"):
            mixer.forward = partial(_token_by_token, mixer.forward, mixer.layer_idx)


def _token_by_token(
    forward: Any, layer: int, hidden_states: Tensor, cache_params: Any = None, **kwargs: Any
) -> Tensor:
    if hidden_states.shape[1] == 1 or cache_params is None or not cache_params.has_previous_state(layer):
        mixed: Tensor = forward(hidden_states, cache_params=cache_params, **kwargs)
        return mixed
    tokens = torch.split(hidden_states, 1, dim=1)
    return torch.cat([forward(token, cache_params=cache_params, **kwargs) for token in tokens], 1)


def pass_states(model: Any) -> None:
    """Let every recurrent block take its states from the pass's cache and leave them there.

    Raises: UnsupportedModel: a block is not made as this adapter expects.
    """
    for layer, decoder_layer in enumerate(decoder_of(model).layers):
        block = decoder_layer.temporal_block
        if hasattr(block, "q_proj"):
            continue
        missing = [name for name in _PARTS if not hasattr(block, name)]
        if missing or not hasattr(block.rg_lru, "recurrent_states"):
            raise UnsupportedModel(
                f"{type(block).__name__} has no {', '.join(missing) or 'rg_lru.recurrent_states'}; this "
                f"version of transformers is not supported for {type(model).__name__}"
            )
        block.forward = partial(_recurrent, block, layer)


def _recurrent(
    block: Any,
    layer: int,
    input_states: Tensor,
    position_ids: Tensor,
    past_key_values: Any,
    **_: Any,
) -> tuple[Tensor, None]:
    """Run in place of the block's `forward`. The convolution's state is the last inputs, one fewer than its
    kernel's width."""
    gate = block.act_fn(block.linear_y(input_states))
    inputs = block.linear_x(input_states).transpose(1, 2)
    num_tokens, context = inputs.shape[2], block.conv_1d.kernel_size[0] - 1
    inputs = past_key_values.update_conv_state(inputs, layer, conv_kernel_size=context)
    convolved = F.conv1d(
        F.pad(inputs, (context, 0)), block.conv_1d.weight, block.conv_1d.bias, groups=inputs.shape[1]
    )
    # a copy with the same weights, so that passes of other threads do not see this one's state
    unit = copy.copy(block.rg_lru)
    unit.recurrent_states = past_key_values.get_recurrent_state(layer)
    output = unit(convolved[..., -num_tokens:].transpose(1, 2), position_ids)
    past_key_values.update_recurrent_state(unit.recurrent_states, layer)
    return block.linear_out(output * gate), None
