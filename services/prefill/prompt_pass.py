"""Handles each layer of one prompt: load history, compress, ship, stage.

Place in the request's path: called by the model on the engine thread, layer by layer, while the sender's own
thread sends earlier layers. After `layer_done` returns, a pass references only the tensors that are being
copied to the host (`host_copies.py`; on CUDA, one layer's). If the plan measures its layer budgets, K and V
of all layers wait on the host until `finish`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from kvferry.services.prefill.host_copies import HostCopies
from kvferry.shared.cache.delta import NEW_ROWS, Positions, RetainedChain, delta_tensors, layer_positions
from kvferry.shared.compression.compress import WaitingLayer, allocate_rows, compress_layer, measure_layer
from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.formats.interface import LayerFormat
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.kept import KeptMap
from kvferry.shared.compression.plan import ResolvedPlan, is_measured
from kvferry.shared.errors import HistoryMiss
from kvferry.shared.history.turn import StagedTurn
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.telemetry import stage
from kvferry.shared.wire.messages import NamedTensor
from kvferry.shared.wire.transfer import OutgoingTransfer


@dataclass(kw_only=True)
class PassTimes:
    """Seconds spent on one prompt, by activity."""

    compress_s: float = 0.0
    pack_s: float = 0.0
    history_load_s: float = 0.0
    history_store_s: float = 0.0


class PromptPass:
    """Implements `PrefillObserver` for one prompt; it may be run again from the start after a history miss.

        begin ──► layer_done: compress, ship ──► ... ──► finish
          └─────► layer_done: measure        ──► ... ──► finish: rows per layer, open, compress and ship each
                  (measured layer budgets)

    A second run ships only the layers that the first did not; those already sent are of the same prompt.
    """

    def __init__(
        self,
        *,
        resolved: ResolvedPlan,
        formats: tuple[LayerFormat, ...],
        open_transfer: Callable[[ResolvedPlan], OutgoingTransfer],
        turn: StagedTurn | None,
        retained: RetainedChain | None,
        model: LanguageModel,
        check: Callable[[], None],
        progress: Callable[[], None],
        clock: Callable[[], float],
        copies: HostCopies,
        kept_bins: int = 0,
    ) -> None:
        """Args:
        open_transfer: called once, with the plan to ship.
        turn: the session's staged turn; None without a session.
        retained: rows that decode retains; they are not shipped.
        model: runs the prompt; computes pre-RoPE keys for methods that need them.
        check: raises to stop the pass; called before and after each layer's attention.
        progress: called after each layer.
        copies: copies tensors to the host for shipping and staging.
        kept_bins: number of parts of the prompt for which `kept_map` counts selected rows; 0: no map.
        """
        self.times = PassTimes()
        self.kept_map = (
            KeptMap(num_tokens=resolved.num_prompt_tokens, num_bins=kept_bins) if kept_bins else None
        )
        self._resolved = resolved
        self._open_transfer = open_transfer
        self._transfer: OutgoingTransfer | None = None
        self._measured = is_measured(resolved)
        self._formats = formats
        self._waiting: dict[int, WaitingLayer] = {}
        self._turn = turn
        self._retained = retained
        self.positions: dict[int, Positions | None] = {}
        """Of each layer shipped so far, as `RetainedRows.layers`."""
        self.num_spared_rows = 0
        """Rows, counted per KV head, that were not shipped because decode retains them."""
        self._model = model
        self._device = model.device
        self._check = check
        self._progress = progress
        self._clock = clock
        self._copies = copies
        self._leaving: deque[Callable[[], None]] = deque()
        self._shipped_layers = 0

    def history(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """See `PrefillObserver.history`. Raises Cancelled, HistoryMiss."""
        self._check()
        if self._turn is None:
            return None
        begin_s = self._clock()
        try:
            loaded = self._turn.load(layer)
            if loaded is not None:
                loaded = (loaded[0].to(self._device), loaded[1].to(self._device))
        except HistoryMiss:
            # Before the turn restarts: layers sent so far are not sent again, rows staged so far are dropped.
            self._hand_over(0)
            raise
        finally:
            self.times.history_load_s += self._clock() - begin_s
        return loaded

    def layer_done(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        """See `PrefillObserver.layer_done`. Raises Cancelled, TransferFailed."""
        self._check()
        if self._measured or layer >= self._shipped_layers:
            inputs = LayerInputs(
                layer=layer,
                queries=queries,
                keys=keys,
                values=values,
                scaling=scaling,
                unrotate=lambda rows: self._model.pre_rope_keys(layer, rows),
            )
            if self._measured:
                self._measure(inputs)
            else:
                self._ship(self._resolved, self._formats[layer], inputs)
                self._shipped_layers = layer + 1
        if self._turn is not None:
            self._stage(self._turn, layer, keys, values)
        self._hand_over(self._copies.layers_behind)
        self._progress()

    def begin(self) -> None:
        """Open the transfer before the pass, to detect a refusal early, unless its sizes are unknown yet."""
        if not self._measured:
            self._transfer = self._open_transfer(self._resolved)

    def finish(self) -> None:
        """After the pass: compress the waiting layers and ship the rest. Raises Cancelled, TransferFailed."""
        if not self._measured:
            self._hand_over(0)
            return
        waiting = [self._waiting.pop(layer) for layer in sorted(self._waiting)]
        measured = allocate_rows(self._resolved, [layer.variance for layer in waiting])
        self._check()
        self._transfer = self._open_transfer(measured)
        formats = make_formats(self._model.spec, measured)
        waiting.reverse()
        while waiting:
            self._check()
            layer = waiting.pop()
            inputs = self._on_device(layer.inputs)
            self._ship(measured, formats[inputs.layer], inputs, layer.scores)
            self._hand_over(self._copies.layers_behind)
            self._progress()
        self._hand_over(0)

    def _measure(self, inputs: LayerInputs) -> None:
        """Measure a layer whose number of rows depends on the other layers; its K and V wait on the host."""
        begin_s = self._clock()
        waiting = measure_layer(self._resolved, inputs)
        host = replace(waiting.inputs, keys=waiting.inputs.keys.cpu(), values=waiting.inputs.values.cpu())
        self._waiting[inputs.layer] = replace(waiting, inputs=host)
        self.times.compress_s += self._clock() - begin_s

    def _on_device(self, inputs: LayerInputs) -> LayerInputs:
        return replace(inputs, keys=inputs.keys.to(self._device), values=inputs.values.to(self._device))

    def _ship(
        self, resolved: ResolvedPlan, fmt: LayerFormat, inputs: LayerInputs, scores: Tensor | None = None
    ) -> None:
        # Kernels run asynchronously: without synchronizing, times would include earlier work.
        self._copies.synchronize()
        begin_s = self._clock()
        with stage("compress", layer=inputs.layer):
            tensors = compress_layer(resolved, fmt, inputs, scores=scores)
        if self.kept_map is not None:
            self.kept_map.add(fmt.positions_by_head(tensors))
        self._copies.synchronize()
        compressed_s = self._clock()
        self.times.compress_s += compressed_s - begin_s
        layer = inputs.layer
        if fmt.is_plain:
            self.positions[layer] = layer_positions(tensors)
        if self._retained is not None:
            num_rows = tensors["keys"][:, :, 0].numel()
            tensors = delta_tensors(tensors, layer, self._retained)
            self.num_spared_rows += num_rows - int(tensors[NEW_ROWS].sum())
        names, kinds = list(tensors), {NEW_ROWS: "index", **fmt.kinds}
        arrived = self._copies.start(list(tensors.values()))
        self.times.pack_s += self._clock() - compressed_s

        def send() -> None:
            begin_s = self._clock()
            with stage("ship", layer=layer):
                assert self._transfer is not None, "the pass was not begun"
                sent = [
                    NamedTensor(name=name, tensor=tensor, kind=kinds[name])
                    for name, tensor in zip(names, arrived(), strict=True)
                ]
                self._transfer.send_layer(layer, sent)
            self.times.pack_s += self._clock() - begin_s

        self._leaving.append(send)

    def _stage(self, turn: StagedTurn, layer: int, keys: Tensor, values: Tensor) -> None:
        """Stage the layer's new rows in the session's history."""
        start = turn.reused_tokens
        arrived = self._copies.start([keys[:, start:], values[:, start:]])

        def append() -> None:
            begin_s = self._clock()
            turn.append(layer, *arrived())
            self.times.history_store_s += self._clock() - begin_s

        self._leaving.append(append)

    def _hand_over(self, layers_behind: int) -> None:
        """Ship and stage the copied tensors of all but the last `layers_behind` layers."""
        per_layer = 1 if self._turn is None or self._measured else 2
        while len(self._leaving) > layers_behind * per_layer:
            self._leaving.popleft()()
