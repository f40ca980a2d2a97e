"""The interface of a model: prefill and decode passes that use our attention.

`bridge.py` implements `LanguageModel` over any unmodified transformers decoder. Legend: H_kv KV heads, G
query heads per KV head, T tokens, D head_dim, L layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from kvferry.kernels.softmax import Scaling
from kvferry.shared.model.question import Question
from kvferry.shared.model.spec import ModelSpec

if TYPE_CHECKING:
    from kvferry.shared.compression.formats.interface import Encoded
    from kvferry.shared.compression.plan import ResolvedPlan
    from kvferry.shared.wire.messages import TransferKey


class PrefillObserver(Protocol):
    """Called for each layer of a prompt's pass. May raise to stop the pass (cancellation)."""

    def history(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Return K (post-RoPE) and V `[H_kv, P, D]` of the tokens before this pass, or None."""

    def layer_done(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        """Take a layer whose attention is done. Its K and V are released when this returns.

        Args:
            queries: post-RoPE `[H_kv, G, T, D]` of the new tokens, or of the last of them if the pass was
                asked for so many; for latent rows they are absorbed, so that their products with the rows
                equal those of the model's queries and keys.
            keys: post-RoPE `[H_kv, P + T, D]`; values likewise, of latent rows a view of the keys.
            scaling: the model's softmax scale.
        """


@dataclass(frozen=True, kw_only=True)
class Division:
    """How the ranks of a model compress and ship a layer's heads separately.

    Attributes:
        plan: each rank compresses the layers of its heads by it.
        with_rows: whether the observer is also given K and V of the new tokens.
        transfer: each rank ships the layers of its heads with it.
        question: as of `LayerInputs`.
    """

    plan: ResolvedPlan
    with_rows: bool
    transfer: TransferKey
    question: Question | None = None


@runtime_checkable
class DividingObserver(PrefillObserver, Protocol):
    """An observer that needs only the leading rank's heads, as each rank compresses and ships its own."""

    @property
    def division(self) -> Division | None:
        """The division; None: `layer_done` is called, as in a model of one rank."""

    def compressing(self, layer: int) -> AbstractContextManager[None]:
        """Make a context around the leading rank's compression of a layer."""

    def layer_compressed(self, layer: int, part: Encoded, rows: tuple[Tensor, Tensor] | None) -> None:
        """Take a compressed layer, in place of `layer_done`.

        Args: part: what `encode_layer` has made of the leading rank's heads; rows: `[H_kv, T, D]`, of all.
        """


class DecodeAttention(Protocol):
    """Attention of one decode step with one token per sequence: appends the new K and V, then attends."""

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: Scaling) -> Tensor:
        """Append and attend. Args: queries `[B, H_kv, G, D]`, keys and values `[B, H_kv, D]`; all as in
        `PrefillObserver`. Returns `[B, H_kv, G, D]`, the values' channels."""


class LayerStates(Protocol):
    """Source and destination of the states of a pass's layers. Called for each layer with a state, in order;
    a layer of the model that also attends has its state in another layer, see `ModelSpec.layers`."""

    def load(self, layer: int) -> Mapping[str, Tensor] | None:
        """Return the tensors of `LayerSpec.state` after the tokens before this pass, `[B, ...]`, on the
        device; the pass changes them. None: there are no such tokens."""

    def store(self, layer: int, state: Mapping[str, Tensor]) -> None:
        """Take the layer's tensors after the pass's tokens."""


class LanguageModel(Protocol):
    """A loaded model. Not thread-safe, but a prefill may run within another one, between two operations.

    Attributes:
        num_ranks: processes that run each pass together. With several, a prompt's pass can be interrupted
            only within the observer's calls, and a step is not a function of buffers that could be captured.
    """

    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    num_ranks: int

    def prefill(
        self,
        token_ids: Tensor,
        *,
        start: int,
        observer: PrefillObserver,
        states: LayerStates | None = None,
        num_queries: int | None = None,
        on_logits: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """Run new prompt tokens, layer by layer.

        Args:
            token_ids: int64 `[T]`, T >= 1.
            start: position of the first one (= history length P).
            states: of a model that has states; None: there are none before, and those after are dropped.
            num_queries: how many of the last queries the observer is given, at least 1; None: all. Absorbed
                queries of a long prompt take more memory than anything else of a layer.
            on_logits: called after the last layer with a position and the logits `[t, V]` of the t tokens
                from it on, until all tokens' have come; t is small enough to bound the memory.

        Returns: float32 logits `[V]` of the last token.
        Raises: InvalidRequest if `on_logits` is given and the model changes its head's logits.
        """

    def decode(
        self,
        token_ids: Tensor,
        positions: Tensor,
        *,
        attention: DecodeAttention,
        states: LayerStates | None = None,
    ) -> Tensor:
        """Run one token for each of B sequences.

        Args: token_ids and positions int64 `[B]`; states: of a model that has states.
        Returns: float32 logits `[B, V]`.
        """

    def pre_rope_keys(self, layer: int, keys: Tensor) -> Tensor:
        """Return a layer's keys before rotary positions: the output of the projection and its norm, if any.

        Args: keys: post-RoPE `[H_kv, T, D]` at positions 0 to T - 1, history included.
        Returns: float32 `[H_kv, T, D]`, exact up to the rounding of `keys`.
        Raises: UnsupportedModel if the model's rotation cannot be undone.
        """
