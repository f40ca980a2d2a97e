"""For models that run only the last tokens through the layers that share KV (Gemma 4)."""

from __future__ import annotations

from typing import Any

from kvferry.shared.errors import UnsupportedModel

_SLICE = "_maybe_slice_kv_shared_inputs"


def run_every_token(model: Any) -> None:
    """Let layers that share KV have every token's queries: methods observe them.

    Raises: UnsupportedModel: the model is not made as this adapter expects.
    """
    decoders = [its for its in model.modules() if hasattr(its, _SLICE)]
    if not decoders:
        raise UnsupportedModel(
            f"{type(model).__name__} has no {_SLICE}; this version of transformers is not supported for it"
        )
    for decoder in decoders:
        setattr(decoder, _SLICE, _unsliced)


def _unsliced(*inputs: Any, **_: Any) -> tuple[Any, ...]:
    """Args: hidden states, per-layer inputs, position embeddings and masks, then what it does not need."""
    return inputs[:4]
