"""Representations by name: how a layer's prompt is stored, where it is neither plain rows nor packed by RDKV.

A plan's `representation` part is looked up here, and a layer's. Adding one is one file and one entry of
`STORED`. What goes with what is `representation.py`'s matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvferry.shared.compression.interface import StoredPrompt
from kvferry.shared.compression.plan import LayerPlan, ParamValue, Part
from kvferry.shared.compression.representations.interface import Representation
from kvferry.shared.compression.representations.kivi import Kivi
from kvferry.shared.compression.representations.ragged import Ragged
from kvferry.shared.compression.representations.think import Think

STORED: Mapping[str, Callable[[Mapping[str, ParamValue]], Representation]] = {
    "kivi": Kivi.from_params,
    "think": Think.from_params,
    "ragged": Ragged.from_params,
}


def stored_representation(part: Part) -> Representation | None:
    """What a part names; None where it is rows or RDKV's. Raises: InvalidRequest: bad parameters."""
    return STORED[part.name](part.params) if part.name in STORED else None


def wire_representation(layer: LayerPlan) -> Kivi | None:
    """How a resolved layer of rows is quantised for the wire; None where its rows travel as they are."""
    if layer.representation.name != "rows" or not layer.representation.params:
        return None
    return Kivi(bits=int(layer.representation.params["wire_bits"]))


def stored_bytes(prompt: StoredPrompt) -> int:
    """Bytes of a stored prompt: values, codes, scales and indexes."""
    return sum(tensor.numel() * tensor.itemsize for tensor in prompt.tensors.values())
