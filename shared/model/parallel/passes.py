"""Passes of a tensor-parallel model: each rank projects and attends for its own heads.

In a decode step every rank has the KV of its heads, and only the model's own sums go from rank to rank. In
prefill the prompt's observer, which has all KV, is the leading rank's. It does that alone, between two words
to the followers:

    prefill layer   history ─proceed► history to ranks; K, V to lead; attention; Q to lead; observer ─proceed►

While the lead is alone, followers wait for its word, so an error there aborts the pass in all ranks, and a
prompt that overtakes another runs there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvferry.kernels.softmax import Scaling, Softmax
from kvferry.shared.model.adapters.latent import Latent
from kvferry.shared.model.bridge import DecodePass
from kvferry.shared.model.interface import DecodeAttention, PrefillObserver
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
        observer: the lead's; None in followers. It is given all heads.
    """

    def __init__(
        self,
        ranks: Ranks,
        spec: ModelSpec,
        *,
        start: int,
        num_queries: int | None,
        observer: PrefillObserver | None = None,
    ) -> None:
        self._ranks = ranks
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
        _check_call(scaling, latent)
        history: tuple[Tensor, Tensor] | None = None
        with self._lead_alone():
            if self._observer is not None:
                history = self._observer.history(layer)
                num_history = 0 if history is None else history[0].shape[1]
                assert num_history == self._start, (
                    f"history has {num_history} tokens, the pass starts at {self._start}"
                )
        keys, all_keys = self._with_history(key[0], None if history is None else history[0])
        values, all_values = self._with_history(value[0], None if history is None else history[1])
        del history
        output = prefill_attention(query, keys[None], values[None], scaling, self._layers[layer])
        del keys, values
        observed = query if self._num_queries is None else query[:, :, -self._num_queries :]
        parts = self._ranks.gather(observed[0])
        with self._lead_alone():
            if self._observer is not None:
                assert all_keys is not None
                assert all_values is not None
                queries = torch.cat(parts).view(all_keys.shape[0], -1, *observed.shape[2:])
                scale = scaling.scaling if isinstance(scaling, Softmax) else scaling
                self._observer.layer_done(layer, queries, all_keys, all_values, scale)
        return output.transpose(1, 2).contiguous()

    def _with_history(self, new: Tensor, history: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """K or V of all tokens.

        Args: new: `[h, T, D]` of this rank's heads; history: `[H_kv, P, D]`, the lead's.
        Returns: `[h, P + T, D]` of this rank's heads; the lead's `[H_kv, P + T, D]`, None in followers.
        """
        ranks, (num_heads, num_tokens, dim) = self._ranks, new.shape
        if self._start:
            parts = [] if history is None else history.chunk(ranks.num_ranks)
            own_history = ranks.scatter(parts, new.new_empty(num_heads, self._start, dim))
        parts = ranks.gather(new)
        if not parts:
            return (torch.cat([own_history, new], 1) if self._start else new), None
        every = new.new_empty(ranks.num_ranks * num_heads, self._start + num_tokens, dim)
        if history is not None:
            every[:, : self._start] = history
        every[:, self._start :] = torch.cat(parts)
        return every[:num_heads], every

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
        _check_call(scaling, latent)
        if self.error is None:
            try:
                return super().attend(layer, query, key, value, scaling, latent)
            except Exception as error:
                self.error = error
        return torch.full_like(query.transpose(1, 2), torch.nan)


def _check_call(scaling: Scaling, latent: Latent | None) -> None:
    assert latent is None, "latent rows are not divided among ranks"
    assert not isinstance(scaling, Softmax) or scaling.sinks is None, "sinks are not divided among ranks"
