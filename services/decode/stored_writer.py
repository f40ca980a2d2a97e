"""Puts one layer's announced sections, one after another, into a zone of bytes; refuses what prefill never
makes.

Called by `cache_writer.py` under the sequence's lock, in the order of the sections. The zone is the arena's
where decode attends on the prompt as it came, and a passing one where it does not. Attends on nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry.services.decode.arena_copier import ArenaCopier
from kvferry.shared.compression.interface import StoredPrompt
from kvferry.shared.compression.representations.interface import Representation, Specs, view_zone
from kvferry.shared.errors import TransferFailed
from kvferry.shared.wire.messages import BlockHeader
from kvferry.shared.wire.stored_sections import section_of


class StoredLayerWriter:
    """Writes one layer.

        section by section, each from its first byte to its last ──► all written ──► checked: `prompt`

    Args:
        layer: its index, for messages.
        zone: uint8, room for all tensors.
        num_prompt_tokens: T; kept positions lie in [0, T).
    """

    def __init__(
        self,
        layer: int,
        representation: Representation,
        specs: Specs,
        zone: Tensor,
        copier: ArenaCopier,
        *,
        num_prompt_tokens: int,
    ) -> None:
        self.prompt: StoredPrompt | None = None
        self._layer = layer
        self._representation = representation
        self._tensors = view_zone(specs, zone)
        self._copier = copier
        self._num_prompt_tokens = num_prompt_tokens
        self._waiting = [name for name, spec in specs.items() if spec.size_bytes]
        self._offset = 0

    def write(self, header: BlockHeader, payload: memoryview) -> None:
        """Place one block.

        Raises:
            TransferFailed: it is not the next one, lies outside its section, or completes a layer that
                prefill never makes.
        """
        name = self._waiting[0] if self._waiting else ""
        if not name or header.section is not section_of(name) or header.offset != self._offset:
            raise self._failed(
                f"{header.section.name} offset {header.offset} came; {name.upper() or 'nothing more'} offset "
                f"{self._offset} is expected",
                "order",
            )
        target = self._tensors[name].flatten().view(torch.uint8)
        end = header.offset + payload.nbytes
        if end > target.numel():
            raise self._failed(
                f"{header.section.name}: bytes {header.offset} to {end} came; the section has "
                f"{target.numel()}",
                "size",
            )
        self._copier.load(payload)
        self._copier.copy(target[header.offset : end], 0)
        self._offset = end
        if end == target.numel():
            self._waiting.pop(0)
            self._offset = 0
        if not self._waiting:
            self._complete()

    def finish(self) -> StoredPrompt:
        """The layer, all of it written and checked. Raises: TransferFailed: bytes are missing."""
        if self.prompt is None:
            raise self._failed("not all of its bytes came", "incomplete")
        return self.prompt

    def _complete(self) -> None:
        prompt = self._representation.view(self._tensors)
        try:
            prompt.check(self._num_prompt_tokens)
        except ValueError as error:
            raise self._failed(str(error), "packed") from error
        self.prompt = prompt

    def _failed(self, message: str, reason: str) -> TransferFailed:
        return TransferFailed(f"layer {self._layer}, stored: {message}", reason=reason)
