"""`LanguageModel` over an unmodified transformers decoder: the forward passes of prefill and decode.

Prefill's engine and decode's engine call it; `attention.py` is what happens inside each layer. Does not load
(`loading.py`), compress, or keep any KV.
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
        model: a transformers causal language model in eval mode whose attention implementation is ours.
        rotation: undoes its keys' rotary positions; None where that cannot be done.
    """

    def __init__(self, model: Any, spec: ModelSpec, rotation: KeyRotation | None = None) -> None:
        self._model = model
        self._spec = spec
        self._rotation = rotation
        self._device: torch.device = model.device
        self._dtype: torch.dtype = model.dtype
        self._skipped = (0, 0)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @torch.inference_mode()
    def prefill(self, token_ids: Tensor, *, start: int, observer: PrefillObserver) -> Tensor:
        """Run new prompt tokens, layer by layer; see `LanguageModel.prefill`.

        Raises:
            ContextLengthExceeded: start + T is beyond the model's window.
            Whatever the observer raises; the pass ends there.
        """
        end = start + token_ids.shape[0]
        if end > self._spec.max_model_len:
            raise ContextLengthExceeded(f"{end} tokens; the model's window is {self._spec.max_model_len}")
        positions = torch.arange(start, end, device=self._device)
        current = PrefillPass(observer, start=start, max_model_len=self._spec.max_model_len)
        return self._run(token_ids[None], positions[None], current)[0]

    @torch.inference_mode()
    def decode(self, token_ids: Tensor, positions: Tensor, *, attention: DecodeAttention) -> Tensor:
        """Run one token for each of B sequences; see `LanguageModel.decode`."""
        current = DecodePass(attention, max_model_len=self._spec.max_model_len)
        return self._run(token_ids[:, None], positions[:, None], current)

    @torch.inference_mode()
    def pre_rope_keys(self, layer: int, keys: Tensor) -> Tensor:
        """Keys without their rotary positions; see `LanguageModel.pre_rope_keys`."""
        if self._rotation is None:
            raise UnsupportedModel(
                f"{type(self._model).__name__} rotates its keys in a way that cannot be undone; compression "
                "methods that look at keys before RoPE cannot be used with it"
            )
        return self._rotation.undo(layer, keys)

    def skip_positions(self, first: int, number: int) -> None:
        """Rotate the tokens at position `first` and later as if they were `number` positions further on.

        Holds for later passes; for measuring what distance alone costs. `number` 0 skips nothing.
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
