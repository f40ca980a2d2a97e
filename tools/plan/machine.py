"""Machines that a plan may be for: GPUs by their makers' public figures, and machines that `kvferry calibrate
machine` has measured.

The times of a GPU are modelled: how many operations and bytes a pass takes, over what the GPU can do, times
an assumed efficiency. Those of a measured machine come from a fit to its own measurements, for one model.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.shared.compression.plan import CompressionPlan
from kvferry.shared.errors import ConfigurationError

if TYPE_CHECKING:
    from kvferry.shared.model.spec import DTypeName
    from kvferry.tools.plan.model import ModelCost
    from kvferry.tools.plan.sizes import Sizes


class Machine(ABC):
    """How long a worker takes, in seconds."""

    name: str
    memory_bytes: int
    dtype: DTypeName | None = None
    """In which the machine was measured; None: any."""
    wire_s_per_byte: float = 0.0
    """CPU time of the slower end of a transfer, which bounds its speed; 0: in `handover_s`."""

    @property
    @abstractmethod
    def is_modelled(self) -> bool:
        """True if times are computed from public figures rather than measured."""

    @abstractmethod
    def check(self, model: ModelCost, method: str) -> None:
        """Check the machine. Raises: ConfigurationError: it has no times for this model or method."""

    @abstractmethod
    def prefill_s(self, model: ModelCost, num_tokens: int) -> float:
        """Return the time of one prompt's pass without compression, and of a request's other work."""

    @abstractmethod
    def compress_s(self, plan: CompressionPlan, sizes: Sizes, num_tokens: int) -> float:
        """Return the time of one prompt's compression."""

    @abstractmethod
    def handover_s(self, plan: CompressionPlan, sizes: Sizes) -> float:
        """Return the time from the first token to decode's first step, without the time on the link."""

    @abstractmethod
    def step_s(self, model: ModelCost, plan: CompressionPlan, sizes: Sizes, batch: float) -> float:
        """Return the time of one decode step of this many sequences."""


WIRE_S_PER_BYTE = 0.2e-9
"""Measured over TCP by `benchmarks/links.py`: 40 Gbit/s, however fast the link is."""


@dataclass(frozen=True, kw_only=True)
class Gpu(Machine):
    """A GPU.

    Attributes:
        flops: dense operations a second in 16 bits, without sparsity.
        bandwidth: of its memory, bytes a second.
    """

    name: str
    memory_bytes: int
    flops: float
    bandwidth: float
    wire_s_per_byte: float = WIRE_S_PER_BYTE

    @property
    def is_modelled(self) -> bool:
        return True

    def check(self, model: ModelCost, method: str) -> None:
        if model.weights_bytes > USABLE_MEMORY * self.memory_bytes:
            raise ConfigurationError(
                f"--machine is {self.name!r} with {self.memory_bytes / 1e9:.0f} GB; the weights of "
                f"{model.spec.name} take {model.weights_bytes / 1e9:.0f} GB, and one worker runs on one GPU"
            )

    def prefill_s(self, model: ModelCost, num_tokens: int) -> float:
        compute_s = model.prefill_flops(num_tokens) / (PREFILL_EFFICIENCY * self.flops)
        return REQUEST_OVERHEAD_S + max(compute_s, self._read_s(model.weights_bytes))

    def compress_s(self, plan: CompressionPlan, sizes: Sizes, num_tokens: int) -> float:
        if sizes.method == "full":
            return 0.0
        passes = SCORING_PASSES * (plan.scorer is not None) + PACKING_PASSES * (
            plan.representation.name != "rows"
        )
        return self._read_s(passes * sizes.full)

    def handover_s(self, plan: CompressionPlan, sizes: Sizes) -> float:
        return REQUEST_OVERHEAD_S

    def step_s(self, model: ModelCost, plan: CompressionPlan, sizes: Sizes, batch: float) -> float:
        compute_s = 2.0 * model.num_active * batch / (PREFILL_EFFICIENCY * self.flops)
        # The larger the batch, the more experts of a mixture it uses.
        weights = min(model.num_parameters, model.num_active * max(1.0, batch)) / model.num_parameters
        read_s = self._read_s(weights * model.weights_bytes + batch * sizes.read)
        return STEP_OVERHEAD_S + max(compute_s, read_s)

    def _read_s(self, size_bytes: float) -> float:
        return size_bytes / (READ_EFFICIENCY * self.bandwidth)


PREFILL_EFFICIENCY = 0.5
"""Assumed: the share of a GPU's operations that a long prompt's pass reaches."""
READ_EFFICIENCY = 0.75
"""Assumed: the share of a memory's bandwidth that a decode step reaches."""
STEP_OVERHEAD_S = 0.0005
REQUEST_OVERHEAD_S = 0.005
"""Assumed: the host's work a step, and a request at each worker."""
SCORING_PASSES, PACKING_PASSES = 2, 4
"""Assumed: how often compression reads or writes the prompt's full KV."""
USABLE_MEMORY = 0.9

_TERA, _GIGA = 1e12, 1e9
GPUS: Mapping[str, Gpu] = {
    name: Gpu(
        name=name, memory_bytes=round(memory * _GIGA), flops=tflops * _TERA, bandwidth=gigabytes * _GIGA
    )
    for name, memory, tflops, gigabytes in (
        # name, memory in GB, dense 16-bit TFLOPS, memory bandwidth in GB/s: from the makers' data sheets
        ("L4", 24, 121, 300),
        ("A10", 24, 125, 600),
        ("RTX-4090", 24, 165, 1008),
        ("L40S", 48, 362, 864),
        ("A100-40GB", 40, 312, 1555),
        ("A100-80GB", 80, 312, 2039),
        ("H100-PCIe", 80, 756, 2000),
        ("H100-SXM", 80, 989, 3350),
        ("H200", 141, 989, 4800),
        ("B200", 180, 2250, 7700),
        ("MI300X", 192, 1307, 5300),
    )
}


@dataclass(frozen=True, kw_only=True)
class MethodTimes:
    """Coefficients of one method on one machine.

    Attributes:
        compress: seconds a prompt, and a token of it.
        handover: seconds a request, and a shipped byte.
        step: seconds a step, a sequence in it, and a byte that it reads.
    """

    compress: tuple[float, float]
    handover: tuple[float, float]
    step: tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class MeasuredMachine(Machine):
    """A machine that was measured with one model.

    Attributes:
        prefill: seconds a prompt, a token of it, and a pair of tokens.
        methods: by name.
    """

    name: str
    memory_bytes: int
    model: str
    dtype: DTypeName
    prefill: tuple[float, float, float]
    methods: Mapping[str, MethodTimes]

    @property
    def is_modelled(self) -> bool:
        return False

    def check(self, model: ModelCost, method: str) -> None:
        if model.spec.name != self.model:
            raise ConfigurationError(
                f"--machine {self.name!r} was measured with the model {self.model!r}, and the plan's is "
                f"{model.spec.name!r}; measure it with kvferry calibrate machine"
            )
        if method not in self.methods:
            raise ConfigurationError(
                f"--machine {self.name!r} was measured with methods {', '.join(self.methods)}, not {method!r}"
            )

    def prefill_s(self, model: ModelCost, num_tokens: int) -> float:
        fixed, linear, quadratic = self.prefill
        return fixed + linear * num_tokens + quadratic * num_tokens**2

    def compress_s(self, plan: CompressionPlan, sizes: Sizes, num_tokens: int) -> float:
        if sizes.method == "full":
            return 0.0
        fixed, linear = self.methods[plan.method].compress
        return fixed + linear * num_tokens

    def handover_s(self, plan: CompressionPlan, sizes: Sizes) -> float:
        fixed, per_byte = self.methods[plan.method].handover
        return fixed + per_byte * sizes.shipped

    def step_s(self, model: ModelCost, plan: CompressionPlan, sizes: Sizes, batch: float) -> float:
        fixed, per_sequence, per_byte = self.methods[plan.method].step
        return fixed + batch * (per_sequence + per_byte * sizes.read)

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def find_machine(name: str) -> Machine:
    """Find a GPU of the table, or read a file of `kvferry calibrate machine`.

    Raises: ConfigurationError: there is none of that name.
    """
    if name in GPUS:
        return GPUS[name]
    path = Path(name)
    if not path.is_file():
        known = ", ".join(GPUS)
        raise ConfigurationError(
            f"--machine is {name!r}; it must be one of {known}, or a file of kvferry calibrate machine"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))["machine"]
        methods = {
            method: MethodTimes(**{part: tuple(values) for part, values in times.items()})
            for method, times in content.pop("methods").items()
        }
        content["prefill"] = tuple(content["prefill"])
        return MeasuredMachine(**content, methods=methods)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{path} is no file of kvferry calibrate machine: {error}") from error
