"""Handles each layer of one prompt: load history, compress, copy to the host, ship, stage.

Place in the request's path: called by the model on the engine thread, layer by layer, while the layer
before is shipped and staged on another one (`host_copies.py`). After `layer_done` returns, a pass
references only the tensors of one layer that are being handed over. If the plan measures its layer budgets
or drafts, K and V of all layers wait on the host until the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvferry.services.prefill.host_copies import Arrived, Elapsed, HandOver, HostCopies
from kvferry.services.prefill.job import PrefillJob
from kvferry.services.prefill.parts import PromptTransfer
from kvferry.services.prefill.prompt_logprobs import PromptLogprobs
from kvferry.services.prefill.schedule import Pauses
from kvferry.shared.cache.delta import NEW_ROWS, ShippedRows, delta_tensors, layer_positions
from kvferry.shared.compression.compress import WaitingLayer, allocate_waiting, measure_layer
from kvferry.shared.compression.draft import add_draft
from kvferry.shared.compression.formats import encode_layer, make_formats
from kvferry.shared.compression.formats.interface import Encoded, LayerFormat, Tensors
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.kept import KeptMap
from kvferry.shared.compression.plan import ResolvedPlan, is_measured, num_draft_tokens
from kvferry.shared.errors import HistoryMiss
from kvferry.shared.history.turn import StagedTurn
from kvferry.shared.model.interface import Division, LanguageModel
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.process.heartbeat import Heartbeat
from kvferry.shared.telemetry.tracing import stage
from kvferry.shared.wire.messages import NamedTensor

_EMPTY = Encoded(tensors=())
"""A layer of which nothing is shipped."""


@dataclass(kw_only=True)
class PassTimes:
    """Seconds spent on one prompt, by activity; these overlap."""

    compress_s: float = 0.0
    pack_s: float = 0.0
    history_load_s: float = 0.0
    history_store_s: float = 0.0


class LayerShipper:
    """Ships the layers of one prompt, of the heads that the formats have.

    Args: clock: seconds, on the thread that sends.

    Attributes: rows: what was shipped; sending_s: seconds that sending took.
    """

    def __init__(
        self, spec: ModelSpec, copies: HostCopies, rows: ShippedRows, clock: Callable[[], float]
    ) -> None:
        self.rows = rows
        self.sending_s = 0.0
        self._clock = clock
        self._spec = spec
        self._copies = copies

    def begin(
        self, transfer: PromptTransfer, fmt: LayerFormat, layer: int, encoded: Encoded
    ) -> Callable[[], None]:
        """Begin to copy a layer to the host. Returns: waits for that and sends it; for another thread."""
        if (retained := transfer.retained) is not None:
            tensors = encoded.finish(encoded.tensors)
            num_rows = tensors["keys"][:, :, 0].numel()
            tensors = delta_tensors(tensors, layer, retained)
            num_saved = num_rows - int(tensors[NEW_ROWS].sum())
            self.rows.saved_bytes += len(self._spec.row_names) * self._spec.row_bytes(layer) * num_saved
            encoded = Encoded(tensors=tuple(tensors.values()), names=tuple(tensors))
        kinds = {NEW_ROWS: "index", **fmt.kinds}
        arrived = self._copies.start(encoded.tensors)

        def send() -> None:
            begin_s = self._clock()
            with stage("ship", layer=layer):
                copied = encoded.finish(arrived())
                if self.rows.kept_map is not None:
                    self.rows.kept_map.add(layer, fmt.positions_by_head(copied))
                if fmt.is_plain:
                    self.rows.positions[layer] = layer_positions(copied)
                named = [NamedTensor(name=name, tensor=its, kind=kinds[name]) for name, its in copied.items()]
                transfer.send_layer(layer, named)
            self.sending_s += self._clock() - begin_s

        return send


class PromptPass:
    """Implements `DividingObserver` and `LayerStates` for one prompt.

        open ──► layer_done: compress, ship ──► store: ship the state ──► ...
        layer_done: measure ──► ... ──► open ──► compress, ship each      (measured layer budgets)
        layer_done: wait ──► ... ──► draft, open ──► compress, ship each  (a draft)
        open ──► layer_compressed: ship ──► ...    (several ranks, each compresses and ships its heads)

    Layers are shipped in order: one that is complete before an earlier one waits. If a layer's history turns
    out lost, the whole prompt is run. This second run ships only the layers that the first did not, if the
    method is exact; else the pass fails, because the answers in the history have other rows than prefill
    computes, and layers with and without them make a cache that no run in one process gives.

    Attributes:
        rows: what is known of those shipped; of all heads once the pass is over.
        logprobs: of the prompt's tokens; None if the request wants none.
    """

    def __init__(
        self,
        job: PrefillJob,
        *,
        model: LanguageModel,
        copies: HostCopies,
        pauses: Pauses | None,
        open_transfer: Callable[[ResolvedPlan], PromptTransfer],
        progress: Callable[[int], None],
        heartbeat: Heartbeat,
        clock: Callable[[], float],
        pool: Executor,
        pool_clock: Callable[[], float],
    ) -> None:
        """Args:
        pauses: interrupt a long pass while it computes, but not while it loads, ships or stages; of a model
            of several ranks while it compresses only. None: the pass is not interrupted.
        open_transfer: called once, with the plan to ship.
        progress: called after each layer, with its number.
        heartbeat: told of waits for stored history and for the layer that is being handed over.
        clock: seconds of this pass.
        pool, pool_clock: where layers are handed over, and seconds there.
        """
        self.times = PassTimes()
        bins = job.request.retained_bins
        kept_map = KeptMap(num_tokens=job.resolved.num_prompt_tokens, num_bins=bins) if bins else None
        self.rows = ShippedRows(kept_map=kept_map)
        self._shipper = LayerShipper(model.spec, copies, self.rows, pool_clock)
        count = job.request.prompt_logprobs
        self.logprobs = PromptLogprobs(job.request.prompt_token_ids, count) if count is not None else None
        self._job = job
        self._model = model
        self._copies = copies
        self._pauses = pauses or Pauses(lambda: None)
        self._is_long = pauses is not None
        self._pauses_in_model = model.num_ranks == 1
        self._open_transfer = open_transfer
        self._progress = progress
        self._heartbeat = heartbeat
        self._clock = clock
        self._pool_clock = pool_clock
        self._num_draft = num_draft_tokens(job.resolved)
        self._waits = is_measured(job.resolved) or self._num_draft > 0
        self._waiting: dict[int, WaitingLayer] = {}
        self._states: dict[int, Tensors] = {}
        self._complete: dict[int, Encoded] = {}
        self._handing = HandOver(pool, heartbeat)
        self._handed = PassTimes()
        self._compressing: list[Elapsed] = []
        self._shipped_layers = 0
        self._start = 0

    def run(self, on_miss: Callable[[HistoryMiss], None]) -> Tensor:
        """Run, compress and ship the prompt's tokens that are not cached; of all if their KV does not load.

        Args: on_miss: called if it does not, to restart the staged turn.
        Returns: float32 logits `[V]` of the last token.
        Raises: Cancelled, TransferFailed; HistoryMiss: layers of a method that is not exact were shipped,
            with the rows and the selection of the lost history.
        """
        if not self._waits:
            # Before the pass, to detect a refusal early; measured sizes are unknown yet.
            self._job.transfer = self._open_transfer(self._job.resolved)
            self._job.check_cancelled()
        with self._pauses if self._is_long else nullcontext(), self._handing:
            try:
                logits = self._forward()
            except HistoryMiss as miss:
                self._job.check_cancelled()
                if self._shipped_layers and not self._job.resolved.plan.is_exact:
                    raise
                on_miss(miss)
                logits = self._forward()
            if self._waits:
                self._ship_waiting(logits)
            self._handing.settle()
        assert self._job.transfer is not None, "layers were shipped"
        self._job.transfer.add_rows(self.rows)
        self._job.saved_bytes = self.rows.saved_bytes
        self.times.pack_s += self._shipper.sending_s
        self.times.history_store_s += self._handed.history_store_s
        # not before: the device would have nothing queued while a layer's time is waited for
        self.times.compress_s += sum(elapsed_s() for elapsed_s in self._compressing)
        assert self._shipped_layers == self._model.spec.num_layers, self._shipped_layers
        return logits

    def _forward(self) -> Tensor:
        start = self._start = self._job.num_reused
        self._complete.clear()
        new_ids = torch.tensor(self._job.request.prompt_token_ids[start:], dtype=torch.int64)
        logits = self._model.prefill(
            new_ids.to(self._model.device),
            start=start,
            observer=self,
            states=self,
            num_queries=self._job.num_observed,
            on_logits=self.logprobs.add if self.logprobs is not None else None,
        )
        self._pauses.allowed = False
        return logits

    def history(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """See `PrefillObserver.history`. Raises Cancelled, HistoryMiss."""
        self._job.check_cancelled()
        self._pauses.allowed = False
        turn = self._job.turn
        loaded = self._load(turn, layer) if turn is not None and self._start else None
        self._pauses.allowed = self._pauses_in_model
        return loaded

    def _load(self, turn: StagedTurn, layer: int) -> tuple[Tensor, Tensor] | None:
        with self._loading():
            arrived = turn.load_prepared(self._model.spec.row_numbers[layer], self._upload)
            if arrived is None:
                return None
            keys, *values = arrived()
        return keys, values[0] if values else keys[..., : self._model.spec.latent_dim]

    def _upload(self, rows: tuple[Tensor, Tensor]) -> Arrived:
        """Begin to copy a layer's history to the device; of latent rows K alone, which is V, too."""
        return self._copies.upload(rows[:1] if self._model.spec.latent_dim else rows)

    @contextmanager
    def _loading(self) -> Iterator[None]:
        begin_s = self._clock()
        self._heartbeat.waits = True
        try:
            yield
        except HistoryMiss:
            # Before the turn restarts: layers sent so far are not sent again, rows staged so far are dropped.
            self._handing.settle()
            raise
        finally:
            self._heartbeat.waits = False
            self.times.history_load_s += self._clock() - begin_s

    def layer_done(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        """See `PrefillObserver.layer_done`. Raises Cancelled, TransferFailed."""
        self._job.check_cancelled()
        self._pauses.allowed = False
        if layer >= self._shipped_layers:
            inputs = LayerInputs(
                layer=layer,
                queries=queries,
                keys=keys,
                values=values,
                scaling=scaling,
                unrotate=lambda rows: self._model.pre_rope_keys(layer, rows),
            )
            if self._waits:
                self._wait(inputs)
            else:
                self._ship(self._job.resolved, self._job.formats, inputs)
        self._end_layer(layer, (keys[:, self._start :], values[:, self._start :]))

    @property
    def division(self) -> Division | None:
        """See `DividingObserver.division`."""
        return None if self._job.transfer is None else self._job.transfer.division

    @contextmanager
    def compressing(self, layer: int) -> Iterator[None]:
        """See `DividingObserver.compressing`."""
        end = self._copies.time(self._clock)
        with stage("compress", layer=layer):
            yield
        self._compressing.append(end())

    def layer_compressed(self, layer: int, part: Encoded, rows: tuple[Tensor, Tensor] | None) -> None:
        """See `DividingObserver.layer_compressed`. Raises Cancelled, TransferFailed."""
        self._job.check_cancelled()
        if layer >= self._shipped_layers:
            assert self._job.transfer is not None, "it divides the prompt"
            self._ship_complete(self._job.transfer.formats, layer, part)
        self._end_layer(layer, rows)
        self._pauses.offer()  # not before the layer is handed over: another rank may wait for that

    def _end_layer(self, layer: int, rows: tuple[Tensor, Tensor] | None) -> None:
        """Stage the new tokens' rows, and hand the layer over."""
        if self._job.turn is not None:
            assert rows is not None, "history needs rows"
            self._stage(self._job.turn, layer, *rows)
        self._handing.put()
        self._progress(layer)
        self._pauses.allowed = self._pauses_in_model

    def load(self, layer: int) -> Tensors | None:
        """See `LayerStates.load`. Raises Cancelled, HistoryMiss."""
        self._job.check_cancelled()
        turn = self._job.turn
        if turn is None:
            return None
        self._pauses.allowed = False
        with self._loading():
            state = turn.load_state(layer)
        self._pauses.allowed = self._pauses_in_model
        if state is None:
            return None
        return {name: its[None].to(self._model.device, copy=True) for name, its in state.items()}

    def store(self, layer: int, state: Tensors) -> None:
        """See `LayerStates.store`. Raises Cancelled, TransferFailed."""
        self._job.check_cancelled()
        self._pauses.allowed = False
        tensors = {name: its[0].contiguous() for name, its in state.items()}
        if self._num_draft:
            self._states[layer] = tensors
        if layer >= self._shipped_layers:
            encoded = Encoded(tensors=tuple(tensors.values()), names=tuple(tensors))
            self._ship_complete(self._job.formats, layer, encoded)
        if self._job.turn is not None:
            self._stage_state(self._job.turn, layer, tensors)
        self._handing.put()
        self._progress(layer)
        self._pauses.allowed = self._pauses_in_model

    def _ship_waiting(self, logits: Tensor) -> None:
        """After the pass: compress the layers that wait and ship them. Args: logits: of the last token."""
        job = self._job
        waiting = [self._waiting.pop(layer) for layer in sorted(self._waiting)]
        if self._num_draft:
            waiting, measured = self._drafted(waiting, logits), job.resolved
        else:
            measured = allocate_waiting(job.resolved, waiting)
        job.check_cancelled()
        job.transfer = self._open_transfer(measured)
        formats = make_formats(self._model.spec, measured)
        waiting.reverse()
        while waiting:
            job.check_cancelled()
            layer = waiting.pop()
            inputs = self._moved(layer.inputs, self._model.device)
            self._ship(measured, formats, inputs, layer.scores)
            self._handing.put()
            self._progress(inputs.layer)

    def _drafted(self, waiting: list[WaitingLayer], logits: Tensor) -> list[WaitingLayer]:
        """The layers with a draft of the answer."""
        begin_s = self._clock()

        def before_token() -> None:
            self._pauses.allowed = False
            self._job.check_cancelled()
            self._pauses.allowed = self._pauses_in_model

        layers = add_draft(
            self._model,
            [its.inputs for its in waiting],
            logits=logits,
            num_draft=self._num_draft,
            states=self._states,
            before_token=before_token,
        )
        self._pauses.allowed = False
        self._states.clear()
        self.times.compress_s += self._clock() - begin_s
        return [replace(its, inputs=inputs) for its, inputs in zip(waiting, layers, strict=True)]

    def _wait(self, inputs: LayerInputs) -> None:
        """Keep a layer that cannot be compressed before the pass has ended; its K and V wait on the host.
        Measure it if its number of rows depends on the other layers."""
        begin_s = self._clock()
        if self._num_draft:
            waiting = WaitingLayer(
                inputs=replace(inputs, queries=inputs.queries.clone()), variance=None, scores=None
            )
        else:
            self._pauses.allowed = True
            waiting = measure_layer(self._job.resolved, inputs)
            self._pauses.allowed = False
        host = self._moved(waiting.inputs, torch.device("cpu"))
        self._waiting[inputs.layer] = replace(waiting, inputs=host)
        self.times.compress_s += self._clock() - begin_s

    def _moved(self, inputs: LayerInputs, device: torch.device) -> LayerInputs:
        """The inputs with K and V on another device; of latent rows V stays a view of K."""
        keys, latent_dim = inputs.keys.to(device), self._model.spec.latent_dim
        values = keys[..., :latent_dim] if latent_dim else inputs.values.to(device)
        return replace(inputs, keys=keys, values=values)

    def _ship(
        self,
        resolved: ResolvedPlan,
        formats: Sequence[LayerFormat],
        inputs: LayerInputs,
        scores: Tensor | None = None,
    ) -> None:
        """Compress a layer, and ship it."""
        fmt = formats[inputs.layer]
        end = self._copies.time(self._clock)
        with stage("compress", layer=inputs.layer):
            self._pauses.allowed = True
            encoded = encode_layer(resolved, fmt, inputs, scores=scores)
            self._pauses.allowed = False
        self._compressing.append(end())
        self._ship_complete(formats, inputs.layer, encoded)

    def _ship_complete(self, formats: Sequence[LayerFormat], layer: int, encoded: Encoded) -> None:
        """Ship the layers that are complete, this one among them, up to the first that is not. With measured
        budgets, states wait until the transfer is open."""
        self._complete[layer] = encoded
        while self._job.transfer is not None and self._shipped_layers < len(formats):
            next_layer = self._shipped_layers
            if next_layer not in self._complete and next_layer not in self._model.spec.empty_layers:
                return
            self._send(formats[next_layer], next_layer, self._complete.pop(next_layer, _EMPTY))
            self._shipped_layers += 1

    def _send(self, fmt: LayerFormat, layer: int, encoded: Encoded) -> None:
        begin_s, transfer = self._clock(), self._job.transfer
        assert transfer is not None, "the transfer is not open"
        self._handing.work.append(self._shipper.begin(transfer, fmt, layer, encoded))
        self.times.pack_s += self._clock() - begin_s

    def _stage_state(self, turn: StagedTurn, layer: int, tensors: Tensors) -> None:
        """Stage the layer's state after the prompt."""
        arrived = self._copies.start(list(tensors.values()))

        def append() -> None:
            begin_s = self._pool_clock()
            state = dict(zip(tensors, arrived(), strict=True))
            turn.append_state(layer, state, self._job.resolved.num_prompt_tokens)
            self._handed.history_store_s += self._pool_clock() - begin_s

        self._handing.work.append(append)

    def _stage(self, turn: StagedTurn, layer: int, keys: Tensor, values: Tensor) -> None:
        """Stage rows in the session's history."""
        latent_dim = self._model.spec.latent_dim
        arrived = self._copies.start([keys, *(() if latent_dim else (values,))])

        def append() -> None:
            begin_s = self._pool_clock()
            new_keys, *new_values = arrived()
            new_rows = new_keys, new_values[0] if new_values else new_keys[..., :latent_dim]
            turn.append(self._model.spec.row_numbers[layer], *new_rows)
            self._handed.history_store_s += self._pool_clock() - begin_s

        self._handing.work.append(append)
