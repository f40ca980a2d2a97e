"""The memory that a process takes while it loads quantised weights, for each kind that the tests make.

    python benchmarks/quantised_load.py [--output FILE]

Makes a random Llama of 6 layers of 768 channels with the library of each kind, and loads it on the CPU in a
process of its own, which has loaded a tiny one of the same kind before. The peak is what the process held
beyond what it held before, mapped pages of the checkpoint among it. A copy of the model in full precision
would take `full_precision` beside them. Linux only; needs `pip install 'kvferry[quant]'`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from kvtest.load_memory import LoadMemory, measure_load
from kvtest.quantised_models import ACTIVATIONS, WEIGHT_ONLY, save_quantised
from kvtest.tiny_models import make_config


def measure(kind: str) -> LoadMemory:
    """Make a checkpoint of a kind and load it."""
    config = make_config("llama", hidden_size=768, intermediate_size=2048, num_hidden_layers=6)
    with tempfile.TemporaryDirectory() as folder:
        tiny, large = Path(folder, "tiny"), Path(folder, "large")
        return measure_load(save_quantised(kind, large, config), warm_up=save_quantised(kind, tiny))


def main() -> None:
    """The command line."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--output", type=Path, help="write the result here as JSON")
    output = arguments.parse_args().output
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    ).stdout.strip()
    kinds = {}
    for kind in (*WEIGHT_ONLY, *ACTIVATIONS):
        memory = measure(kind)
        kinds[kind] = asdict(memory)
        sys.stdout.write(f"{kind}: {json.dumps(kinds[kind])}\n")
        sys.stdout.flush()
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps({"commit": commit, "unit": "bytes", "kinds": kinds}, indent=1) + "\n")
    over = [
        kind for kind, sizes in kinds.items() if sizes["peak"] >= sizes["stored"] + sizes["full_precision"]
    ]
    if over:
        raise SystemExit(f"as much as with a copy in full precision: {', '.join(over)}")


if __name__ == "__main__":
    main()
