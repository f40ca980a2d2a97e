"""The demo model's greedy tokens on the device against the CPU's torch path, in the checkpoint's own dtype.

The CPU runs and compresses the prompt and decodes by the one-process oracle; the device decodes by the decode
service's steps, once from the CPU's rows and once from a prompt that it ran and compressed itself, so that a
fault of its steps and one of its prefill are told apart. Where tokens part, the CPU's own logits say whether
the two were as good as equal. Captured steps draw the same tokens as eager ones, always.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from decode_cases import STEP_TIMEOUT_S, path_problems, refuse
from timing import Clock
from torch import Tensor

from kvferry.kernels import dispatch
from kvferry.services.decode.slots import StepRunner
from kvferry.services.decode.step import StepInput
from kvferry.shared.cache.arena import sequence_layout
from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.plan import Budget, CompressionPlan
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.model.bridge import TransformersModel
from kvferry.shared.model.loading import checkpoint_dtype, load_model
from kvferry.shared.sampling.params import SamplingParams
from kvferry.shared.sampling.sampler import SequenceSampler
from kvferry.tools.oracle import Continuation, OneProcessGenerator

PROMPT_TOKENS = 200
BUDGET_TOKENS = 64
Prefill = Literal["cpu", "device"]
PREFILLS: tuple[Prefill, ...] = ("cpu", "device")
TIES = {"float32": 1e-4, "float16": 2e-3}
"""Of the largest logit: how near two logits are that rounding may order either way."""
METHODS = (
    "full", "snapkv", "rocketkv", "rdkv", "compactor", "snapkv-kivi", "compactor-kivi", "rocketkv-kivi",
    "rdkv-hsa", "h2o", "d2o",
)  # fmt: skip
OVERRIDES = {"rdkv": {"rebudget_tokens": 0}}


class TokenComparison:
    """Args: num_tokens: compared for each method after the first, which the prompt's own logits give."""

    def __init__(self, clock: Clock, num_tokens: int) -> None:
        self._clock = clock
        self._num_tokens = num_tokens
        self._dtype = checkpoint_dtype("demo")
        self._cpu = load_model("demo", device="cpu", dtype=self._dtype)
        self._model = load_model("demo", device=clock.device.type, dtype=self._dtype)
        self._prompt = [(i * i + 3 * i) % 90 + 4 for i in range(PROMPT_TOKENS)]
        self._by_cpu: dict[str, tuple[Continuation, Tensor, list[int], list[Tensor]]] = {}

    @torch.inference_mode()
    def compare(self, method: str, prefill: Prefill) -> dict[str, Any]:
        """One row: the tokens of both, and the gap between their logits where they part first.

        Args: prefill: whose rows the device decodes from.
        """
        plan = plan_for(method, budget=None if method == "full" else Budget(tokens=BUDGET_TOKENS),
                        overrides=OVERRIDES.get(method, {}))  # fmt: skip
        start, first_logits, expected, logits = self._expected(method, plan)
        row: dict[str, Any] = {"method": method, "prefill": prefill, "dtype": self._dtype}
        if prefill == "device":
            kept = start
            start, first_logits = self._compressed(self._model, plan)
            row["kept_elsewhere"], row["kept"] = _num_kept_elsewhere(kept, start)
        first = int(first_logits.argmax())
        drawn, path = self._by_steps(start, first)
        parted = next(
            (i for i, pair in enumerate(zip(drawn, expected, strict=True)) if pair[0] != pair[1]), None
        )
        row |= {"tokens": drawn, "cpu_tokens": expected, "path": path, "same": parted is None}
        if path == "graph":
            row["same_eagerly"] = self._by_steps(start, first, captures=False)[0] == drawn
        if parted is not None:
            here = logits[parted]
            gap = (here[expected[parted]] - here[drawn[parted]]) / here.abs().max()
            row |= {"parted_at": parted, "gap": float(gap)}
        return row

    def _expected(
        self, method: str, plan: CompressionPlan
    ) -> tuple[Continuation, Tensor, list[int], list[Tensor]]:
        """The CPU's prompt and the logits after it, its tokens and their logits; of one method at a time."""
        if method not in self._by_cpu:
            mode = dispatch.mode()
            dispatch.configure("torch", torch.device("cpu"))
            try:
                start, first_logits = self._compressed(self._cpu, plan)
                self._by_cpu = {method: (start, first_logits, *self._by_oracle(start.fork(), first_logits))}
            finally:
                dispatch.configure(mode, self._clock.device)
        return self._by_cpu[method]

    def _compressed(self, model: TransformersModel, plan: CompressionPlan) -> tuple[Continuation, Tensor]:
        """The prompt as a model's own device runs and compresses it, and the logits after it."""
        oracle = OneProcessGenerator(model)
        captured = oracle.capture(self._prompt)
        start = oracle.compress(captured, plan=plan, max_new_tokens=self._num_tokens + 2)
        assert captured.logits is not None  # only a prefix has none
        return start, captured.logits

    def _by_oracle(self, continuation: Continuation, first: Tensor) -> tuple[list[int], list[Tensor]]:
        logits = [first]
        for _ in range(self._num_tokens):
            logits.append(continuation.step(int(logits[-1].argmax())))
        return [int(each.argmax()) for each in logits], logits

    def _by_steps(self, start: Continuation, first: int, *, captures: bool = True) -> tuple[list[int], str]:
        model, resolved = self._model, start.resolved
        layout = sequence_layout(make_formats(model.spec, resolved))
        arena = torch.zeros(layout.size_bytes, dtype=torch.uint8, device=self._clock.device)
        layers = zip(layout.layers, start.compressed, strict=True)
        caches = tuple(layer.place(arena, tensors) for layer, tensors in layers)
        device = self._clock.step_device(captures=captures)
        runner = StepRunner(model, device, max_batch_size=1, warn=refuse)
        params = SamplingParams(max_tokens=self._num_tokens + 1, temperature=0.0)
        given = StepInput(
            caches=caches,
            num_appended=0,
            token_id=first,
            position=PROMPT_TOKENS,
            num_left=self._num_tokens,
            stop_ids=frozenset(),
            sampler=SequenceSampler(params, (1,), model.spec.vocab_size),
        )
        runner.join(given)
        tokens = [first]
        for _ in range(self._num_tokens):
            flight = runner.launch()
            flight.wait(STEP_TIMEOUT_S)
            for error in flight.errors.values():
                raise error
            tokens.append(flight.drawn()[0][0])
        return tokens, flight.path.name


def problems(row: dict[str, Any]) -> list[str]:
    """Return what is wrong with a row: tokens that part elsewhere than at a tie, or steps not captured."""
    found = []
    if not row["same"] and row["gap"] > TIES[row["dtype"]]:
        found.append(f"tokens part at {row['parted_at']}, logits {row['gap']:.1e} apart")
    if not row.get("same_eagerly", True):
        found.append("captured steps draw other tokens than eager ones")
    return found + path_problems(row)


def _num_kept_elsewhere(one: Continuation, other: Continuation) -> tuple[int, int]:
    """Rows, over layers and KV heads, that the one keeps and the other does not, and all that the one keeps.

    The demo model's first layer looks a few tokens back and gives all others next to nothing: which of those
    fill its budget is decided by rounding, even by how many threads sum.
    """
    pairs = [
        heads
        for a, b in zip(one.compressed, other.compressed, strict=True)
        if "index" in a and a["index"].dim() == 2  # of rows, not of packed bytes
        for heads in zip(a["index"].cpu(), b["index"].cpu(), strict=True)
    ]
    elsewhere = sum(int((~torch.isin(mine, theirs)).sum()) for mine, theirs in pairs)
    return elsewhere, sum(len(mine) for mine, _ in pairs)
