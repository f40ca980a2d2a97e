"""Passes of a tensor-parallel model: each rank projects and attends for its own heads.

In a decode step every rank has the KV of its heads, and only the model's own sums go from rank to rank. In
prefill the prompt's observer, which ships it and has its history, is the leading rank's. It does that alone,
between two words to the followers:

    prefill layer   history ─proceed► history to ranks; attention; compression; shipping, observer ─proceed►

Where the method compresses all heads together, K, V and queries go to the lead, and its observer compresses.

While the lead is alone, followers wait for its word, so an error there aborts the pass in all ranks, and a
prompt that overtakes another runs there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvferry.kernels.softmax import Scaling, Softmax
from kvferry.shared.model.adapters.latent import Latent
from kvferry.shared.model.bridge import DecodePass
from kvferry.shared.model.interface import DecodeAttention, DividingObserver, PrefillObserver
from kvferry.shared.model.parallel.compression import PartCompressor
from kvferry.shared.model.parallel.ranks import Ranks
from kvferry.shared.model.prefill_attention import prefill_attention
from kvferry.shared.model.spec import LayerSpec, ModelSpec

if TYPE_CHECKING:
    from kvferry.shared.model.state_cache import StateCache


class RankPrefillPass:
    """A rank's part of a prompt's pass; see `PrefillPass`.

    Attributes:
        is_lead_alone: whether followers wait for a word.

    Args:
        spec: of this rank's heads.
        compressor: of this rank's heads; None: the observer is given all heads.
        observer: the lead's, a `DividingObserver` if there is a compressor; None in followers.
    """

    def __init__(
        self,
        ranks: Ranks,
        spec: ModelSpec,
        *,
        start: int,
        num_queries: int | None,
        compressor: PartCompressor | None,
        observer: PrefillObserver | None = None,
    ) -> None:
        self._ranks = ranks
        self._compressor = compressor
        self.spec = spec
        self.positions = torch.empty(0)
        self.cache: StateCache | None = None
        self.is_lead_alone = False
        self._observer = observer
        self._start = start
        self._num_queries = num_queries
        self._layers = spec.layers or (LayerSpec(),) * spec.num_layers

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: Scaling, latent: Latent | None
    ) -> Tensor:
        assert latent is None, "latent rows are not divided among ranks"
        history: tuple[Tensor, Tensor] | None = None
        with self._lead_alone():
            if self._observer is not None:
                history = self._observer.history(layer)
                num_history = 0 if history is None else history[0].shape[1]
                assert num_history == self._start, (
                    f"history has {num_history} tokens, the pass starts at {self._start}"
                )
        keys = self._with_history(key[0], None if history is None else history[0])
        values = self._with_history(value[0], None if history is None else history[1])
        output = prefill_attention(query, keys[None], values[None], scaling, self._layers[layer])
        observed = (query if self._num_queries is None else query[:, :, -self._num_queries :])[0]
        queries = observed.view(len(keys), -1, *observed.shape[1:])
        scale = scaling.scaling if isinstance(scaling, Softmax) else scaling
        if self._compressor is None:
            del keys, values
            self._show(layer, queries, key[0], value[0], scale, history)
        else:
            del history
            self._compress(self._compressor, layer, queries, keys, values, scale)
        return output.transpose(1, 2).contiguous()

    def _show(
        self,
        layer: int,
        queries: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        history: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Give the observer all heads. Args: key, value: of the new tokens; history: the lead's."""
        keys, values = (self._ranks.gather(its) for its in (key, value))
        every_query = self._ranks.gather(queries)
        with self._lead_alone():
            if self._observer is not None:
                all_keys, all_values = torch.cat(keys), torch.cat(values)
                del keys, values
                if history is not None:
                    all_keys, all_values = (
                        torch.cat(its, 1) for its in zip(history, (all_keys, all_values), strict=True)
                    )
                    del history
                self._observer.layer_done(layer, torch.cat(every_query), all_keys, all_values, scaling)

    def _compress(
        self,
        compressor: PartCompressor,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float,
    ) -> None:
        """Compress this rank's heads, and give them to what ships them."""
        observer = self._observer
        assert observer is None or isinstance(observer, DividingObserver)
        with nullcontext() if observer is None else observer.compressing(layer):
            part = compressor.compress(layer, queries, keys, values, scaling)
        rows: list[Tensor] = []
        if compressor.with_rows:
            rows = [torch.cat(its) for its in map(self._new_rows, (keys, values)) if its]
        compressor.give(layer, part)
        with self._lead_alone():
            if observer is not None:
                if isinstance(part, Exception):
                    raise part
                observer.layer_compressed(layer, part, (rows[0], rows[1]) if rows else None)

    def _new_rows(self, rows: Tensor) -> list[Tensor]:
        return self._ranks.gather(rows[:, self._start :])

    def _with_history(self, new: Tensor, history: Tensor | None) -> Tensor:
        """K or V of all tokens, of this rank's heads.

        Args: new: `[h, T, D]` of this rank's heads; history: `[H_kv, P, D]`, the lead's.
        Returns: `[h, P + T, D]`.
        """
        if not self._start:
            return new
        parts = [] if history is None else history.chunk(self._ranks.num_ranks)
        own = self._ranks.scatter(parts, new.new_empty(new.shape[0], self._start, new.shape[2]))
        return torch.cat([own, new], 1)

    @contextmanager
    def _lead_alone(self) -> Iterator[None]:
        """The block is the lead's; then the others go on. An error leaves `is_lead_alone` set."""
        self.is_lead_alone = True
        yield
        self._ranks.proceed()
        self.is_lead_alone = False


class RankDecodePass(DecodePass):
    """A rank's part of a decode step: its attention has the KV of its heads.

    An attention that fails is as one without a result: the ranks run the pass to its end together, and the
    step's logits are not numbers.

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
        assert latent is None, "latent rows are not divided among ranks"
        if self.error is None:
            try:
                return super().attend(layer, query, key, value, scaling, latent)
            except Exception as error:
                self.error = error
        return torch.full_like(query.transpose(1, 2), torch.nan)
