"""When compression pays: times to first and last token over links of 1 to 400 Gbit/s, and the plan's choice.

    python benchmarks/links.py [--gbits 1 10 25 100 400] [--tokens 4096 ...] [--output FOLDER] [--plots]

Bytes are those of Llama-3.1-8B's shape in 16 bits, 4K to 128K tokens, as each method ships them with the
retention that `kvferry plan` gives it. The computation is not run: layers become ready, and decode steps take
as long, as the plan's model of a GPU says (`--machine`). Up to the fastest link that this machine can fill,
the transfer is real: sender, blocks, credits, checksums and receiver over TCP, paced to the link's speed.
A folder's cells of other links and lengths stay, so that links may be measured one after another. Each cell
says how its transfers were found:

    measured   all layers were shipped
    part       so many layers that it took about `--cell-s`; the others take as long as each of the later ones
    modelled   layer by layer from the link's speed and the CPU time a byte of the slower end, measured here

With `--shared-memory` blocks cross a ring in memory instead of TCP, and cells of up to 25 Gbit/s are real.

The best method of a cell is what `kvferry plan` would choose if it knew these times: the full KV where
compression gains less than its threshold. `planned` is what it chose by its own. A choice whose time to the
last token is within `TIE` of the best one's counts as tied with it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from link_plots import draw, table
from link_wire import Link

from kvferry.shared.compression.applicable import applicable_methods
from kvferry.shared.compression.plan import CompressionPlan, Part
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.model.spec import ModelSpec
from kvferry.tools.evaluation.provenance import commit
from kvferry.tools.plan.advice import advise
from kvferry.tools.plan.command import chosen_plans
from kvferry.tools.plan.config import PlanConfig
from kvferry.tools.plan.curves import find_curves
from kvferry.tools.plan.machine import find_machine
from kvferry.tools.plan.model import ModelCost
from kvferry.tools.plan.predict import Deployment, Prediction, Workload, disaggregated, together

LLAMA = ModelCost(
    spec=ModelSpec(
        name="Llama-3.1-8B",
        fingerprint="",
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128_256,
        max_model_len=131_072,
        dtype="bfloat16",
        eos_token_ids=(),
    ),
    num_parameters=8_030_261_248,
    num_active=8_030_261_248,
)
TOKENS = (4096, 8192, 16_384, 32_768, 65_536, 131_072)
GBITS = (1.0, 10.0, 25.0, 100.0, 400.0)
MEASURED_UP_TO = {"TCP": 10.0, "shared memory": 25.0}
"""Gbit/s. Two cores that are sender and receiver at once fill no faster link over TCP."""
TIE = 1.02
ANSWER_TOKENS = 256
LATENCY_S = 0.0002
SELDOM = 1e-6
"""Requests a second: one alone."""
LEAST_LAYERS = 4
REPEATS = 2
"""Of a transfer; the faster one counts, since other work on the machine only makes it longer."""
EIGHT_BIT = "fp8-like"
"""The full KV in 8 bits with a scale a group on the wire, and in 16 bits at decode."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """One method's transfer. Attributes: layers: how many were shipped; 0: modelled."""

    transfer_s: float
    layers: int


class Study:
    """One machine's cells. Attributes: cpu: seconds a byte of the slower end's busiest thread."""

    def __init__(self, link: Link, transport: str, machine: str, cell_s: float) -> None:
        self._link = link
        self._transport = transport
        self._cell_s = cell_s
        self._machine = find_machine(machine)
        self.sender, self.receiver = link.cpu_s_per_byte()
        self._known: dict[tuple[float, int, int], Found] = {}
        config = PlanConfig(methods="all", curves_of="demo")
        curves = find_curves(config, fingerprint=LLAMA.spec.fingerprint, family="llama")
        plans = chosen_plans(config, applicable_methods(LLAMA.spec.layers), self._machine, curves)
        whole = plan_for("full")
        eight = replace(whole, representation=Part(name="rows", params={"wire_bits": 8}))
        self.plans: dict[str, CompressionPlan] = {"full": plans.pop("full"), EIGHT_BIT: eight, **plans}

    def _deployment(self, gbits: float) -> Deployment:
        return Deployment(
            machine=self._machine,
            model=LLAMA,
            link_bytes_per_s=gbits * 1e9 / 8,
            link_latency_s=LATENCY_S,
            max_batch=32,
        )

    def cell(self, gbits: float, num_tokens: int) -> dict[str, Any]:
        deployment = self._deployment(gbits)
        load = Workload(prompt_tokens=num_tokens, answer_tokens=ANSWER_TOKENS, rate=SELDOM)
        planned = {name: disaggregated(deployment, plan, load) for name, plan in self.plans.items()}
        found = {name: self._find(gbits, name, prediction) for name, prediction in planned.items()}
        real = {
            name: replace(prediction, transfer_s=found[name].transfer_s)
            for name, prediction in planned.items()
        }

        def choice(predictions: Mapping[str, Prediction]) -> str:
            advice = advise(
                predictions,
                lambda least: together(deployment, self.plans["full"], load, least_workers=least),
            )
            assert advice.method is not None, "there are no bounds"
            return advice.method

        best, chosen = choice(real), choice(planned)
        layers = [transfer.layers for transfer in found.values()]
        how = "measured" if min(layers) == LLAMA.spec.num_layers else "part" if min(layers) else "modelled"
        return {
            "gbits": gbits,
            "tokens": num_tokens,
            "how": how,
            "transport": "" if how == "modelled" else self._transport,
            "best": best,
            "planned": chosen,
            "planned_over_best": real[chosen].total_s / real[best].total_s,
            "methods": {
                name: {
                    "shipped_bytes": prediction.sizes.shipped,
                    "layers_shipped": found[name].layers,
                    "first_token_s": prediction.first_token_s,
                    "second_token_s": prediction.first_token_s + prediction.transfer_s + prediction.step_s,
                    "last_token_s": prediction.total_s,
                    "planned_last_token_s": planned[name].total_s,
                }
                for name, prediction in real.items()
            },
        }

    def _find(self, gbits: float, name: str, prediction: Prediction) -> Found:
        """From the first token to decode's first step."""
        num_layers = LLAMA.spec.num_layers
        layer_bytes, pass_s = (
            prediction.sizes.shipped // num_layers,
            prediction.prefill_s + prediction.compress_s,
        )
        key = (gbits, layer_bytes, round(pass_s * 1e3))
        if key not in self._known:
            layer_s, rate = pass_s / num_layers, gbits * 1e9 / 8
            if gbits <= MEASURED_UP_TO[self._transport]:
                expected_s = num_layers * max(layer_s, layer_bytes / rate)
                layers = max(LEAST_LAYERS, min(num_layers, int(num_layers * self._cell_s / expected_s)))
                arrivals = min(
                    (
                        self._link.transfer(
                            bytes_per_s=rate, layer_bytes=layer_bytes, num_layers=layers, layer_s=layer_s
                        )
                        for _ in range(REPEATS)
                    ),
                    key=lambda times_s: times_s[-1],
                )
                middle = layers // 2
                later_s = (arrivals[-1] - arrivals[middle - 1]) / (layers - middle)
                end_s = arrivals[-1] + (num_layers - layers) * later_s
            else:
                layers, end_s = 0, 0.0
                each_s = layer_bytes * max(1 / rate, self.sender, self.receiver)
                for layer in range(num_layers):
                    end_s = max(end_s, (layer + 1) * layer_s) + each_s
            self._known[key] = Found(transfer_s=max(0.0, end_s - pass_s) + LATENCY_S, layers=layers)
        found = self._known[key]
        return replace(
            found, transfer_s=found.transfer_s + self._machine.handover_s(self.plans[name], prediction.sizes)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gbits", type=float, nargs="+", default=GBITS)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--machine", default="H100-SXM", help="a GPU of kvferry plan")
    parser.add_argument("--cell-s", type=float, default=3.0, help="about how long one transfer may take")
    parser.add_argument("--output", type=Path, help="folder of links.json, table.md and, with --plots, plots")
    parser.add_argument("--plots", action="store_true", help="needs matplotlib")
    parser.add_argument("--shared-memory", action="store_true", help="ship blocks through a ring in memory")
    options = parser.parse_args()
    cells = []
    with Link.running(through_memory=options.shared_memory) as link:
        transport = "shared memory" if options.shared_memory else "TCP"
        study = Study(link, transport, options.machine, options.cell_s)
        for gbits in options.gbits:
            for num_tokens in options.tokens:
                cells.append(study.cell(gbits, num_tokens))
                sys.stdout.write(_line(cells[-1]) + "\n")
                sys.stdout.flush()
    if options.output:
        file = options.output / "links.json"
        done = {(cell["gbits"], cell["tokens"]) for cell in cells}
        before = json.loads(file.read_text())["cells"] if file.exists() else []
        cells += [cell for cell in before if (cell["gbits"], cell["tokens"]) not in done]
        cells.sort(key=lambda cell: (cell["gbits"], cell["tokens"]))
        result = {
            "command": sys.argv,
            "commit": commit(),
            "cores": os.cpu_count(),
            "machine": options.machine,
            "answer_tokens": ANSWER_TOKENS,
            "wire_s_per_byte": {"sender": study.sender, "receiver": study.receiver},
            "plans": {name: asdict(plan) for name, plan in study.plans.items()},
            "agreement": agreement(cells),
            "cells": cells,
        }
        for name, tally in result["agreement"].items():
            longer = 100 * (tally["worst_planned_over_best"] - 1)
            tied = tally["same_or_tied"] - tally["same"]
            sys.stdout.write(
                f"{name}: the plan chooses the best method in {tally['same']} of {tally['cells']} cells, one "
                f"that ties with it in {tied}; elsewhere its choice takes at most {longer:.1f} % longer\n"
            )
        options.output.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result, indent=1) + "\n")
        (options.output / "table.md").write_text(table(cells))
        if options.plots:
            draw(result, options.output)


def agreement(cells: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """How often the plan's choice is the best one, over all cells and over those with real transfers."""
    shipped = [cell for cell in cells if cell["how"] != "modelled"]
    return {
        name: {
            "cells": len(of),
            "same": sum(cell["planned"] == cell["best"] for cell in of),
            "same_or_tied": sum(1 / TIE <= cell["planned_over_best"] <= TIE for cell in of),
            "worst_planned_over_best": max((cell["planned_over_best"] for cell in of), default=1.0),
        }
        for name, of in (("all", cells), ("shipped", shipped))
    }


def _line(cell: dict[str, Any]) -> str:
    methods = cell["methods"]
    full_s, best_s = methods["full"]["last_token_s"], methods[cell["best"]]["last_token_s"]
    eight_s = methods[EIGHT_BIT]["last_token_s"]
    return (
        f"{cell['gbits']:g} Gbit/s, {cell['tokens']} tokens, {cell['how']}: last token full {full_s:.2f} s, "
        f"{EIGHT_BIT} {eight_s:.2f} s, {cell['best']} {best_s:.2f} s; planned {cell['planned']}"
    )


if __name__ == "__main__":
    main()
