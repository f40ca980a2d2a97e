"""`LanguageModel` over an unmodified transformers decoder: the forward passes of prefill and decode.

Called by the engines of prefill and decode; `loading.py` loads models. transformers calls `attention_forward`
in every layer with the layer's post-RoPE queries, keys and values. The current pass is the keyword argument
`kvferry` of the model's call, so there is no global state. Prefill gives K and V to its `PrefillObserver`;
decode calls its `DecodeAttention`. No KV is stored here. The states of layers that have one go through
transformers' cache argument (`state_cache.py`).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvferry.kernels.dispatch import dtype_problem, mode, path_for
from kvferry.kernels.softmax import Scaling, Softmax
from kvferry.shared.errors import ContextLengthExceeded, InvalidRequest, UnsupportedModel
from kvferry.shared.model.adapters.latent import LATENT, Latent
from kvferry.shared.model.adapters.layers import QUERY_SCALE, decoder_of
from kvferry.shared.model.fused_decode import fused_decode
from kvferry.shared.model.interface import DecodeAttention, LayerStates, PrefillObserver
from kvferry.shared.model.prefill_attention import expanded_attention, prefill_attention
from kvferry.shared.model.rotary import KeyRotation
from kvferry.shared.model.spec import LayerSpec, ModelSpec
from kvferry.shared.model.support import state_layers

if TYPE_CHECKING:
    from kvferry.shared.model.state_cache import StateCache

ATTENTION_NAME = "kvferry"
_LOGITS = 1 << 22
"""Logits of a prompt that are in memory at a time."""
_KNOWN_ARGUMENTS = frozenset((
    "kvferry", "sliding_window", "softcap", "s_aux", "sinks",
    # These have no effect here: nothing is dropped, passes are causal, and the cache is not transformers'.
    "dropout", "is_causal", "output_attentions", "output_hidden_states", "output_router_logits",
    "position_ids", "use_cache",
))  # fmt: skip


class AttentionPass:
    """One forward pass of the model: the attention's behaviour.

    Attributes:
        positions: int64 `[B, T]`, set before the pass.
        cache: of a model with states, set before the pass.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.positions = torch.empty(0)
        self.cache: StateCache | None = None

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: Scaling, latent: Latent | None
    ) -> Tensor:
        """Compute a layer's attention.

        Args:
            query: `[B, H, T, D]`; key and value `[B, H_kv, T, D]`.
            latent: for latent attention, whose keys are rows and whose queries are of expanded keys.

        Returns: `[B, T, H, D]`, for latent attention with the expanded values' channels.
        """
        raise NotImplementedError


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute one layer's attention in transformers' convention.

    Args:
        query: post-RoPE `[B, H, T, D]`; key and value `[B, H_kv, T, D]`. Query head h reads KV head h // G.
        kwargs: the model's other arguments; `kvferry` is the AttentionPass.

    Returns: `[B, T, H, D]`, and None in place of weights.

    Raises: UnsupportedModel if the model needs more than plain causal attention.
    """
    current: AttentionPass | None = kwargs.get("kvferry")
    if current is None:
        raise UnsupportedModel(
            f"{type(module).__name__} does not pass the model's arguments to its attention"
        )
    of_latent = module.__dict__.get(LATENT)  # getattr of a module is slow for a missing attribute
    latent: Latent | None = None if of_latent is None else of_latent()
    layer = getattr(module, "layer_idx", None) if current.cache is None else current.cache.attending
    if not isinstance(layer, int):
        raise UnsupportedModel(
            f"{type(module).__name__} has no layer_idx; attention modules must know their layer"
        )
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if sinks is None:
        sinks = kwargs.get("sinks")
    problem = _problem(module, layer, attention_mask, kwargs, current.spec)
    if problem is None and latent is None and key.shape[-1] != value.shape[-1]:
        problem = f"has keys of size {key.shape[-1]} and values of size {value.shape[-1]}; must be equal"
    if problem is None and latent is not None and (softcap or sinks is not None):
        problem = "has latent rows and soft-capping or sinks; only a plain softmax goes with latent rows"
    if problem is not None:
        raise UnsupportedModel(f"{type(module).__name__} of layer {layer} {problem}")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    query_scale = module.__dict__.get(QUERY_SCALE)
    if query_scale is not None:
        query = (query * query_scale(current.positions)[:, None, :, None]).to(query.dtype)
    softmax: Scaling = float(scaling)
    if softcap or sinks is not None:
        softmax = Softmax(
            scaling=float(scaling),
            softcap=float(softcap or 0.0),
            sinks=None if sinks is None else sinks.view(key.shape[1], -1),
        )
    return current.attend(layer, query, key, value, softmax, latent), None


def _problem(
    module: nn.Module,
    layer: int,
    attention_mask: Tensor | None,
    arguments: Mapping[str, Any],
    spec: ModelSpec,
) -> str | None:
    """Say which feature of one attention call is not supported; None if all are."""
    for argument, given in arguments.items():
        if given is not None and given is not False and argument not in _KNOWN_ARGUMENTS:
            return f"uses {argument}, which is not supported"
    window = arguments.get("sliding_window")
    if spec.layers or window is not None:  # chunks are in the mask, not in the call
        expected = spec.layer(layer)
        window = window if 0 < (window or 0) < spec.max_model_len else 0
        if window != (0 if expected.is_chunked else expected.window):
            return (
                f"is called with sliding_window {window}, and the configuration says {expected.window} (0: "
                "none); the two must agree"
            )
    if attention_mask is not None:
        return "passes an attention mask; only plain causal attention is supported"
    if not getattr(module, "is_causal", True):
        return "is not causal; only plain causal attention is supported"
    return None


class PrefillPass(AttentionPass):
    """The new tokens of a prompt, layer by layer.

        K, V of layer l:  projection ──► attend ──► observer.layer_done ──► freed with the layer's frame

    No layer's KV is stored here. Including the history from the observer, at most one layer of full KV is
    alive, and the new tokens' KV twice while it is joined to the history.

    Args: observer: None where a subclass provides a layer's history and takes its results.
    """

    def __init__(
        self,
        observer: PrefillObserver | None,
        *,
        start: int,
        spec: ModelSpec,
        num_queries: int | None = None,
    ) -> None:
        super().__init__(spec)
        self._observer = observer
        self._num_queries = num_queries
        self._start = start
        self._layers = spec.layers or (LayerSpec(),) * spec.num_layers

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: Scaling, latent: Latent | None
    ) -> Tensor:
        num_kv_heads = key.shape[1]
        history = self._history(layer, key)
        if history is not None:
            key = torch.cat([history[0][None], key], 2)
            latent_dim = 0 if latent is None else value.shape[-1]
            value = key[..., :latent_dim] if latent_dim else torch.cat([history[1][None], value], 2)
        del history
        if latent is None:
            output = prefill_attention(query, key, value, scaling, self._layers[layer])
        else:
            output = expanded_attention(query, key[0, 0], latent, scaling, self._layers[layer])
        observed = query if self._num_queries is None else query[:, :, -self._num_queries :]
        if latent is not None:
            observed = latent.absorb(observed)
        queries = observed[0].view(num_kv_heads, -1, *observed.shape[2:])
        scale = scaling.scaling if isinstance(scaling, Softmax) else scaling
        self._done(layer, queries, key[0], value[0], scale)
        return output.transpose(1, 2).contiguous()

    def _history(self, layer: int, key: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return K and V `[H_kv, P, D]` of earlier tokens; None without any. Args: key: of the new tokens."""
        assert self._observer is not None, "who has no observer says it in another way"
        history = self._observer.history(layer)
        num_history = 0 if history is None else history[0].shape[1]
        assert num_history == self._start, (
            f"history has {num_history} tokens, the pass starts at {self._start}"
        )
        return history if num_history else None

    def _done(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        assert self._observer is not None, "who has no observer takes it in another way"
        self._observer.layer_done(layer, queries, keys, values, scaling)


class DecodePass(AttentionPass):
    """One token for each of B sequences; the attention has their KV."""

    def __init__(self, attention: DecodeAttention, *, spec: ModelSpec) -> None:
        super().__init__(spec)
        self._attention = attention

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: Scaling, latent: Latent | None
    ) -> Tensor:
        num_kv_heads = key.shape[1]
        if latent is not None:
            query = latent.absorb(query)
        queries = query[:, :, 0].view(query.shape[0], num_kv_heads, -1, query.shape[3])
        output = self._attention(layer, queries, key[:, :, 0], value[:, :, 0], scaling)
        attended = output.flatten(1, 2)
        return (attended if latent is None else latent.project(attended))[:, None]


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Yield parameters, buffers, and the scales and codes of modules with quantised weights."""
    for module in model.modules():
        for value in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(value, Tensor):
                yield value
            elif type(value).__module__.startswith("bitsandbytes."):
                yield from (tensor for tensor in vars(value).values() if isinstance(tensor, Tensor))


class TransformersModel:
    """Implements `LanguageModel`. No state of a pass is stored here, so passes may be nested.

    Attributes:
        num_ranks: this process alone.
        state_layers: see `support.py`.

    Args:
        model: a transformers causal language model in eval mode that uses our attention function.
        rotation: undoes the rotary positions of its keys; None if that is not possible.
    """

    num_ranks = 1

    def __init__(self, model: Any, spec: ModelSpec, rotation: KeyRotation | None = None) -> None:
        self.spec = spec
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self._model = model
        self._rotation = rotation
        self.state_layers = state_layers(model.config.get_text_config())
        takes_cache_params = "cache_params" in inspect.signature(model.forward).parameters
        self._cache_argument = "cache_params" if takes_cache_params else "past_key_values"
        self._fused = fused_decode(model, spec)
        self._fused_problem = dtype_problem(self.dtype, self.device)

    def twin(self) -> TransformersModel:
        """Make a separate model over the same weights, for another thread's passes."""
        modules = copy.deepcopy(self._model, {id(tensor): tensor for tensor in _tensors_of(self._model)})
        return TransformersModel(modules, self.spec, self._rotation)

    @torch.inference_mode()
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
        """Run new prompt tokens, layer by layer; see `LanguageModel.prefill`.

        Raises:
            ContextLengthExceeded: start + T is beyond the model's window.
            InvalidRequest: `on_logits` is given, and the model scales or caps its head's logits.
            Whatever the observer raises; this ends the pass.
        """
        if (num_tokens := start + token_ids.shape[0]) > self.spec.max_model_len:
            raise ContextLengthExceeded(
                f"{num_tokens} tokens; the model's window is {self.spec.max_model_len}"
            )
        with self._prompt_pass(token_ids, start, observer, num_queries, on_logits is not None) as current:
            return self.run_prompt(token_ids, start, current, states, on_logits=on_logits)

    @contextmanager
    def _prompt_pass(
        self,
        token_ids: Tensor,
        start: int,
        observer: PrefillObserver,
        num_queries: int | None,
        with_logits: bool,
    ) -> Iterator[PrefillPass]:
        """Make the context of a prompt's pass; arguments as of `prefill`."""
        yield PrefillPass(observer, start=start, spec=self.spec, num_queries=num_queries)

    @torch.inference_mode()
    def run_prompt(
        self,
        token_ids: Tensor,
        start: int,
        current: AttentionPass,
        states: LayerStates | None = None,
        *,
        on_logits: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """Run new prompt tokens in a given pass; otherwise as `prefill`."""
        positions = torch.arange(start, start + token_ids.shape[0], device=self.device)
        if on_logits is None:
            return self.run(token_ids[None], positions[None], current, states)[0]
        hidden: list[Tensor] = []

        def keep(_: Any, __: Any, options: Any, output: Any) -> None:
            if options.get("kvferry") is current:  # not a pass nested in this one
                hidden.append(output.last_hidden_state[0])

        hook = decoder_of(self._model).register_forward_hook(keep, with_kwargs=True)
        try:
            logits = self.run(token_ids[None], positions[None], current, states)[0]
        finally:
            hook.remove()
        self._head(hidden[0], logits, start, on_logits)
        return logits

    def _head(
        self, hidden: Tensor, last: Tensor, start: int, on_logits: Callable[[int, Tensor], None]
    ) -> None:
        """Compute the logits of all tokens, a few rows at a time.

        Args: hidden: `[T, hidden size]` after the last layer. last: logits `[V]` of the last token.
        """
        head = self._model.get_output_embeddings()
        if not torch.equal(head(hidden[None, -1:])[0, -1].float(), last):
            raise InvalidRequest(
                f"prompt_logprobs is not available for {type(self._model).__name__}, which scales or caps "
                "its head's logits",
                param="prompt_logprobs",
            )
        num_rows = max(1, _LOGITS // self.spec.vocab_size)
        for first in range(0, hidden.shape[0], num_rows):
            on_logits(start + first, head(hidden[first : first + num_rows]))

    @torch.inference_mode()
    def decode(
        self,
        token_ids: Tensor,
        positions: Tensor,
        *,
        attention: DecodeAttention,
        states: LayerStates | None = None,
    ) -> Tensor:
        """Run one token for each of B sequences; see `LanguageModel.decode`."""
        if (fused := self._fused) is not None:
            if fused.runs_natively():
                return fused.run_natively(token_ids, positions, attention)
            path = path_for("decoder_ops", self.device, self._fused_problem)
            if path != "torch" or (self.device.type == "cpu" and mode() == "auto"):
                return fused.run(token_ids, positions, attention)
        assert states is not None or not self.state_layers, "the model has states, and none are given"
        with self._step_pass(token_ids, positions, attention) as current:
            return self.run(token_ids[:, None], positions[:, None], current, states)

    @contextmanager
    def _step_pass(
        self, token_ids: Tensor, positions: Tensor, attention: DecodeAttention
    ) -> Iterator[DecodePass]:
        """Make the context of a decode step's pass; arguments as of `decode`."""
        yield DecodePass(attention, spec=self.spec)

    @torch.inference_mode()
    def pre_rope_keys(self, layer: int, keys: Tensor) -> Tensor:
        """Return keys without their rotary positions; see `LanguageModel.pre_rope_keys`."""
        if self._rotation is None:
            raise UnsupportedModel(
                f"the rotary positions of {type(self._model).__name__} cannot be undone; compression methods "
                "that use keys before RoPE cannot be used with it"
            )
        return self._rotation.undo(layer, keys)

    @torch.inference_mode()
    def run(
        self, token_ids: Tensor, positions: Tensor, current: AttentionPass, states: LayerStates | None = None
    ) -> Tensor:
        """Run tokens in a given pass.

        Args: token_ids and positions int64 `[B, T]`. Returns: float32 logits `[B, V]` of the last tokens.
        """
        current.positions = positions
        arguments: dict[str, Any] = {"input_ids": token_ids, "position_ids": positions, "logits_to_keep": 1}
        if not self.state_layers:
            output = self._model(**arguments, use_cache=False, kvferry=current)
        else:
            # imported here because it imports transformers
            from kvferry.shared.model.state_cache import StateCache

            config = self._model.config.get_text_config()
            cache = current.cache = StateCache(config, self.state_layers, states)
            arguments[self._cache_argument] = cache
            output = self._model(**arguments, use_cache=False, kvferry=current)
            cache.finish()
        logits: Tensor = output.logits[:, -1]
        return logits.float()
