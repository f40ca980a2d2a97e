"""`LanguageModel` over an unmodified transformers decoder: the forward passes of prefill and decode.

Called by the engines of prefill and decode. `attention.py` runs inside each layer; `loading.py` loads models.
No KV is stored here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvferry.shared.errors import ContextLengthExceeded, UnsupportedModel
from kvferry.shared.model.attention import AttentionPass, DecodePass, PrefillPass
from kvferry.shared.model.interface import DecodeAttention, PrefillObserver
from kvferry.shared.model.rotary import KeyRotation
from kvferry.shared.model.spec import ModelSpec


class TransformersModel:
    """Implements `LanguageModel`. Not thread-safe: one pass at a time.

    Args:
        model: a transformers causal language model in eval mode that uses our attention function.
        rotation: undoes the rotary positions of its keys; None if that is not possible.
    """

    def __init__(self, model: Any, spec: ModelSpec, rotation: KeyRotation | None = None) -> None:
        self.spec = spec
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self._model = model
        self._rotation = rotation
        self._skipped = (0, 0)

    @torch.inference_mode()
    def prefill(self, token_ids: Tensor, *, start: int, observer: PrefillObserver) -> Tensor:
        """Run new prompt tokens, layer by layer; see `LanguageModel.prefill`.

        Raises:
            ContextLengthExceeded: start + T is beyond the model's window.
            Whatever the observer raises; this ends the pass.
        """
        end = start + token_ids.shape[0]
        if end > self.spec.max_model_len:
            raise ContextLengthExceeded(f"{end} tokens; the model's window is {self.spec.max_model_len}")
        positions = torch.arange(start, end, device=self.device)
        current = PrefillPass(observer, start=start, max_model_len=self.spec.max_model_len)
        return self._run(token_ids[None], positions[None], current)[0]

    @torch.inference_mode()
    def decode(self, token_ids: Tensor, positions: Tensor, *, attention: DecodeAttention) -> Tensor:
        """Run one token for each of B sequences; see `LanguageModel.decode`."""
        current = DecodePass(attention, max_model_len=self.spec.max_model_len)
        return self._run(token_ids[:, None], positions[:, None], current)

    @torch.inference_mode()
    def pre_rope_keys(self, layer: int, keys: Tensor) -> Tensor:
        """Keys without their rotary positions; see `LanguageModel.pre_rope_keys`."""
        if self._rotation is None:
            raise UnsupportedModel(
                f"the rotary positions of {type(self._model).__name__} cannot be undone; compression methods "
                "that use keys before RoPE cannot be used with it"
            )
        return self._rotation.undo(layer, keys)

    def skip_positions(self, first: int, number: int) -> None:
        """In later passes, rotate tokens from position `first` on as if they were `number` positions later.

        Used to measure what distance alone costs. `number` 0 skips nothing.
        """
        self._skipped = (first, number)

    def _run(self, token_ids: Tensor, positions: Tensor, current: AttentionPass) -> Tensor:
        first, skipped = self._skipped
        if skipped:
            positions = positions + skipped * (positions >= first)
        output = self._model(
            input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=1, kvferry=current
        )
        logits: Tensor = output.logits[:, -1]
        return logits.float()
