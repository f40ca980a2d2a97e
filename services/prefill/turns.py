"""The KV of the tokens that turns of sessions generated, as decode returns it.

Place in the request's path: `HistoryReceiver` is the sink of prefill's block server, on the server's thread;
the router's commit publishes what it stages.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvferry.shared.errors import LeaseExpired, ProtocolMismatch
from kvferry.shared.history.store import HistoryStore
from kvferry.shared.history.turn import StagedTurn
from kvferry.shared.model.spec import TORCH_DTYPES, ModelSpec
from kvferry.shared.wire.messages import (
    BlockHeader,
    EndRecord,
    LayerHeader,
    Manifest,
    TensorHeader,
    TransferKey,
)
from kvferry.shared.wire.receiver import check_manifest, model_fields


@dataclass(frozen=True, kw_only=True)
class _Expected:
    """A turn whose generated KV may be returned, under the key of the turn's transfer to decode.

    Attributes:
        start: the prompt's length, which is the first generated token's position.
        max_tokens: limit on the returned rows per layer and head.
    """

    request_id: str
    key: TransferKey
    start: int
    max_tokens: int


class _Incoming:
    """An open return: each layer's rows, `[H_kv, n, D]` on the host, or its state."""

    def __init__(self, expected: _Expected, manifest: Manifest) -> None:
        self.expected = expected
        self.manifest = manifest
        self.layers: list[dict[str, Tensor]] = []


class HistoryReceiver:
    """Implements `BlockSink` for transfers of purpose "history".

        expect ──► open (request id, key, start and shapes agree) ──► begin_layer, write... ──► commit: staged
           └──► forget (turn over), prune (turn expired)                     └──► abort: buffers dropped

    `expect`, `forget` and `prune` may be called from any thread; the others from the block server's.
    """

    def __init__(self, *, spec: ModelSpec, store: HistoryStore) -> None:
        self._spec = spec
        self._store = store
        self._lock = threading.Lock()
        self._expected: dict[str, _Expected] = {}
        self._incoming: dict[TransferKey, _Incoming] = {}

    def expect(self, request_id: str, key: TransferKey, *, start: int, max_tokens: int) -> None:
        """Allow a return for this request's staged turn. Replaces an earlier expectation."""
        with self._lock:
            self._expected[request_id] = _Expected(
                request_id=request_id, key=key, start=start, max_tokens=max_tokens
            )

    def forget(self, request_id: str, key: TransferKey | None = None) -> None:
        """Accept no return for this request any more; with a key, only if it is the expected one."""
        with self._lock:
            expected = self._expected.get(request_id)
            if expected is not None and key in (None, expected.key):
                del self._expected[request_id]

    def prune(self) -> None:
        """Forget requests whose turn is over."""
        with self._lock:
            request_ids = tuple(self._expected)
        for request_id in request_ids:
            if self._store.turn(request_id) is None:
                self.forget(request_id)

    def open(self, manifest: Manifest) -> None:
        with self._lock:
            expected = self._expected.get(manifest.request_id)
        if expected is None or expected.key != manifest.key:
            raise LeaseExpired(
                f"no turn of request {manifest.request_id!r} awaits history under {manifest.key}",
                reason="unknown_turn",
            )
        self._turn(expected)
        self._check(manifest, expected)
        self._incoming[manifest.key] = _Incoming(expected, manifest)

    def begin_layer(self, key: TransferKey, header: LayerHeader) -> None:
        incoming, spec = self._incoming[key], self._spec
        layer = spec.layer(header.layer)
        heads = spec.heads(header.layer)
        shape = (heads.num_kv_heads, incoming.manifest.num_tokens, heads.head_dim)
        rows = [(name, spec.dtype, shape) for name in spec.row_names] if layer.has_rows else []
        states = [(tensor.name, tensor.dtype, tensor.shape) for tensor in layer.state]
        headers = [TensorHeader(name=name, dtype=dtype, shape=size) for name, dtype, size in rows + states]
        expected = tuple(headers)
        if header.tensors != expected:
            raise ProtocolMismatch(
                f"layer {header.layer} of returned history has tensors {header.tensors}; {expected} are "
                "expected",
                reason="layer_tensors",
            )
        incoming.layers.append(
            {tensor.name: torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype]) for tensor in expected}
        )

    def write(self, header: BlockHeader, payload: memoryview) -> None:
        layer = self._incoming[header.key].layers[header.layer]
        target = list(layer.values())[header.tensor].view(-1).view(torch.uint8).numpy()
        target[header.offset : header.offset + payload.nbytes] = np.frombuffer(payload, np.uint8)

    def commit(self, end: EndRecord) -> None:
        """See `BlockSink.commit`: stage every layer's rows after the prompt's, and its state after them."""
        incoming = self._incoming.pop(end.key)
        turn, num_new = self._turn(incoming.expected), incoming.manifest.num_tokens
        for layer, tensors in enumerate(incoming.layers if num_new else ()):
            if self._spec.layer(layer).has_rows:
                keys = tensors["keys"]
                values = tensors.get("values", keys[..., : self._spec.latent_dim])
                turn.append(self._spec.row_numbers[layer], keys, values)
            elif tensors:
                turn.append_state(layer, tensors, incoming.expected.start + num_new)
        self.forget(incoming.expected.request_id, end.key)

    def abort(self, key: TransferKey, reason: str) -> None:
        """See `BlockSink.abort`. The return may be tried again."""
        self._incoming.pop(key, None)

    def _turn(self, expected: _Expected) -> StagedTurn:
        turn = self._store.turn(expected.request_id)
        if turn is None:
            self.forget(expected.request_id, expected.key)
            raise LeaseExpired(f"the turn of request {expected.request_id!r} is over", reason="turn_over")
        return turn

    def _check(self, manifest: Manifest, expected: _Expected) -> None:
        if not 0 <= manifest.num_tokens <= expected.max_tokens:
            raise ProtocolMismatch(
                f"returned history has {manifest.num_tokens} tokens; 0 to {expected.max_tokens} are expected",
                reason="num_tokens",
            )
        check_manifest(manifest, {"purpose": "history", "start": expected.start, **model_fields(self._spec)})
