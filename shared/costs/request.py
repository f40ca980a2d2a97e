"""How long one request takes with one method, on a prefill and a decode worker that do nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.shared.compression.plan import CompressionPlan
from kvferry.shared.costs.machine import Machine
from kvferry.shared.costs.model import ModelCost
from kvferry.shared.costs.sizes import Sizes, sizes_of


@dataclass(frozen=True, kw_only=True)
class RequestTimes:
    """Of one request alone.

    Attributes:
        answer_tokens: with the first, which comes from prefill.
        prefill_s, compress_s: before the first token.
        transfer_s: from the first token to decode's first step.
        step_s: one decode step.
    """

    sizes: Sizes
    answer_tokens: int
    prefill_s: float
    compress_s: float
    transfer_s: float
    step_s: float

    @property
    def pass_s(self) -> float:
        """How long the prompt keeps a worker busy."""
        return self.prefill_s + self.compress_s

    @property
    def total_s(self) -> float:
        """To the last token."""
        return self.pass_s + after_first_s(self.answer_tokens, self.transfer_s, self.step_s)


def after_first_s(answer_tokens: int, transfer_s: float, step_s: float) -> float:
    """From the first to the last token."""
    further = answer_tokens - 1
    return transfer_s + further * step_s if further else 0.0


def request_times(
    machine: Machine,
    model: ModelCost,
    plan: CompressionPlan,
    *,
    prompt_tokens: int,
    answer_tokens: int,
    link_bytes_per_s: float,
    link_latency_s: float,
) -> RequestTimes:
    """Raises: InvalidRequest, ConfigurationError: the method does not go with the model or the machine."""
    machine.check(model, plan.method)
    sizes = sizes_of(model.spec, plan, num_prompt_tokens=prompt_tokens, max_new_tokens=answer_tokens)
    prefill_s = machine.prefill_s(model, prompt_tokens)
    compress_s = machine.compress_s(plan, sizes, prompt_tokens)
    on_link_s = link_latency_s + sizes.shipped * max(1 / link_bytes_per_s, machine.wire_s_per_byte)
    # Layers are sent while later ones are computed: only what the link cannot keep up with, and the last
    # layer, come after the pass.
    layers = model.spec.num_layers
    overlap_s = (prefill_s + compress_s) * (layers - 1) / layers
    return RequestTimes(
        sizes=sizes,
        answer_tokens=answer_tokens,
        prefill_s=prefill_s,
        compress_s=compress_s,
        transfer_s=machine.handover_s(plan, sizes) + max(on_link_s / layers, on_link_s - overlap_s),
        step_s=machine.step_s(model, plan, sizes, 1.0),
    )
