"""What each kernel of a decode step does first with memory: python first_access.py ARCHITECTURE OP...

Compiles what the self-test's cases launch on such a GPU, and prints of each kernel whether it is launched
dependently, and the first instructions of its PTX that touch memory or wait for other grids.
"""

from __future__ import annotations

import json
import re
import sys

import torch

from kvferry.kernels.cases import op_checks
from kvferry.shared.device.self_test import model_shapes
from kvferry.tools.kernel_cache.compile import small
from kvferry.tools.kernel_cache.random_model import random_model
from kvferry.tools.kernel_cache.rehearsal import GPUS, rehearsal
from kvferry.tools.kernel_cache.shapes import SHIPPED

_MEMORY = re.compile(r"\b(?:ld|st|atom|red|cp|prefetch|tensormap|griddepcontrol)\.(?!param)[\w.]+")
_SHOWN = 3

architecture, *ops = sys.argv[1:]
model = random_model(small(SHIPPED["Llama-3.2-1B"]), torch.device("cpu"), max_model_len=8192)
with rehearsal(GPUS[architecture]) as compiled, torch.inference_mode():
    for shape in model_shapes(model.spec, model.device):
        for op in ops:
            for case in op_checks(op, shape):
                case.launch()
rows = [
    {
        "kernel": one.src.fn.__name__,
        "launch_pdl": one.metadata.launch_pdl,
        "first": _MEMORY.findall(one.asm["ptx"])[:_SHOWN],
        "waits": one.asm["ptx"].count("griddepcontrol.wait"),
    }
    for one in compiled
]
sys.stdout.write(json.dumps(rows) + "\n")
