"""A decode step's modelled time: bytes it reads over what a GPU's memory can do, and its launches.

    time = (weights + what each kernel moves / share that it can ask for) / (0.9 x bandwidth)
           + launches x 2 us

Launches are counted: the step's own code runs over a tiny model, and each Triton kernel and each operator
that is not a view is one. What a kernel moves is counted, too (`kernel_counts.py`). The share of the
bandwidth that it can ask for follows from its registers and shared memory in the table of compiled kernels.
Needs no GPU; every number is modelled, and none is a measurement.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from chips import (
    CHIPS,
    LATENCY_S,
    LAUNCH_S,
    REACHABLE,
    RESULTS,
    Chip,
    asked_share,
    chip_of,
    compiled_row,
    occupancy,
)
from decode_cases import methods_of
from kernel_times import KIVI_BITS, KernelTimes
from kernel_times import add_modelled as add_modelled_kernels
from mixed_batch import mixed_rows
from shapes import SHAPES, TINY_SHAPES
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from kvferry.kernels import dispatch
from kvferry.kernels.case import OpCheck
from kvferry.kernels.cases import op_checks
from kvferry.kernels.decode_batch import BatchShape
from kvferry.kernels.dense_decode.triton_kernel import MIN_SPLIT_BYTES
from kvferry.kernels.kivi.rows import GROUP_TOKENS
from kvferry.shared.model.spec import ModelSpec
from kvferry.tools.kernel_cache.random_model import random_model
from kvferry.tools.kernel_cache.shapes import Shape

STORED = RESULTS / "roofline.json"
CONTEXTS = ((1, 8192), (1, 32768), (1, 131072), (8, 8192), (8, 32768), (7, 131072), (32, 8192))
"""Batch and prompt tokens; some do not fit on every GPU."""
WINDOWS = (128, 1024, 4096)
"""Rows that a layer of gpt-oss, Gemma 3 and Mistral reads."""
NEW_TOKENS = 256
_OPS = {"full": "dense_decode", "rocketkv": "hsa", "rdkv": "trizone"}
_STREAMS = {
    "full": "_dense_decode_kernel", "rocketkv": "_gather_attend_kernel", "rdkv": "_trizone_kernel",
}  # fmt: skip
"""The attention kernel that reads most of a method's bytes."""
_VIEWS = ("aten::empty", "aten::new_empty", "aten::detach", "aten::_unsafe_view", "aten::lift_fresh")


class _Operators(TorchDispatchMode):
    """Counts operators that are not views."""

    def __init__(self, launches: Counter[str]) -> None:
        super().__init__()
        self._launches = launches

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name
        if not function.is_view and not name.startswith(_VIEWS):
            self._launches[name] += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def counted(*, operators: bool) -> Iterator[Counter[str]]:
    """Count launches; Triton kernels do not run. Args: operators: whether torch's are counted, too."""
    launches: Counter[str] = Counter()
    run = InterpretedFunction.run

    def count(kernel: Any, *_: Any, **__: Any) -> None:
        launches[kernel.fn.__name__] += 1

    InterpretedFunction.run = count
    try:
        if operators:
            with _Operators(launches):
                yield launches
        else:
            yield launches
    finally:
        InterpretedFunction.run = run


_COUNTED = BatchShape(
    num_layers=1, num_slots=3, num_kv_heads=2, group_size=2, head_dim=16, dtype=torch.float32,
    device=torch.device("cpu"),
)  # fmt: skip


def attention_launches(method: str) -> Counter[str]:
    """Of one layer and step of a batch, by kernel."""
    return _launches_of([check for check in op_checks(_OPS[method], _COUNTED) if "NaN" not in check.name][-1])


def _launches_of(case: OpCheck) -> Counter[str]:
    with counted(operators=False) as launches:
        case.launch()
    # two steps
    return Counter({name: count // 2 for name, count in launches.items()})


def model_launches(shape: Shape) -> tuple[int, int]:
    """Launches of a model beside attention's: of one layer, and of all that is once a step but sampling."""
    tiny = next(candidate for candidate in TINY_SHAPES if candidate.model_type == shape.model_type)

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: object) -> Tensor:
        return queries

    totals = []
    token_ids = torch.arange(3, 12)
    for num_layers in (2, 3):
        model = random_model(replace(tiny, num_layers=num_layers), torch.device("cpu"), max_model_len=64)
        assert model._fused is not None
        model._fused.join_products()  # as on a GPU
        with torch.no_grad():
            model._fused.run(token_ids, token_ids, attend)  # the self-test
            with counted(operators=True) as launches:
                model._fused.run(token_ids, token_ids, attend)
        totals.append(launches.total())
    per_layer = totals[1] - totals[0]
    return per_layer, totals[0] - 2 * per_layer


def weights_bytes(shape: Shape) -> int:
    """Read by each step, in 16 bits: all but the embedding table."""
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    attention = shape.hidden_size * (heads + shape.num_heads * shape.head_dim)
    layer = attention + 3 * shape.hidden_size * shape.intermediate_size
    return 2 * (shape.num_layers * layer + shape.hidden_size * shape.vocab_size)


def spec_of(shape: Shape) -> ModelSpec:
    return ModelSpec(
        name=shape.name, fingerprint="", num_layers=shape.num_layers, num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, vocab_size=shape.vocab_size,
        max_model_len=1 << 20, dtype=shape.dtype, eos_token_ids=(),
    )  # fmt: skip


class Roofline:
    """The model of one model's steps."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.spec = shape, spec_of(shape)
        self.per_layer, self.once = model_launches(shape)
        self.attention = {method: attention_launches(method) for method in _OPS}
        self.windows = window_launches()
        methods = {candidate.name: candidate for candidate in methods_of(512) if candidate.name in _OPS}
        self.times = KernelTimes(shape, self.spec, methods, CONTEXTS, NEW_TOKENS)

    def step(self, chip: Chip, method: str, batch: int, context: int) -> dict[str, Any]:
        """One row."""
        kernels = self.times.attention(method, batch, context)
        beside = self.times.beside(batch)
        layers, launches_of = self.shape.num_layers, self.attention[method]
        assert launches_of == {kernel.kernel: kernel.launches for kernel in kernels}, (
            "each kernel was counted"
        )
        launches = layers * (self.per_layer + launches_of.total()) + self.once
        weights = weights_bytes(self.shape)
        memory_s = weights / (REACHABLE * chip.bandwidth)
        memory_s += layers * sum(kernel.memory_s(chip, self.shape) for kernel in (*kernels, *beside))
        return {
            "gpu": chip.name,
            "method": method,
            "batch": batch,
            "context": context,
            "moved_bytes": round(weights + layers * sum(kernel.size_bytes for kernel in (*kernels, *beside))),
            "launches": launches,
            "modelled_ms": 1e3 * (memory_s + LAUNCH_S * launches),
        }


def roofline() -> dict[str, Any]:
    """Everything for Llama-3.1-8B at the audit's shapes."""
    dispatch.configure("triton", torch.device("cpu"))
    try:
        model = Roofline(SHAPES[0])
    finally:
        dispatch.configure("auto", torch.device("cpu"))
    steps = [
        model.step(chip, method, batch, context)
        for chip in CHIPS
        for batch, context in CONTEXTS
        for method in _OPS
    ]
    full = {(step["gpu"], step["batch"], step["context"]): step for step in steps if step["method"] == "full"}
    for step in steps:
        step["modelled_speedup"] = (
            full[step["gpu"], step["batch"], step["context"]]["modelled_ms"] / step["modelled_ms"]
        )
    occupancies = [
        {
            "gpu": chip.name,
            "kernel": kernel,
            "programs_per_sm": occupancy(chip, compiled_row(kernel, chip.arch, SHAPES[0])),
            "asked_share": asked_share(chip, compiled_row(kernel, chip.arch, SHAPES[0])),
        }
        for chip in CHIPS
        for kernel in _STREAMS.values()
    ]
    return {
        "label": "modelled, not measured",
        "model": SHAPES[0].name,
        "launches": {
            "layer": model.per_layer,
            "once": model.once,
            "attention": {method: dict(launches) for method, launches in model.attention.items()},
        },
        "occupancy": occupancies,
        "window_layers": [row for chip in CHIPS for row in _windows(chip, model)],
        "mixed_batches": [row for chip in CHIPS for row in _mixed(chip, SHAPES[0])],
        "steps": steps,
        "kernel_times": list(model.times.rows()),
        "counts": [count.row() for count in model.times.counts.counts],
    }


def window_launches() -> int:
    """Of one layer with a window, capped logits or sinks, and one step of a batch."""
    shape = replace(_COUNTED, has_windows=True, has_plain_softmax=False)
    cases = [check for check in op_checks("dense_decode", shape) if check.name.startswith("windows")]
    launches = {_launches_of(case).total() for case in cases}
    (number,) = launches
    return number


def _windows(chip: Chip, model: Roofline) -> Iterator[dict[str, Any]]:
    """Dense decode's attention of one layer that reads a window, and of one that reads all rows."""
    batch, context, shape = 32, 131072, model.shape
    row = compiled_row(_STREAMS["full"], chip.arch, shape)

    def modelled_us(num_rows: int) -> float:
        size_bytes = batch * shape.num_kv_heads * model.times.window_bytes(num_rows)
        read_s = size_bytes / asked_share(chip, row) / (REACHABLE * chip.bandwidth)
        return 1e6 * (read_s + LAUNCH_S * model.windows)

    for window in WINDOWS:
        yield {
            "gpu": chip.name,
            "batch": batch,
            "context": context,
            "window": window,
            "window_modelled_us": modelled_us(window),
            "all_rows_modelled_us": modelled_us(context),
        }


def _mixed(chip: Chip, shape: Shape) -> Iterator[dict[str, Any]]:
    """Rows of `mixed_batch.py`: of dense decode, and of KIVI's at 4 bits."""
    token_bytes = 4 * shape.head_dim
    dense = compiled_row(_STREAMS["full"], chip.arch, shape)
    block_tokens = 64 if dense["shared_bytes"] > 128 * token_bytes else 32
    row_bytes = block_tokens * token_bytes
    # a group a tile, with a scale and a minimum for each of K's channels and V's tokens
    code_bytes = GROUP_TOKENS * shape.head_dim * KIVI_BITS // 4
    coded_bytes = code_bytes + 4 * (shape.head_dim + GROUP_TOKENS)
    kivi = compiled_row("_kivi_decode_kernel", chip.arch, shape, special=f"{KIVI_BITS} bits")
    for row, tokens, tile_bytes, in_flight, min_tiles in (
        (dense, block_tokens, row_bytes, dense["shared_bytes"] // 2, MIN_SPLIT_BYTES // row_bytes),
        # a tile is asked for while the one before is computed
        (kivi, GROUP_TOKENS, coded_bytes, code_bytes, MIN_SPLIT_BYTES // code_bytes),
    ):
        yield from mixed_rows(
            chip.name, row["kernel"], num_sms=chip.num_sms, per_sm=occupancy(chip, row), in_flight=in_flight,
            latency_s=LATENCY_S, bandwidth=REACHABLE * chip.bandwidth, num_kv_heads=shape.num_kv_heads,
            block_tokens=tokens, tile_bytes=tile_bytes, min_tiles=max(min_tiles, 1),
        )  # fmt: skip


def add_modelled(result: dict[str, Any]) -> None:
    """Put the stored model's times beside measured kernels, and beside measured steps of the same size."""
    stored, device_name = json.loads(STORED.read_text()), result["device"]
    add_modelled_kernels(result.get("kernels", []), stored["counts"], device_name, SHAPES[0])
    chip = chip_of(device_name)
    modelled = {
        (step["gpu"], step["method"], step["batch"], step["context"]): step["modelled_ms"]
        for step in stored["steps"]
    }
    for row in result.get("decode", []):
        if row.get("model") == stored["model"]:
            row["modelled_ms"] = modelled.get(
                (chip and chip.name, row["method"], row["batch"], row["context"])
            )
