"""Passes of a tensor-parallel model: each rank projects and attends for its own heads.

In a decode step every rank has the KV of its heads, and only the model's own sums go from rank to rank. In
prefill the prompt's observer, which has its history, is in the leading rank. It works alone, between two
words to the followers:

    prefill layer   history ─proceed► history to ranks; attention; compression; shipping, observer ─proceed►

    every rank      K, V, queries of its heads ──► compress ──► observer in the lead, `PartTaker` elsewhere

K, V and their compressed form stay in their rank, unless the session's history wants the new tokens' K and V.
Where the method compresses all heads together, K, V and queries go to the lead, and its observer compresses.

While the lead is alone, followers wait for its word, so an error there aborts the pass in all ranks, and a
prompt that overtakes another runs there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from kvferry.kernels.softmax import Scaling
from kvferry.shared.compression.formats import encode_layer, make_formats
from kvferry.shared.compression.formats.interface import Encoded
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.model.adapters.latent import Latent
from kvferry.shared.model.bridge import DecodePass, PrefillPass, TransformersModel
from kvferry.shared.model.interface import DecodeAttention, DividingObserver, Division, PrefillObserver
from kvferry.shared.model.parallel.ranks import Ranks
from kvferry.shared.model.spec import ModelSpec


class PartTaker(Protocol):
    """Takes the compressed heads of a rank other than the lead."""

    def take(self, layer: int, part: Encoded | Exception) -> None:
        """Take a layer. Called for each, in order, and again from the first one if the pass is run again.
        Raises nothing. Args: part: the layer, or why it cannot be compressed."""


class RankPrefillPass(PrefillPass):
    """A rank's part of a prompt's pass.

    Attributes:
        is_lead_alone: whether followers wait for a word.

    Args:
        model: a method may undo its positions.
        spec: of this rank's heads.
        division: how this rank compresses its heads; None: the observer is given all heads.
        observer: the lead's, a `DividingObserver` if there is a division; None in followers.
        taker: in a follower, takes what it compresses; None: nothing is wanted any more.
    """

    def __init__(
        self,
        ranks: Ranks,
        model: TransformersModel,
        spec: ModelSpec,
        *,
        start: int,
        num_queries: int | None,
        division: Division | None,
        observer: PrefillObserver | None = None,
        taker: PartTaker | None = None,
    ) -> None:
        super().__init__(observer, start=start, spec=spec, num_queries=num_queries)
        self._ranks = ranks
        self._model = model
        self._division = division
        self._formats = () if division is None else make_formats(spec, division.plan)
        self._taker = taker
        self._of_all: tuple[Tensor, Tensor] | None = None
        """The lead's history of a layer whose observer is given all heads."""
        self.is_lead_alone = False

    def _history(self, layer: int, key: Tensor) -> tuple[Tensor, Tensor] | None:
        history = None
        with self._lead_alone():
            if self._observer is not None:
                history = super()._history(layer, key)
        if not self._start:
            return None
        self._of_all = history if self._division is None else None
        like = key.new_empty(key.shape[1], self._start, key.shape[3])
        keys, values = (
            self._ranks.scatter([] if history is None else history[i].chunk(self._ranks.num_ranks), like)
            for i in range(2)
        )
        return keys, values

    def _done(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        if self._division is None:
            self._show(layer, queries, keys, values, scaling)
        else:
            self._compress(self._division, layer, queries, keys, values, scaling)

    def _show(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        """Give the observer all heads."""
        new, every_query = self._new_rows(keys, values), self._ranks.gather(queries)
        history, self._of_all = self._of_all, None
        with self._lead_alone():
            if self._observer is not None:
                rows = [torch.cat(parts) for parts in new]
                del new
                if history is not None:
                    rows = [torch.cat(both, 1) for both in zip(history, rows, strict=True)]
                    del history
                self._observer.layer_done(layer, torch.cat(every_query), rows[0], rows[1], scaling)

    def _compress(
        self,
        division: Division,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float,
    ) -> None:
        """Compress this rank's heads, and pass them on for shipping. A rank that fails continues the pass,
        which the other ranks also run."""
        observer = self._observer
        assert observer is None or isinstance(observer, DividingObserver)
        pre_rope_keys, question = self._model.pre_rope_keys, division.question
        inputs = LayerInputs.of(pre_rope_keys, layer, queries, keys, values, scaling, question)
        part: Encoded | Exception
        with nullcontext() if observer is None else observer.compressing(layer):
            try:
                part = encode_layer(division.plan, self._formats[layer], inputs)
            except Exception as error:
                part = error
        new = self._new_rows(keys, values) if division.with_rows else []
        if self._taker is not None:
            self._taker.take(layer, part)
        with self._lead_alone():
            if observer is not None:
                if isinstance(part, Exception):
                    raise part
                rows = [torch.cat(parts) for parts in new]
                observer.layer_compressed(layer, part, (rows[0], rows[1]) if rows else None)

    def _new_rows(self, keys: Tensor, values: Tensor) -> list[list[Tensor]]:
        """Gather K and V of the new tokens of each rank's heads, in the lead."""
        return [self._ranks.gather(rows[:, self._start :]) for rows in (keys, values)]

    @contextmanager
    def _lead_alone(self) -> Iterator[None]:
        """Run the block in the lead alone; then the others go on. An error leaves `is_lead_alone` set."""
        self.is_lead_alone = True
        yield
        self._ranks.proceed()
        self.is_lead_alone = False


class RankDecodePass(DecodePass):
    """A rank's part of a decode step: its attention has the KV of its heads.

    If an attention fails, the ranks still run the pass to its end together, and the step's logits are NaN.

    Attributes:
        is_lead_alone: see `RankPrefillPass`.
        error: of this rank's attention.
    """

    is_lead_alone = False

    def __init__(self, attention: DecodeAttention, *, spec: ModelSpec) -> None:
        super().__init__(attention, spec=spec)
        self.error: Exception | None = None

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: Scaling, latent: Latent | None
    ) -> Tensor:
        if self.error is None:
            try:
                return super().attend(layer, query, key, value, scaling, latent)
            except Exception as error:
                self.error = error
        return torch.full_like(query.transpose(1, 2), torch.nan)
