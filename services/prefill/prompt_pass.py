"""Handles each layer of one prompt: load history, compress, copy to the host, ship, stage.

Place in the request's path: called by the model on the engine thread, layer by layer, while the layer
before is shipped and staged on another one (`host_copies.py`). After `layer_done` returns, a pass
references only the tensors of one layer that are being handed over. If the plan measures its layer budgets,
drafts or repeats the prompt, K and V of all layers wait on the host until the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvferry.services.prefill.host_copies import Elapsed, HandOver, HostCopies
from kvferry.services.prefill.job import PrefillJob, PromptLogprobs
from kvferry.services.prefill.schedule import Pauses
from kvferry.shared.compression.compress import WaitingLayer, allocate_waiting, measure_layer
from kvferry.shared.compression.draft import greedy, run_draft
from kvferry.shared.compression.draft_steps import DraftSteps
from kvferry.shared.compression.formats import encode_layer
from kvferry.shared.compression.formats.drafted import with_draft
from kvferry.shared.compression.formats.interface import Encoded, Tensors
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import ResolvedPlan, is_measured, num_draft_tokens, repeats_prompt
from kvferry.shared.compression.reconstruct import reconstruct
from kvferry.shared.errors import HistoryMiss
from kvferry.shared.history.turn import StagedTurn
from kvferry.shared.model.interface import Division, LanguageModel
from kvferry.shared.process.heartbeat import Heartbeat
from kvferry.shared.telemetry.tracing import stage

_EMPTY = Encoded(tensors=())
"""A layer of which nothing is shipped."""


@dataclass(kw_only=True)
class PassTimes:
    """Seconds spent on one prompt, by activity; these overlap."""

    compress_s: float = 0.0
    pack_s: float = 0.0
    history_load_s: float = 0.0
    history_store_s: float = 0.0


class PromptPass:
    """Implements `DividingObserver` and `LayerStates` for one prompt.

        layer_done ──► compress ──────────────────────────────────────────────────┐
        layer_done ──► measure, wait ──► pass ends ──► repeat, draft ──► compress ┼──► ship, stage
        layer_compressed, store ──────────────────────────────────────────────────┘

    Layers wait if the plan measures its layer budgets, repeats the prompt or drafts; the transfer is opened
    when they need not wait any more. They are shipped in order: one that is complete before an earlier one
    waits. If a layer's history turns out lost, the whole prompt is run. This second run ships only the
    layers that the first did not, if the method is exact; else the pass fails, because the answers in the
    history have other rows than prefill computes, and layers with and without them make a cache that no run
    in one process gives.

    Attributes:
        logprobs: of the prompt's tokens; None if the request wants none.
    """

    def __init__(
        self,
        job: PrefillJob,
        *,
        model: LanguageModel,
        copies: HostCopies,
        pauses: Pauses | None,
        open_transfer: Callable[[ResolvedPlan], None],
        progress: Callable[[int], None],
        heartbeat: Heartbeat,
        clock: Callable[[], float],
        pool: Executor,
        pool_clock: Callable[[], float],
        drafts: DraftSteps,
    ) -> None:
        """Args:
        pauses: interrupt a long pass while it computes, but not while it loads, ships or stages; of a model
            of several ranks while it compresses only. None: the pass is not interrupted.
        open_transfer: called once, with the plan to ship; attaches the transfer to the job.
        progress: called after each layer, with its number; also while the prompt is repeated, with how far
            that is as if it were of a pass.
        heartbeat: told of waits for stored history and for the layer that is being handed over.
        clock: seconds of this pass.
        pool, pool_clock: where layers are handed over, and seconds there.
        drafts: of the thread that runs passes.
        """
        self.times = PassTimes()
        count = job.request.prompt_logprobs
        self.logprobs = PromptLogprobs(job.request.prompt_token_ids, count) if count is not None else None
        self._job = job
        self._plan = job.resolved
        self._model = model
        self._copies = copies
        self._pauses = pauses or Pauses(lambda: None)
        self._is_long = pauses is not None
        self._pauses_in_model = model.num_ranks == 1
        self._num_distinct = 1 if model.spec.latent_dim else 2
        """Of K and V, how many are copied: of latent rows V is a view of K."""
        self._open_transfer = open_transfer
        self._progress = progress
        self._heartbeat = heartbeat
        self._clock = clock
        self._pool_clock = pool_clock
        self._drafts = drafts
        self._num_draft = num_draft_tokens(job.resolved)
        self._repeats = repeats_prompt(job.resolved)
        self._continues = self._repeats or self._num_draft > 0
        """Whether the model runs on after the prompt, before a layer is compressed."""
        self._waits = is_measured(job.resolved) or self._continues
        self._waiting: list[WaitingLayer] = []
        self._states: dict[int, Tensors] = {}
        self._complete: dict[int, Encoded] = {}
        self._handing = HandOver(pool, heartbeat)
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
            self._open(self._job.resolved)  # before the pass, to detect a refusal early
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
        self.times.pack_s += self._job.transfer.sending_s
        # not earlier: the device would have nothing queued while this thread waits for a layer's time
        self.times.compress_s += sum([elapsed_s() for elapsed_s in self._compressing])
        assert self._shipped_layers == self._model.spec.num_layers, self._shipped_layers
        return logits

    def _open(self, plan: ResolvedPlan) -> None:
        """Open the transfer. Args: plan: with measured rows."""
        self._plan = plan
        self._open_transfer(plan)
        self._job.check_cancelled()

    def _forward(self) -> Tensor:
        start = self._start = self._job.num_reused
        self._complete.clear()
        self._waiting.clear()
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
        turn = self._job.turn
        if turn is None or not self._start:
            self._pauses.allowed = self._pauses_in_model
            return None
        with self._loading():
            number = self._model.spec.row_numbers[layer]
            arrived = turn.load_prepared(number, lambda rows: self._copies.upload(rows[: self._num_distinct]))
            return None if arrived is None else self._rows(arrived())

    def load(self, layer: int) -> Tensors | None:
        """See `LayerStates.load`. Raises Cancelled, HistoryMiss."""
        turn = self._job.turn
        with self._loading():
            state = turn.load_state(layer) if turn is not None else None
        if state is None:
            return None
        return {name: tensor[None].to(self._model.device, copy=True) for name, tensor in state.items()}

    def layer_done(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        """See `PrefillObserver.layer_done`. Raises Cancelled, TransferFailed."""
        with self._handing_over(layer):
            if layer >= self._shipped_layers:
                pre_rope_keys, question = self._model.pre_rope_keys, self._job.request.question
                inputs = LayerInputs.of(pre_rope_keys, layer, queries, keys, values, scaling, question)
                if self._waits:
                    self._wait(inputs)
                else:
                    self._compress(WaitingLayer(inputs=inputs))
            self._stage_rows(layer, (keys[:, self._start :], values[:, self._start :]))

    @property
    def division(self) -> Division | None:
        return None if self._job.transfer is None else self._job.transfer.division

    @contextmanager
    def compressing(self, layer: int) -> Iterator[None]:
        end = self._copies.time(self._clock)
        with stage("compress", layer=layer):
            yield
        self._compressing.append(end())

    def layer_compressed(self, layer: int, part: Encoded, rows: tuple[Tensor, Tensor] | None) -> None:
        """See `DividingObserver.layer_compressed`. Raises Cancelled, TransferFailed."""
        with self._handing_over(layer):
            if layer >= self._shipped_layers:
                self._ship(layer, part)
            self._stage_rows(layer, rows)
        self._pauses.offer()  # not before the layer is handed over: another rank may wait for that

    def store(self, layer: int, state: Tensors) -> None:
        """See `LayerStates.store`. Raises Cancelled, TransferFailed."""
        with self._handing_over(layer):
            tensors = {name: tensor[0].contiguous() for name, tensor in state.items()}
            if self._continues:
                self._states[layer] = tensors
            elif layer >= self._shipped_layers:
                self._ship_state(layer, tensors)
            num_tokens = self._job.resolved.num_prompt_tokens
            self._stage(
                tuple(tensors.values()),
                lambda turn, arrived: turn.append_state(
                    layer, dict(zip(tensors, arrived, strict=True)), num_tokens
                ),
            )

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """Enclose the load of a layer's history, which is not interrupted."""
        self._job.check_cancelled()
        self._pauses.allowed = False
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
        self._pauses.allowed = self._pauses_in_model

    @contextmanager
    def _handing_over(self, layer: int) -> Iterator[None]:
        """Enclose the work on a layer that the model has run; then hand it over."""
        self._job.check_cancelled()
        self._pauses.allowed = False
        yield
        self._handing.put()
        self._progress(layer)
        self._pauses.allowed = self._pauses_in_model

    def _wait(self, inputs: LayerInputs) -> None:
        """Keep a layer that cannot be compressed before the pass has ended; its K and V wait on the host, or
        for a draft on the device where there is room. Measure it if its number of rows depends on others."""
        begin_s = self._clock()
        if self._continues:
            waiting = WaitingLayer(inputs=replace(inputs, queries=inputs.queries.clone()))
        else:
            self._pauses.allowed = True
            waiting = measure_layer(self._plan, inputs)
            self._pauses.allowed = False
        rests = self._num_draft and self._copies.has_room(self._num_left_bytes(inputs))
        self._waiting.append(waiting if rests else self._moved(waiting, torch.device("cpu")))
        self.times.compress_s += self._clock() - begin_s

    def _num_left_bytes(self, inputs: LayerInputs) -> int:
        """Return the bytes of K and V of this and later layers, doubled: a draft copies them."""
        num_left = 2 * (self._model.spec.num_layers - inputs.layer) + 2
        return num_left * self._num_distinct * inputs.keys.nbytes

    def _ship_waiting(self, logits: Tensor) -> None:
        """Compress and ship, after the pass, the layers that wait. Args: logits: of the last token."""
        states: Mapping[int, Tensors] = self._states
        if self._repeats:
            self._repeat()
        if self._num_draft:
            states = self._draft(logits)
        self._states = {}
        self._open(self._plan if self._continues else allocate_waiting(self._plan, self._waiting))
        for number, state in states.items():
            self._ship_state(number, state)
        self._waiting.reverse()
        while self._waiting:
            self._job.check_cancelled()
            layer = self._moved(self._waiting.pop(), self._model.device)
            self._compress(layer)
            self._handing.put()
            self._progress(layer.inputs.layer)

    def _draft(self, logits: Tensor) -> Mapping[int, Tensors]:
        """Give the layers that wait a draft of the answer. Returns: the states to ship."""
        begin_s = self._clock()

        def before_token() -> None:
            self._job.check_cancelled()
            self._pauses.offer()  # not within a token, which is short

        ships = self._job.ships_draft
        drafted = run_draft(
            self._model,
            [layer.inputs for layer in self._waiting],
            logits=logits,
            draw=self._job.opening.draw if ships else greedy(self._model.spec, self._num_draft),
            states=self._states,
            before_token=before_token,
            steps=self._drafts,
        )
        self._waiting = [WaitingLayer(inputs=inputs) for inputs in drafted.layers]
        if not ships:
            self.times.compress_s += self._clock() - begin_s
        return drafted.tokens[-1].states if ships and drafted.tokens else self._states

    def _repeat(self) -> None:
        """Give the layers that wait the attention that their tokens get while the prompt is repeated."""
        begin_s = self._clock()
        prompt, num_layers = self._job.request.prompt_token_ids, self._model.spec.num_layers

        def before_chunk(begin: int) -> None:
            self._pauses.allowed = False
            self._progress(begin * num_layers // len(prompt) - 1)
            self._job.check_cancelled()
            self._pauses.offer()  # between passes, where a model of several ranks can be interrupted, too
            self._pauses.allowed = self._pauses_in_model

        inputs = [layer.inputs for layer in self._waiting]
        repeated = reconstruct(
            self._model,
            self._plan,
            inputs,
            token_ids=prompt,
            states=self._states,
            before_chunk=before_chunk,
        )
        self._pauses.allowed = False
        self._waiting = [WaitingLayer(inputs=inputs) for inputs in repeated]
        self.times.compress_s += self._clock() - begin_s

    def _moved(self, layer: WaitingLayer, device: torch.device) -> WaitingLayer:
        inputs = layer.inputs
        distinct = (inputs.keys, inputs.values)[: self._num_distinct]
        keys, values = self._rows([rows.to(device) for rows in distinct])
        return replace(layer, inputs=replace(inputs, keys=keys, values=values))

    def _compress(self, layer: WaitingLayer) -> None:
        assert self._job.transfer is not None, "the transfer is not open"
        number = layer.inputs.layer
        with self.compressing(number):
            self._pauses.allowed = True
            fmt = self._job.transfer.formats[number]
            encoded = encode_layer(self._plan, fmt, layer.inputs, scores=layer.scores)
            if (ahead := layer.inputs.ahead) is not None and self._job.ships_draft:
                encoded = with_draft(fmt, encoded, ahead)
            self._pauses.allowed = False
        self._ship(number, encoded)

    def _ship_state(self, layer: int, state: Tensors) -> None:
        self._ship(layer, Encoded(tensors=tuple(state.values()), names=tuple(state)))

    def _ship(self, layer: int, encoded: Encoded) -> None:
        """Ship the layers that are complete, including this one, up to the first that is not. Where layers
        wait, states wait until the transfer is open."""
        self._complete[layer] = encoded
        transfer, spec = self._job.transfer, self._model.spec
        while transfer is not None and self._shipped_layers < spec.num_layers:
            following = self._shipped_layers
            if following not in self._complete and following not in spec.empty_layers:
                return
            begin_s = self._clock()
            part = self._complete.pop(following, _EMPTY)
            self._handing.work.append(transfer.begin_layer(following, part, self._copies, self._pool_clock))
            self.times.pack_s += self._clock() - begin_s
            self._shipped_layers += 1

    def _stage_rows(self, layer: int, rows: tuple[Tensor, Tensor] | None) -> None:
        """Stage the new tokens' rows in the session's history."""
        if self._job.turn is not None:
            assert rows is not None, "history needs rows"
            number, copied = self._model.spec.row_numbers[layer], rows[: self._num_distinct]
            self._stage(copied, lambda turn, arrived: turn.append(number, *self._rows(arrived)))

    def _stage(
        self, tensors: Sequence[Tensor], append: Callable[[StagedTurn, Sequence[Tensor]], None]
    ) -> None:
        """Copy tensors to the host, and append them to the session's turn, if there is one."""
        if (turn := self._job.turn) is None:
            return
        arrived = self._copies.start(tensors)

        def staged() -> None:
            begin_s = self._pool_clock()
            append(turn, arrived())
            self.times.history_store_s += self._pool_clock() - begin_s

        self._handing.work.append(staged)

    def _rows(self, arrived: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return K and V from the tensors that were copied; one that is a view was not."""
        keys, *values = arrived
        return keys, values[0] if values else keys[..., : self._model.spec.latent_dim]
