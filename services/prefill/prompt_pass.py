"""What happens to each layer of one prompt: load history, compress, ship, stage.

Place in the request's path: called by the model's bridge on the engine thread, layer by layer, while the
wire's own thread sends the layers before. Holds no K or V after `layer_done` returns. Does not sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.shared.compression.compress import compress_layer
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import ResolvedPlan
from kvferry.shared.history.interface import HistoryTurn
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.wire.interfaces import OutgoingTransfer
from kvferry.shared.wire.messages import Section
from kvferry.shared.wire.packed_sections import packed_sections


@dataclass(kw_only=True)
class PassTimes:
    """Seconds spent on one prompt, by what they were spent on."""

    compress_s: float = 0.0
    pack_s: float = 0.0
    history_load_s: float = 0.0
    history_store_s: float = 0.0


class PromptPass:
    """Implements `PrefillObserver` for one prompt; it may be run again from the start after a history miss.

    A second run ships only the layers that the first did not: those already sent are rows of the same prompt.
    """

    def __init__(
        self,
        *,
        resolved: ResolvedPlan,
        transfer: OutgoingTransfer,
        turn: HistoryTurn | None,
        model: LanguageModel,
        check: Callable[[], None],
        progress: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """Args:
        model: the one that runs the prompt; asked for keys before RoPE where a method wants them.
        check: raises to stop the pass; called before each layer's attention and after it.
        progress: told of each layer done.
        """
        self.times = PassTimes()
        self._resolved = resolved
        self._transfer = transfer
        self._turn = turn
        self._model = model
        self._device = model.device
        self._check = check
        self._progress = progress
        self._clock = clock
        self._shipped_layers = 0

    def history(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """See `PrefillObserver.history`. Raises Cancelled, HistoryMiss."""
        self._check()
        if self._turn is None:
            return None
        begin_s = self._clock()
        loaded = self._turn.load(layer)
        if loaded is not None:
            loaded = (loaded[0].to(self._device), loaded[1].to(self._device))
        self.times.history_load_s += self._clock() - begin_s
        return loaded

    def layer_done(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        """See `PrefillObserver.layer_done`. Raises Cancelled, TransferFailed."""
        self._check()
        if layer >= self._shipped_layers:
            inputs = LayerInputs(
                layer=layer,
                queries=queries,
                keys=keys,
                values=values,
                scaling=scaling,
                unrotate=lambda rows: self._model.pre_rope_keys(layer, rows),
            )
            self._ship(inputs)
            self._shipped_layers = layer + 1
        if self._turn is not None:
            begin_s = self._clock()
            start = self._turn.reused_tokens
            self._turn.append(layer, keys[:, start:], values[:, start:])
            self.times.history_store_s += self._clock() - begin_s
        self._progress()

    def _ship(self, inputs: LayerInputs) -> None:
        self._synchronize()
        begin_s = self._clock()
        kept = compress_layer(self._resolved, inputs)
        self._synchronize()
        compressed_s = self._clock()
        layer = inputs.layer
        if kept.packed is not None:
            for section, tensor in packed_sections(kept.packed):
                self._transfer.send(layer=layer, section=section, tensor=tensor)
        else:
            if kept.positions is not None:
                self._transfer.send(layer=layer, section=Section.INDEX, tensor=kept.positions)
            self._transfer.send(layer=layer, section=Section.KEYS, tensor=kept.keys)
            self._transfer.send(layer=layer, section=Section.VALUES, tensor=kept.values)
        self.times.compress_s += compressed_s - begin_s
        self.times.pack_s += self._clock() - compressed_s

    def _synchronize(self) -> None:
        # Kernels run behind the host: without this, compression's time would be booked on the copy after it.
        # That copy waits for them anyway, so nothing is lost.
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
