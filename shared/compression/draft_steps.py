"""A draft's tokens as decode steps of one sequence, over the prompt's K and V as prefill has left them.

Called by `draft.py`, where one process runs the model. A step reads and writes tensors that stay in place,
so that on a GPU it is captured once, and replayed for every token of every prompt:

    begin: copy K and V, capture ──run──► place in the slot, step ──run──► step ──► ... ──end──► slot empty

Run eagerly on an H200, a token of a model of 8B parameters took 29 ms, of which the GPU worked 6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvferry.kernels import dispatch
from kvferry.kernels.decode_batch import BatchShape, Errors, NewToken, NewTokens, SlotBatch
from kvferry.kernels.dense_decode import dense_decode
from kvferry.kernels.dense_decode.batch import DenseBatch, WindowBatch
from kvferry.kernels.dispatch import KernelUnavailable
from kvferry.kernels.quarantine import uses_quarantined
from kvferry.kernels.softmax import Scaling
from kvferry.shared.compression.draft_rows import DraftRows
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.device.step_device import StepDevice, written_so_far
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.spec import TORCH_DTYPES, Heads, ModelSpec

if TYPE_CHECKING:
    from kvferry.shared.compression.formats.interface import Tensors

_MAX_CAPTURES = 2
_ANCHOR_ELEMENTS = 16


class DraftSteps:
    """Runs drafts on one thread, of one prompt after another, or of one between two tokens of another.

    Args:
        model: of one rank; used by no other thread meanwhile.
        device: if it captures, a step is captured with the first draft that can be replayed. None: no step
            is. Its stream is used for the capture alone.
        warn: called with the reason if a capture fails.
    """

    def __init__(
        self,
        model: LanguageModel,
        device: StepDevice | None = None,
        *,
        warn: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._model = model
        self._warn = warn
        self._device = device or StepDevice()
        self._step: _Step | None = None
        self._num_failed = 0

    @property
    def is_captured(self) -> bool:
        """True if a draft's next token is a replay, unless layers of the prompt wait on the host."""
        return self._step is not None and self._step.replays

    @torch.inference_mode()
    def begin(self, layers: Sequence[LayerInputs], states: Mapping[int, Tensors], *, room: int) -> Draft:
        """Begin a draft: copy what a later token attends to, and capture the step, if that can be done.

        Args: layers, states: as of `run_draft`, which are not changed; room: tokens at most.
        Raises: torch.OutOfMemoryError: there is no room for the copy.
        """
        rows = DraftRows(self._model.spec, layers, states, self._model.device, room=room)
        if self._step is None:
            self._step = _Step(self._model)
        if self._device.captures and not rows.on_host and self._num_failed < _MAX_CAPTURES:
            self._capture(self._step)
        return Draft(self._step, rows)

    def _capture(self, step: _Step) -> None:
        """Capture the step, unless it is or cannot be. If that fails, steps run eagerly; the next draft tries
        once more."""
        if step.replays or not step.can_be_captured:
            return
        step.empty()  # the runs that a capture takes find no rows, and change none
        device, written = self._model.device, written_so_far(self._model.device)
        with self._device.scope():
            self._device.follow(written)
            try:
                step.replay = self._device.capture(step.run_recorded)
            except Exception as error:  # Triton's compiler has its own errors; the step runs without a graph
                step.replay = None
                self._num_failed += 1
                self._warn(f"{type(error).__name__}: {error}")
            done = written_so_far(device)
        if done is not None:
            done.synchronize()  # replays run on the stream of the pass


class Draft:
    """The draft of one prompt. Use `DraftSteps.begin` to make one.

    Attributes: states, ahead: see `DraftRows`.
    """

    def __init__(self, step: _Step, rows: DraftRows) -> None:
        self._step, self._rows = step, rows
        self.states, self.ahead = rows.states, rows.ahead

    @torch.inference_mode()
    def run(self, token_id: int) -> Tensor:
        """Run the next token. Returns: float32 logits `[V]`. Raises: whatever an attention raises; the draft
        has ended then."""
        return self._step.run(self._rows, token_id)

    @torch.inference_mode()
    def end(self) -> None:
        """End the draft, whatever has happened. Idempotent."""
        self._step.empty(self._rows)


class _Step:
    """One token's step, over the rows that are placed in the slot. Implements `DecodeAttention` and
    `LayerStates` for them.

    Attributes: replay: replays the captured step; None: there is none.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._spec, device = model.spec, model.device
        self._dtype = TORCH_DTYPES[self._spec.dtype]
        self._anchor = torch.zeros(_ANCHOR_ELEMENTS, dtype=self._dtype, device=device)
        """What descriptors count from: a captured step keeps this address, and no prompt's."""
        self._batches = [] if self._spec.latent_dim else self._made_batches(device)
        self._batch_of = {
            layer: (batch, batch.scratch(1) if batch.has_tables else None)
            for batch, members in self._batches
            for layer in members
        }
        self._token_id, self._position = torch.zeros(2, 1, dtype=torch.int64, device=device).unbind(0)
        self._active = torch.ones(1, dtype=torch.int64, device=device)
        self._logits = torch.zeros(self._spec.vocab_size, device=device)
        sizes = [_query_shape(self._spec, layer) for layer in self._spec.row_layers]
        self._queries = torch.zeros(sum(map(math.prod, sizes)), dtype=self._dtype, device=device)
        self._queries_of = self._by_layer(self._queries)
        self._errors: Errors = {}
        self._placed: DraftRows | None = None
        self._filled: list[SlotBatch[Any, Any]] = []
        """The batches whose slot they are in."""
        self._is_counted = False
        """Whether the host has counted the steps since the rows were placed, which a replay does not."""
        self.replay: Callable[[], None] | None = None
        self._calls: dict[tuple[str, dispatch.KernelPath], int] = {}

    @property
    def can_be_captured(self) -> bool:
        """True if a step does not wait for the device, and all that changes is in tensors that stay."""
        are_launched = all(batch.is_launched for batch, _ in self._batches)
        return bool(self._batches) and are_launched and not self._spec.state_layers

    @property
    def replays(self) -> bool:
        """True if there is a captured step, all of whose kernels may still be used."""
        return self.replay is not None and not uses_quarantined(self._calls)

    def run(self, rows: DraftRows, token_id: int) -> Tensor:
        """Run a draft's next token. Returns: float32 logits `[V]`. Raises: as `Draft.run`."""
        replay = self.replay if self.replays and not rows.on_host else None
        if self._placed is not rows or not (self._is_counted or replay):
            self._place(rows)
        self._token_id.fill_(token_id)  # made on the device: nothing is copied there
        self._position.fill_(rows.position)
        if replay is None:
            self._run()
        else:
            replay()
            dispatch.count(self._calls)
            self._is_counted = False
        rows.count(self._by_layer(self._queries.clone()))
        return self._logits.clone()

    def run_recorded(self) -> None:
        """Run the step for a capture. Raises: KernelUnavailable: one of its kernels is quarantined."""
        with dispatch.recording() as calls:
            self._run()
        if uses_quarantined(calls):
            raise KernelUnavailable("a kernel was quarantined while a draft's step was captured")
        self._calls = dict(calls)

    def empty(self, rows: DraftRows | None = None) -> None:
        """Empty the slot, if there is anything in it. Args: rows: if there are these."""
        if self._placed is None or (rows is not None and rows is not self._placed):
            return
        self._placed = None
        while self._filled:
            self._filled.pop().remove(0)

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: Scaling) -> Tensor:
        """See `DecodeAttention.__call__`; B is 1."""
        placed = self._placed
        self._queries_of[layer].copy_(queries[0])
        if placed is not None:
            placed.bring(layer, keys[0], values[0])
        if layer not in self._batch_of:  # of latent rows, which no batched kernel has
            assert placed is not None, "such a step is not captured"
            rows = placed.rows(layer)
            seen = rows.append(NewToken(queries[0], keys[0], values[0], rows.length, scaling))
            return dense_decode(queries[0], *seen, scaling=scaling)[None]
        batch, scratch = self._batch_of[layer]
        step = NewTokens(queries, keys, values, scaling)
        attended = batch.attend(layer, step, errors=self._errors, scratch=scratch)
        for error in self._errors.values():
            raise error
        return attended

    def load(self, layer: int) -> dict[str, Tensor]:
        assert self._placed is not None, "a step with states is not captured"
        return {name: tensor[None].clone() for name, tensor in self._placed.states[layer].items()}

    def store(self, layer: int, state: Tensors) -> None:
        assert self._placed is not None, "a step with states is not captured"
        self._placed.states[layer] = {name: tensor[0].clone() for name, tensor in state.items()}

    def _run(self) -> None:
        """Run the step, and make the descriptors those of the next token."""
        logits = self._model.decode(self._token_id, self._position, attention=self, states=self)
        self._logits.copy_(logits[0])
        for batch, _ in self._batches:
            batch.advance(self._active)

    def _place(self, rows: DraftRows) -> None:
        """Place a draft in the slot, as it is after the tokens so far."""
        self.empty()
        self._errors.clear()
        self._placed, self._is_counted = rows, True
        in_c = dispatch.uses_native("dense_decode", self._anchor.device)
        for batch, members in self._batches:
            if in_c:
                batch.count_from(rows.base)
            batch.place(0, {layer: rows.rows(layer) for layer in members})
            self._filled.append(batch)

    def _by_layer(self, queries: Tensor) -> dict[int, Tensor]:
        """Return views of all layers' queries `[H_kv, G, D]`, in one dimension."""
        shapes = {layer: _query_shape(self._spec, layer) for layer in self._spec.row_layers}
        parts = torch.split(queries, list(map(math.prod, shapes.values())))
        return {layer: part.view(shape) for (layer, shape), part in zip(shapes.items(), parts, strict=True)}

    def _made_batches(self, device: torch.device) -> list[tuple[SlotBatch[Any, Any], Sequence[int]]]:
        """Make a batch of one slot for the layers with equal heads and rows of one kind."""
        spec, made = self._spec, list[tuple[SlotBatch[Any, Any], Sequence[int]]]()
        by_kind: dict[tuple[Heads, bool], list[int]] = {}
        for layer in spec.row_layers:
            by_kind.setdefault((spec.heads(layer), spec.layer(layer).window > 0), []).append(layer)
        for (heads, has_windows), members in by_kind.items():
            shape = BatchShape(
                num_layers=spec.num_layers,
                num_slots=1,
                num_kv_heads=heads.num_kv_heads,
                group_size=heads.group_size,
                head_dim=heads.head_dim,
                dtype=self._dtype,
                device=device,
            )
            batch = WindowBatch(shape, self._anchor) if has_windows else DenseBatch(shape, self._anchor)
            made.append((batch, members))
        return made


def _query_shape(spec: ModelSpec, layer: int) -> tuple[int, int, int]:
    """Return the shape of a token's queries in one layer: (H_kv, G, D)."""
    heads = spec.heads(layer)
    return heads.num_kv_heads, heads.group_size, heads.head_dim
