"""Passes of a tensor-parallel model: each rank projects and attends for its own heads.

What only the leading rank has (the prompt's observer, decode's attention, all KV) it does alone, between two
words to the followers:

    prefill layer   history ─proceed► history to ranks; K, V to lead; attention; Q to lead; observer ─proceed►
    decode layer    Q, K, V to lead; attention ─proceed► its output to ranks

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
from kvferry.shared.model.interface import DecodeAttention, PrefillObserver
from kvferry.shared.model.parallel.ranks import Ranks
from kvferry.shared.model.prefill_attention import prefill_attention
from kvferry.shared.model.spec import LayerSpec, ModelSpec

if TYPE_CHECKING:
    from kvferry.shared.model.state_cache import StateCache


class RankPass:
    """What passes of both kinds have. Attributes: is_lead_alone: whether followers wait for a word."""

    def __init__(self, ranks: Ranks, spec: ModelSpec) -> None:
        self._ranks = ranks
        self.spec = spec
        self.positions = torch.empty(0)
        self.cache: StateCache | None = None
        self.is_lead_alone = False

    @contextmanager
    def _lead_alone(self) -> Iterator[None]:
        """The block is the lead's; then the others go on. An error leaves `is_lead_alone` set."""
        self.is_lead_alone = True
        yield
        self._ranks.proceed()
        self.is_lead_alone = False


class RankPrefillPass(RankPass):
    """A rank's part of a prompt's pass; see `PrefillPass`.

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
        super().__init__(ranks, spec)
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


class RankDecodePass(RankPass):
    """A rank's part of a decode step; see `DecodePass`.

    Args: attention: the lead's, of all heads; None in followers.
    """

    def __init__(self, ranks: Ranks, spec: ModelSpec, attention: DecodeAttention | None = None) -> None:
        super().__init__(ranks, spec)
        self._attention = attention

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: Scaling, latent: Latent | None
    ) -> Tensor:
        _check_call(scaling, latent)
        num_heads, num_kv_heads = query.shape[1], key.shape[1]
        parts = self._ranks.gather(torch.cat([query, key, value], 1)[:, :, 0])
        outputs: tuple[Tensor, ...] = ()
        with self._lead_alone():
            if self._attention is not None:
                split = [torch.split(part, [num_heads, num_kv_heads, num_kv_heads], 1) for part in parts]
                queries, keys, values = (torch.cat(its, 1) for its in zip(*split, strict=True))
                queries = queries.view(len(queries), keys.shape[1], -1, queries.shape[2])
                output = self._attention(layer, queries, keys, values, scaling)
                outputs = output.flatten(1, 2).to(query.dtype).chunk(self._ranks.num_ranks, 1)
        return self._ranks.scatter(outputs, query[:, :, 0])[:, None]


def _check_call(scaling: Scaling, latent: Latent | None) -> None:
    assert latent is None, "latent rows are not divided among ranks"
    assert not isinstance(scaling, Softmax) or scaling.sinks is None, "sinks are not divided among ranks"
