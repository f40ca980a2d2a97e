"""What drawing a token takes with top_p and top_k, by vocabulary, and by how many tokens may be drawn.

    python benchmarks/top_p.py [--repeats 9] [--output FILE]

Peaked logits are as a trained model's, flat ones as at a high temperature. `draw_ms` is the median of one
step's draw on the CPU in one thread; `operators` counts torch's operators that are not views, and `ordered`
is the most weights of a row that one of them puts in order. No model runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvferry.shared.sampling.params import SamplingParams
from kvferry.shared.sampling.sampler import Flavour, draw, numbers_of

VOCABULARIES = (32768, 131072, 262144)
LOGITS = {"peaked": 6.0, "flat": 0.5}
"""Standard deviations."""
SAMPLING = {
    "temperature": {},
    "top_p 0.95": {"top_p": 0.95},
    "top_p 0.999": {"top_p": 0.999},
    "top_k 40": {"top_k": 40},
}
BATCHES = (1, 8)


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.ordered = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name
        if not function.is_view:
            self.counts[name] += 1
        if name in ("aten::topk", "aten::sort"):
            self.ordered = max(self.ordered, result[0].shape[-1])
        return result


def measured(logits: Tensor, sampling: dict[str, Any], repeats: int) -> dict[str, Any]:
    """One row's numbers."""
    batch = [SamplingParams(max_tokens=1, **sampling)] * len(logits)
    numbers, flavour = numbers_of(batch), Flavour.of(batch)
    uniforms = torch.linspace(0.05, 0.95, len(logits), dtype=torch.float64)

    def run() -> Tensor:
        return draw(logits, numbers, uniforms, flavour)

    with _Operators() as operators:
        run()
    times = []
    for _ in range(repeats):
        begin_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin_s)
    return {
        "draw_ms": 1e3 * statistics.median(times),
        "operators": operators.counts.total(),
        "ordered": operators.ordered,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--vocabularies", type=int, nargs="*", default=VOCABULARIES)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    for size in arguments.vocabularies:
        for kind, deviation in LOGITS.items():
            generator = torch.Generator().manual_seed(size)
            logits = torch.randn(max(BATCHES), size, generator=generator).double() * deviation
            for batch in BATCHES:
                for name, sampling in SAMPLING.items():
                    row = measured(logits[:batch], sampling, arguments.repeats)
                    result[f"{size} {kind} batch {batch} {name}"] = row
                    sys.stdout.write(
                        f"{size:7} {kind:6} batch {batch} {name:11}  {row['draw_ms']:8.2f} ms  "
                        f"{row['operators']:3} operators  {row['ordered']:6} in order\n"
                    )
    if arguments.output:
        rows = ",\n".join(f" {json.dumps(name)}: {json.dumps(row)}" for name, row in result.items())
        arguments.output.write_text("{\n" + rows + "\n}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
