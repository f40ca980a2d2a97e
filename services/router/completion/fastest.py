"""The method `auto`: the fastest that has the wanted quality, by the times that `kvferry plan` predicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvferry.shared.compression.applicable import applicable_methods
from kvferry.shared.compression.plan import CompressionPlan
from kvferry.shared.costs.machine import MeasuredMachine, find_machine
from kvferry.shared.costs.model import ModelCost
from kvferry.shared.costs.request import RequestTimes, request_times
from kvferry.shared.errors import ConfigurationError, InvalidRequest
from kvferry.shared.model.spec import ModelSpec

_LINK_LATENCY_S = 0.0002
_BITS_PER_BYTE = 8


class FastestMethod:
    """Chooses by one measured machine's times.

    Args: machine: file of `kvferry calibrate machine`; link_gbits: between prefill and decode.
    Raises: ConfigurationError: there is no such file.
    """

    def __init__(self, machine: str, link_gbits: float) -> None:
        found = find_machine(machine)
        if not isinstance(found, MeasuredMachine):
            raise ConfigurationError(
                f"--machine is {machine!r}; a router needs a file of kvferry calibrate machine"
            )
        self._machine = found
        self._link_bytes_per_s = link_gbits * 1e9 / _BITS_PER_BYTE

    def methods(self, allowed: Sequence[str], model: ModelSpec) -> list[str]:
        """Those of the allowed methods whose times on this model are known.

        Raises: InvalidRequest: no method has times.
        """
        machine = self._machine
        if machine.model != model.name:
            raise InvalidRequest(
                f"kv_compression.method is 'auto'; this server's times were measured with the model "
                f"{machine.model!r}, and it serves {model.name!r}",
                param="kv_compression.method",
            )
        fitting = applicable_methods(model.layers)
        return [name for name in allowed if name in fitting and name in machine.methods]

    def choose(
        self, plans: Iterable[CompressionPlan], model: ModelSpec, *, prompt_tokens: int, answer_tokens: int
    ) -> tuple[CompressionPlan, str]:
        """The plan with which a request takes the least time, and why."""
        times = [(plan, self._times(plan, model, prompt_tokens, answer_tokens)) for plan in plans]
        best, its = min(times, key=lambda found: found[1].total_s)
        others = ", ".join(
            f"{other.total_s:.3g} s with {plan.method}" for plan, other in times if plan is not best
        )
        return best, (
            f"auto: method {best.method} has the least predicted time, {its.total_s:.3g} s for a prompt of "
            f"{prompt_tokens} and an answer of {answer_tokens} tokens; {others or 'no other is allowed'}"
        )

    def _times(
        self, plan: CompressionPlan, model: ModelSpec, prompt_tokens: int, answer_tokens: int
    ) -> RequestTimes:
        return request_times(
            self._machine,
            # A measured machine's times do not depend on numbers of parameters.
            ModelCost(spec=model, num_parameters=0, num_active=0),
            plan,
            prompt_tokens=prompt_tokens,
            answer_tokens=answer_tokens,
            link_bytes_per_s=self._link_bytes_per_s,
            link_latency_s=_LINK_LATENCY_S,
        )
