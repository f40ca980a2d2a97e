"""A decode step of a float32 model like Llama on a CPU: everything beside attention, in C.

    begin ──► project layer 0 ──► attention ──► finish layer 0 ──► project layer 1 ──► ... ──► logits

Called by `shared/model/fused_decode.py`, with the model's own weights; the code is in `kernels/native`. As
many threads as torch has share the products that are large enough. Results differ from torch's by the order
of sums and by e^x in the last place.

Legend: B rows (one token each), N hidden size, H query heads, H_kv KV heads, D head_dim.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvferry.kernels.native import library as native

COLUMNS = 8
"""A product's number of columns must be a multiple of it."""
PRODUCTS = ("queries", "keys", "values", "output", "gate", "up", "down")
NORMS = ("input", "queries_norm", "keys_norm", "inner")


class Weights(NamedTuple):
    """Of a matrix product: weight `[n, m]`, bias `[n]`; or of an RMSNorm: weight `[n]` and eps."""

    weight: Tensor
    bias: Tensor | None = None
    eps: float = 0.0


class NativeDecoder:
    """A model's weights as C code finds them.

    float32 weights that are 16-bit numbers, as those of most checkpoints, are copied as such: a step then
    reads half the bytes, and computes the same.

    Args:
        layers: by the names in `NORMS` and `PRODUCTS`; without norms of heads if there are none.
        last: the norm after the last layer; head: to logits.
    """

    def __init__(
        self, layers: Sequence[Mapping[str, Weights]], last: Weights, head: Weights, head_dim: int
    ) -> None:
        self._library = native.library()
        self._read: list[Tensor] = []  # by C code, as long as this object exists
        self._layers = (native.Layer * len(layers))(*(self._layer(weights, head_dim) for weights in layers))
        self._at = [ctypes.addressof(layer) for layer in self._layers]
        self._last, self._head = self._norm(last), self._product(head)
        self._head_dim, self._inner = head_dim, len(layers[0]["gate"].weight)
        self._sizes = [len(layers[0][name].weight) // head_dim for name in ("queries", "keys")]
        self._vocab_size = len(head.weight)

    def _layer(self, weights: Mapping[str, Weights], head_dim: int) -> native.Layer:
        fields = {name: self._product(weights[name]) for name in PRODUCTS}
        norms = {name: self._norm(weights[name]) for name in NORMS if name in weights}
        return native.Layer(head_dim=head_dim, **norms, **fields)

    def _norm(self, weights: Weights) -> native.Norm:
        self._read.append(weights.weight)
        return native.Norm(weights.weight.data_ptr(), weights.eps)

    def _product(self, weights: Weights) -> native.Product:
        weight, kinds = weights.weight, self._library.kvferry_kinds()
        for dtype in (torch.float16, torch.bfloat16) if weight.dtype == torch.float32 else ():
            narrow = weight.to(dtype)
            if kinds >> native.KINDS[dtype] & 1 and torch.equal(narrow.float(), weight):
                weight = narrow
                break
        self._read += [weight] if weights.bias is None else [weight, weights.bias]
        return _product(weight, weights.bias)

    @staticmethod
    def problem(weights: Sequence[Weights]) -> str | None:
        """Say why a model with these weights cannot be run; None if it can."""
        for tensor in _tensors(weights):
            dtypes = (torch.float32,) if tensor.ndim == 1 else (torch.float32, torch.bfloat16)
            if tensor.dtype not in dtypes or tensor.device.type != "cpu" or not tensor.is_contiguous():
                allowed = " or ".join(map(str, dtypes))
                return (
                    f"a weight is {tensor.dtype} on {tensor.device}; "
                    f"it must be contiguous {allowed} on the CPU"
                )
        if any(entry.weight.ndim == 2 and entry.weight.shape[1] % COLUMNS for entry in weights):
            return f"a product's number of columns is no multiple of {COLUMNS}"
        return None

    def begin(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> NativeStep:
        """Begin a step. Args: float32: hidden `[B, N]`, which is changed; cos and sin `[B, D]`."""
        return NativeStep(self, hidden, cos, sin)


class NativeStep:
    """One step of B tokens, whose calls follow the order of the layers."""

    def __init__(self, decoder: NativeDecoder, hidden: Tensor, cos: Tensor, sin: Tensor) -> None:
        self._decoder, self._num_threads = decoder, torch.get_num_threads()
        self._hidden, self._cos, self._sin = hidden.contiguous(), cos.contiguous(), sin.contiguous()
        self._change: Tensor | None = None
        self._scratch = hidden.new_empty(max(2 * decoder._inner, hidden.shape[1]) * len(hidden))

    def project(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Compute what comes before a layer's attention. Returns: rotated queries `[B, H_kv, G, D]`, keys and
        values `[B, H_kv, D]`."""
        decoder, hidden = self._decoder, self._hidden
        (num_heads, num_kv_heads), count = decoder._sizes, len(hidden)
        rows = hidden.new_empty((count * (num_heads + 2 * num_kv_heads), decoder._head_dim))
        sizes = [count * num_heads, count * num_kv_heads, count * num_kv_heads]
        queries, keys, values = torch.split(rows, sizes)
        change = None if self._change is None else self._change.data_ptr()
        others = map(Tensor.data_ptr, (self._cos, self._sin, self._scratch, queries, keys, values))
        decoder._library.kvferry_project(
            decoder._at[layer], count, self._num_threads, hidden.data_ptr(), change, *others
        )
        shape = (count, num_kv_heads, -1, decoder._head_dim)
        return queries.view(shape), keys.view(shape[:2] + shape[3:]), values.view(shape[:2] + shape[3:])

    def finish(self, layer: int, attended: Tensor) -> None:
        """Compute what comes after a layer's attention. Args: `[B, H_kv, G, D]`."""
        if self._change is None:
            self._change = torch.empty_like(self._hidden)
        decoder, attended = self._decoder, attended.contiguous()
        pointers = map(Tensor.data_ptr, (attended, self._hidden, self._change, self._scratch))
        decoder._library.kvferry_finish(decoder._at[layer], len(attended), self._num_threads, *pointers)

    def logits(self) -> Tensor:
        """Compute what comes after the last layer. Returns: float32 `[B, V]`."""
        assert self._change is not None, "no layer has been finished"
        decoder = self._decoder
        logits = self._hidden.new_empty((len(self._hidden), decoder._vocab_size))
        weights = map(ctypes.addressof, (decoder._last, decoder._head))
        pointers = map(Tensor.data_ptr, (self._hidden, self._change, logits))
        decoder._library.kvferry_logits(*weights, len(logits), self._num_threads, *pointers)
        return logits


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `torch.nn.functional.linear` by C code.

    Args:
        rows: float32 `[..., m]`.
        weight: `[n, m]`, contiguous, of one of the library's dtypes; m is a multiple of `COLUMNS`.
        bias: float32 `[n]`.

    Returns: float32 `[..., n]`.
    """
    rows = rows.contiguous()
    results = rows.new_empty((*rows.shape[:-1], len(weight)))
    product, num_rows = _product(weight, bias), rows.numel() // weight.shape[1]
    native.library().kvferry_multiply(
        ctypes.addressof(product), num_rows, torch.get_num_threads(), rows.data_ptr(), results.data_ptr()
    )
    return results


def _product(weight: Tensor, bias: Tensor | None) -> native.Product:
    bias_at = None if bias is None else bias.data_ptr()
    return native.Product(weight.data_ptr(), bias_at, *weight.shape, native.KINDS[weight.dtype])


def _tensors(weights: Sequence[Weights]) -> Iterator[Tensor]:
    for entry in weights:
        yield entry.weight
        if entry.bias is not None:
            yield entry.bias
