"""A format as another package would bring it: every value in half of its bits, and the newest row first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvferry.kernels.dense_decode import dense_decode
from kvferry.shared.compression.formats.interface import (
    InvalidTensors,
    LayerCache,
    LayerFormat,
    NaiveLayer,
    Specs,
    Tensors,
    check_index,
    gather_rows,
    select_rows,
)
from kvferry.shared.compression.interface import LayerInputs, LayerShape, Method, Sizing, TensorSpec
from kvferry.shared.compression.plan import Budget, CompressionPlan, LayerPlan, Part, read_params
from kvferry.shared.errors import InvalidRequest

HALF = torch.float16


@dataclass(frozen=True, kw_only=True)
class Halved(LayerFormat):
    """K and V `[H_kv, n, D]` in float16, times `scale`, the last token's row first."""

    name: ClassVar[str] = "halved"
    scale: float

    @classmethod
    def check(cls, plan: CompressionPlan) -> None:
        read_params("format 'halved'", plan.representation.params, {"scale": float})
        if plan.attention.name != "dense":
            raise InvalidRequest("format 'halved' takes attention 'dense' only")

    @classmethod
    def plan_layer(cls, plan: CompressionPlan, sizing: Sizing) -> LayerPlan:
        rows = min(2 * sizing.rows, sizing.num_prompt_tokens)
        return LayerPlan(rows=rows, representation=plan.representation)

    @classmethod
    def of(cls, plan: CompressionPlan, layer: LayerPlan, shape: LayerShape) -> Halved:
        return cls(shape=shape, rows=layer.rows, scale=float(layer.representation.params["scale"]))

    def compress(self, inputs: LayerInputs, scores: Tensor | None) -> Tensors:
        keys, values, index = inputs.keys, inputs.values, {}
        if scores is not None:
            index = {"index": select_rows(scores, self.rows)}
            keys, values = (gather_rows(tensor, index["index"]) for tensor in (keys, values))
        return {
            **index,
            "keys": (keys.flip(1) * self.scale).to(HALF),
            "values": (values.flip(1) * self.scale).to(HALF),
        }

    def tensors(self) -> Specs:
        rows = self._halved(self.rows)
        return {**self.shape.index_spec(self.rows), "keys": rows, "values": rows}

    def placed(self, num_new: int) -> Specs:
        rows = self._halved(self.rows)
        return {"half_keys": rows, "half_values": rows, **self.shape.row_specs(num_new)}

    def _halved(self, num_rows: int) -> TensorSpec:
        return TensorSpec(shape=(self.shape.num_kv_heads, num_rows, self.shape.head_dim), dtype=HALF)

    def _receive(self, header: Specs, regions: Tensors) -> dict[str, Tensor]:
        places = {"keys": regions["half_keys"], "values": regions["half_values"]}
        return {
            name: places[name] if name in places else torch.empty(spec.shape, dtype=spec.dtype)
            for name, spec in header.items()
        }

    def open(self, regions: Tensors, tensors: Tensors) -> LayerCache:
        check_index(tensors, self.shape.num_prompt_tokens, reason="index")
        if not regions["half_keys"].isfinite().all():
            raise InvalidTensors("halved keys must be finite", reason="packed")
        return HalvedCache(self, regions)

    def naive(self, tensors: Tensors) -> NaiveLayer:
        return NaiveHalved(self, tensors["keys"].flip(1), tensors["values"].flip(1))

    def whole(self, halved: Tensor) -> Tensor:
        return halved.to(self.shape.dtype) / self.scale


class HalvedCache(LayerCache):
    format: Halved

    def append_and_attend(
        self, queries: Tensor, key: Tensor, value: Tensor, *, num_appended: int, scaling: float
    ) -> Tensor:
        self.regions["keys"][:, num_appended] = key
        self.regions["values"][:, num_appended] = value
        keys, values = (
            torch.cat(
                [
                    self.format.whole(self.regions[f"half_{name}"]),
                    self.regions[name][:, : num_appended + 1],
                ],
                1,
            )
            for name in ("keys", "values")
        )
        return dense_decode(queries, keys, values, scaling=scaling)


class NaiveHalved(NaiveLayer):
    def __init__(self, fmt: Halved, keys: Tensor, values: Tensor) -> None:
        self._prompt = fmt.whole(keys), fmt.whole(values)

    def attend(
        self, queries: Tensor, key: Tensor, value: Tensor, *, scaling: float, dense: bool = False
    ) -> Tensor:
        new = self.appended(key, value)
        keys, values = (torch.cat(pair, 1) for pair in zip(self._prompt, new, strict=True))
        return dense_decode(queries, keys, values, scaling=scaling)


class FromTheEnd:
    """Scores by position, at the right distance to the end. No queries are looked at."""

    observed_queries = 0
    protected_rows = 0
    depends_on_rows = False
    scores_heads_apart = True

    def __call__(self, inputs: LayerInputs) -> Tensor:
        num_kv_heads, num_tokens, _ = inputs.keys.shape
        return (torch.arange(num_tokens) * 7 % num_tokens).float().expand(num_kv_heads, -1)


HALF_PRECISION = Method(
    plan=CompressionPlan(
        method="half-precision",
        scorer=Part(name="from_the_end"),
        representation=Part(name="halved", params={"scale": 0.5}),
        budget=Budget(tokens=20),
    ),
    scorer=lambda params, rows: FromTheEnd(),
    format=Halved,
)
ALSO = Method(
    plan=CompressionPlan(method="also", representation=HALF_PRECISION.plan.representation),
    format=type("Other", (Halved,), {}),
)
SHADOW = Method(
    plan=CompressionPlan(method="shadow", representation=Part(name="kivi", params={"bits": 4})),
    format=Halved,
)
