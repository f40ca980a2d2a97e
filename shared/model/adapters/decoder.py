"""For models whose `get_decoder` returns the whole model (Llama 4)."""

from __future__ import annotations

from typing import Any


def decoder_of(model: Any) -> Any:
    """The module of a model's layers, without its head."""
    decoder = model.get_decoder()
    return getattr(decoder, "model", decoder)
