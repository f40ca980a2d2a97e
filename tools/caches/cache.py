"""A prompt's compressed KV as a cache that transformers' `generate` takes, its file, and the document of a
server.

It decodes with the oracle's plain code, so a greedy answer is the one of the same method in the services. It
has one sequence.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvferry.shared.compression.applicable import check_applicable
from kvferry.shared.compression.formats.interface import Tensors
from kvferry.shared.compression.plan import Budget, ParamValue, ResolvedPlan
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.errors import ContextLengthExceeded, InvalidRequest
from kvferry.shared.model.spec import ModelSpec
from kvferry.tools.caches.model import CACHE_LAYER, bridge_of, token_ids_of
from kvferry.tools.oracle import OneProcessGenerator
from kvferry.tools.oracle_decode import OracleDecode

_FORMAT, _VERSION = "kvferry.cache", 1


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a cache, as transformers calls it."""

    is_sliding = False

    def __init__(self, index: int, decode: OracleDecode, num_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.index = index
        self.num_tokens = num_tokens
        self._decode = decode
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the layer is already initialised."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Count new tokens; `attend` appends them."""
        if key_states.shape[0] != 1:
            raise InvalidRequest(f"the batch has {key_states.shape[0]} sequences; a compressed cache has one")
        self.num_tokens += key_states.shape[2]
        setattr(key_states, CACHE_LAYER, self)
        return key_states, value_states

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Append new tokens and attend to all retained rows.

        Several at once are more of the prompt, a question for example: each attends to every retained row.

        Args: query `[1, H, T, D]`; key and value `[1, H_kv, T, D]`.
        Returns: `[1, T, H, D]`.
        """
        num_tokens, num_kv_heads = key.shape[2], key.shape[1]
        attention = self._decode if num_tokens == 1 else self._decode.densely
        with torch.inference_mode():
            queries = query.view(1, num_kv_heads, -1, num_tokens, query.shape[3])
            outputs = [
                attention(self.index, queries[:, :, :, t], key[:, :, t], value[:, :, t], scaling).flatten(
                    1, 2
                )
                for t in range(num_tokens)
            ]
        return torch.stack(outputs, 1).to(query.dtype)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_tokens + query_length, 0

    def get_seq_length(self) -> int:
        return self.num_tokens

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        raise InvalidRequest("a compressed cache cannot be reset; fork it before it is used")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise InvalidRequest("a compressed cache has one sequence, so it cannot be used for beam search")

    def crop(self, tokens_to_remove: int) -> None:
        raise InvalidRequest("a compressed cache cannot be cropped")


class CompressedCache(Cache):
    """The compressed KV of one prompt, and of the tokens that follow it.

    Attributes:
        input_ids: int64 `[1, T + 1]`, the prompt and its first token, which the full KV chose. It is what
            `generate` is given with the cache.
        resolved: the plan, exact for this prompt.
        compressed: the prompt's tensors by layer.
        spec: of the model.
    """

    def __init__(
        self,
        spec: ModelSpec,
        resolved: ResolvedPlan,
        compressed: tuple[Tensors, ...],
        input_ids: Tensor,
        decode: OracleDecode | None = None,
        num_tokens: int | None = None,
    ) -> None:
        self.spec = spec
        self.resolved = resolved
        self.compressed = compressed
        self.input_ids = input_ids
        self._decode = decode or OracleDecode(spec, resolved, compressed)
        count = resolved.num_prompt_tokens if num_tokens is None else num_tokens
        super().__init__(layers=[_Layer(index, self._decode, count) for index in range(spec.num_layers)])

    @property
    def method(self) -> str:
        """The method in effect: "full" if nothing was left out."""
        return self.resolved.method

    @property
    def size_bytes(self) -> int:
        """The bytes of the compressed prompt."""
        return sum(tensor.nbytes for tensors in self.compressed for tensor in tensors.values())

    @property
    def full_bytes(self) -> int:
        """The bytes of the prompt's full KV."""
        return self.spec.full_bytes(self.resolved.num_prompt_tokens)

    def fork(self) -> CompressedCache:
        """Return an independent cache from here: tokens of one do not go into the other."""
        return CompressedCache(
            self.spec,
            self.resolved,
            self.compressed,
            self.input_ids,
            self._decode.fork(),
            self.get_seq_length(),
        )

    def save(self, path: str | Path) -> None:
        """Write the compressed prompt as a safetensors file; tokens after it are left out."""
        from safetensors.torch import save_file

        described = {
            "format": _FORMAT,
            "version": _VERSION,
            "fingerprint": self.spec.fingerprint,
            "resolved": asdict(self.resolved),
        }
        tensors = {
            f"layers.{index}.{name}": tensor.contiguous().clone()
            for index, layer in enumerate(self.compressed)
            for name, tensor in layer.items()
        }
        save_file({"input_ids": self.input_ids, **tensors}, path, metadata={"kvferry": json.dumps(described)})

    def insert(self, base_url: str, text: str, *, id: str | None = None, api_key: str = "") -> str:
        """Make the prompt's text a document of a server, which computes the KV itself.

        Conversations that name the document are compressed by this cache's method and budget.

        Args: base_url: of the server, without `/v1`; id: of the document; None lets the server choose.
        Returns: the document's id.
        Raises: InvalidRequest where the server refuses it.
        """
        import httpx

        plan = self.resolved.plan
        wanted = {
            "method": plan.method,
            "token_budget": plan.budget.tokens,
            "retention": plan.budget.retention,
        }
        if plan.method == "full":
            wanted = {"method": "full"}
        body = {"text": text, "id": id, "kv_compression": wanted}
        reply = httpx.post(
            f"{base_url.rstrip('/')}/v1/documents",
            json={name: value for name, value in body.items() if value is not None},
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=600.0,
        )
        if reply.status_code != 200:
            raise InvalidRequest(f"the server refused the document: {reply.text}")
        return str(reply.json()["id"])


def compress(
    model: Any,
    input_ids: Any,
    *,
    method: str,
    token_budget: int | None = None,
    retention: float | None = None,
    max_new_tokens: int = 256,
    **parameters: ParamValue,
) -> CompressedCache:
    """Run a prompt and compress its KV.

    Args:
        model: a transformers causal language model, in eval mode. Its attention implementation becomes
            `kvferry_cache`, which is `sdpa` where no compressed cache is used.
        input_ids: of one prompt, `[1, T]`, `[T]` or a list.
        method: as in requests, see `GET /v1/methods`.
        token_budget, retention: at most one; without any the method's own.
        max_new_tokens: as a request's; some methods size their selection by it.
        parameters: of the method, as `kv_compression.parameters` in requests.

    Raises: InvalidRequest, ContextLengthExceeded, UnsupportedModel.
    """
    bridge = bridge_of(model)
    ids = token_ids_of(input_ids)
    if len(ids) >= bridge.spec.max_model_len:
        raise ContextLengthExceeded(
            f"input_ids has {len(ids)} tokens; the model's window of {bridge.spec.max_model_len} must hold "
            "them and one more",
            param="input_ids",
        )
    if token_budget is not None and retention is not None:
        raise InvalidRequest("token_budget and retention exclude one another", param="kv_compression")
    plan = plan_for(method, budget=Budget(tokens=token_budget, retention=retention), overrides=parameters)
    check_applicable(plan, bridge.spec.layers)
    generator = OneProcessGenerator(bridge)
    captured = generator.capture(ids)
    assert captured.logits is not None, "the whole prompt was run"
    continued = generator.compress(captured, plan=plan, max_new_tokens=max_new_tokens)
    whole = torch.tensor([[*ids, int(captured.logits.argmax())]], device=bridge.device)
    return CompressedCache(bridge.spec, continued.resolved, continued.compressed, whole)


def load(model: Any, path: str | Path) -> CompressedCache:
    """Read a cache that `CompressedCache.save` wrote.

    Raises: InvalidRequest where the file is no cache of this model.
    """
    from safetensors import SafetensorError, safe_open

    bridge = bridge_of(model)
    try:
        with safe_open(path, framework="pt", device=str(bridge.device)) as file:
            described = json.loads((file.metadata() or {}).get("kvferry", "{}"))
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
        if (described.get("format"), described.get("version")) != (_FORMAT, _VERSION):
            raise InvalidRequest(f"{str(path)!r} is no {_FORMAT} of version {_VERSION}", param="path")
        resolved = msgspec.convert(described["resolved"], ResolvedPlan)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise InvalidRequest(f"{str(path)!r} cannot be read: {error}", param="path") from None
    if described.get("fingerprint") != bridge.spec.fingerprint:
        raise InvalidRequest(f"{str(path)!r} is of another model or dtype", param="path")
    layers: list[dict[str, Tensor]] = [{} for _ in range(bridge.spec.num_layers)]
    input_ids = tensors.pop("input_ids")
    for name, tensor in tensors.items():
        _, index, part = name.split(".", 2)
        layers[int(index)][part] = tensor
    return CompressedCache(bridge.spec, resolved, tuple(layers), input_ids)
