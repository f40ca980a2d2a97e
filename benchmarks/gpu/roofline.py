"""A decode step's modelled time: bytes it reads over what a GPU's memory can do, and its launches.

    time = (weights + what attention reads / share that its kernel can ask for) / (0.9 x bandwidth)
           + launches x 2 us

Launches are counted: the step's own code runs over a tiny model, and each Triton kernel and each operator
that is not a view is one. Bytes are those that the formats count (`kvferry plan`). The share of the bandwidth
that an attention kernel can ask for follows from its registers and shared memory in the table of compiled
kernels. Needs no GPU; every number is modelled, and none is a measurement.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from decode_cases import Method, methods_of
from mixed_batch import mixed_rows
from shapes import SHAPES, TINY_SHAPES
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from kvferry.kernels import dispatch
from kvferry.kernels.decode_batch import BatchShape
from kvferry.kernels.dense_decode.triton_kernel import MIN_SPLIT_BYTES
from kvferry.kernels.kivi.rows import GROUP_TOKENS
from kvferry.kernels.op_checks import OpCheck, op_checks
from kvferry.shared.costs.machine import GPUS
from kvferry.shared.costs.sizes import sizes_of
from kvferry.shared.model.spec import ModelSpec
from kvferry.tools.kernel_cache.random_model import random_model
from kvferry.tools.kernel_cache.shapes import Shape

_RESULTS = Path(__file__).parents[1] / "results" / "kernels"
COMPILED = (_RESULTS / "compile.json", _RESULTS / "compile-others.json")
STORED = _RESULTS / "roofline.json"
REACHABLE = 0.9
"""The share of a memory's bandwidth that a kernel reaches at best, assumed."""
LAUNCH_S = 2e-6
"""A kernel in a CUDA graph, beside its bytes; assumed."""
LATENCY_S = 600e-9
"""Of a memory's first byte: what must be in flight is the bandwidth times this."""
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
_KIVI_BITS = 4
_VIEWS = ("aten::empty", "aten::detach", "aten::_unsafe_view", "aten::lift_fresh")


@dataclass(frozen=True, kw_only=True)
class Chip:
    """What the model knows of a GPU beside its bandwidth. Attributes: arch: whose compiled code counts;
    registers, shared_bytes: of one multiprocessor."""

    name: str
    num_sms: int
    arch: str
    shared_bytes: int
    registers: int = 65536
    threads: int = 2048

    @property
    def short_name(self) -> str:
        """As a part of the driver's name of the device."""
        return "4090" if self.name == "RTX-4090" else self.name.partition("-")[0]

    @property
    def bandwidth(self) -> float:
        return GPUS[self.name].bandwidth


CHIPS = (
    Chip(name="H100-SXM", num_sms=132, arch="sm_90", shared_bytes=228 << 10),
    Chip(name="H200", num_sms=132, arch="sm_90", shared_bytes=228 << 10),
    Chip(name="A100-80GB", num_sms=108, arch="sm_80", shared_bytes=164 << 10),
    Chip(name="L4", num_sms=58, arch="sm_89", shared_bytes=100 << 10, threads=1536),
    Chip(name="RTX-4090", num_sms=128, arch="sm_89", shared_bytes=100 << 10, threads=1536),
)


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
    return _launches_of([its for its in op_checks(_OPS[method], _COUNTED) if "NaN" not in its.name][-1])


def _launches_of(case: OpCheck) -> Counter[str]:
    with counted(operators=False) as launches:
        case.launch()
    # two steps
    return Counter({name: count // 2 for name, count in launches.items()})


def model_launches(shape: Shape) -> tuple[int, int]:
    """Launches of a model beside attention's: of one layer, and of all that is once a step but sampling."""
    tiny = next(its for its in TINY_SHAPES if its.model_type == shape.model_type)

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: object) -> Tensor:
        return queries

    totals = []
    for num_layers in (2, 3):
        model = random_model(replace(tiny, num_layers=num_layers), torch.device("cpu"), max_model_len=64)
        with torch.no_grad(), counted(operators=True) as launches:
            model.decode(torch.tensor([3, 4]), torch.tensor([1, 2]), attention=attend)
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


def occupancy(chip: Chip, row: dict[str, Any]) -> int:
    """Programs of a compiled kernel that are on one multiprocessor at a time."""
    threads = 32 * row["num_warps"]
    by_registers = chip.registers // (max(row["registers"], 1) * threads)
    by_shared = chip.shared_bytes // max(row["shared_bytes"] + 1024, 1)
    return max(min(by_registers, by_shared, chip.threads // threads), 0)


def asked_share(chip: Chip, row: dict[str, Any]) -> float:
    """The share of the bandwidth that a kernel can ask for: its programs have half of their shared memory in
    flight, or 64 bytes a thread."""
    in_flight = max(row["shared_bytes"] // 2, 64 * 32 * row["num_warps"])
    needed = chip.bandwidth / chip.num_sms * LATENCY_S
    return min(1.0, occupancy(chip, row) * in_flight / needed)


def compiled_row(kernel: str, arch: str, shape: Shape, *, special: str = "") -> dict[str, Any]:
    rows = [row for path in COMPILED for row in json.loads(path.read_text())["kernels"]]
    wanted = (kernel, arch, shape.name, special)
    row: dict[str, Any] = next(
        its for its in rows if (its["kernel"], its["arch"], its["model"], its.get("special", "")) == wanted
    )
    return row


class Roofline:
    """The model of one model's steps."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.per_layer, self.once = model_launches(shape)
        self.attention = {method: attention_launches(method) for method in _OPS}
        self.windows = window_launches()

    def step(self, chip: Chip, method: Method, batch: int, context: int) -> dict[str, Any]:
        """One row."""
        read = sizes_of(
            spec_of(self.shape), method.plan(), num_prompt_tokens=context, max_new_tokens=NEW_TOKENS
        ).read
        row = compiled_row(_STREAMS[method.name], chip.arch, self.shape)
        launches = self.shape.num_layers * (self.per_layer + self.attention[method.name].total()) + self.once
        size_bytes = weights_bytes(self.shape) + batch * read / asked_share(chip, row)
        return {
            "gpu": chip.name,
            "method": method.name,
            "batch": batch,
            "context": context,
            "read_bytes": weights_bytes(self.shape) + batch * read,
            "launches": launches,
            "modelled_ms": 1e3 * (size_bytes / (REACHABLE * chip.bandwidth) + LAUNCH_S * launches),
        }


def roofline() -> dict[str, Any]:
    """Everything for Llama-3.1-8B at the audit's shapes."""
    dispatch.configure("triton", torch.device("cpu"))
    try:
        model = Roofline(SHAPES[0])
    finally:
        dispatch.configure("auto", torch.device("cpu"))
    methods = [its for its in methods_of(512) if its.name in _OPS]
    steps = [
        model.step(chip, method, batch, context)
        for chip in CHIPS
        for batch, context in CONTEXTS
        for method in methods
    ]
    full = {(its["gpu"], its["batch"], its["context"]): its for its in steps if its["method"] == "full"}
    for its in steps:
        its["modelled_speedup"] = (
            full[its["gpu"], its["batch"], its["context"]]["modelled_ms"] / its["modelled_ms"]
        )
    kernels = [
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
            "attention": {method: dict(its) for method, its in model.attention.items()},
        },
        "kernels": kernels,
        "window_layers": [its for chip in CHIPS for its in _windows(chip, model)],
        "mixed_batches": [its for chip in CHIPS for its in _mixed(chip, SHAPES[0])],
        "steps": steps,
    }


def window_launches() -> int:
    """Of one layer with a window, capped logits or sinks, and one step of a batch."""
    shape = replace(_COUNTED, has_windows=True, has_plain_softmax=False)
    cases = [its for its in op_checks("dense_decode", shape) if its.name.startswith("windows")]
    launches = {_launches_of(case).total() for case in cases}
    (number,) = launches
    return number


def _windows(chip: Chip, model: Roofline) -> Iterator[dict[str, Any]]:
    """Dense decode's attention of one layer that reads a window, and of one that reads all rows."""
    batch, context, shape = 32, 131072, model.shape
    row = compiled_row(_STREAMS["full"], chip.arch, shape)

    def modelled_us(num_rows: int) -> float:
        size_bytes = batch * num_rows * 4 * shape.num_kv_heads * shape.head_dim
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
    code_bytes = GROUP_TOKENS * shape.head_dim * _KIVI_BITS // 4
    coded_bytes = code_bytes + 8 * (shape.head_dim + GROUP_TOKENS)
    kivi = compiled_row("_kivi_decode_kernel", chip.arch, shape, special=f"{_KIVI_BITS} bits")
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


def add_modelled(rows: list[dict[str, Any]], device_name: str) -> None:
    """Put the stored model's time beside measured rows of the same step."""
    chip = next((its.name for its in CHIPS if its.short_name in device_name), None)
    stored = json.loads(STORED.read_text())
    modelled = {
        (its["gpu"], its["method"], its["batch"], its["context"]): its["modelled_ms"]
        for its in stored["steps"]
    }
    for row in rows:
        if row.get("model") == stored["model"]:
            row["modelled_ms"] = modelled.get((chip, row["method"], row["batch"], row["context"]))
