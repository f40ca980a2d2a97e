"""Whether Triton's interpreter runs kernels in this environment, asked before minutes of them.

Imported once TRITON_INTERPRET is set, because it has a kernel.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl


@triton.jit
def _sum_below_kernel(limit_ptr, out_ptr):
    total = 0
    for number in range(0, tl.load(limit_ptr)):
        total += number
    tl.store(out_ptr, total)


def interpreter_problem() -> str | None:
    """Return why the interpreter runs no kernels here, None if it does.

    It makes a number of an array with one element for every loop whose length is loaded, which numpy refuses
    since version 2.5.
    """
    found = torch.zeros(1, dtype=torch.int32)
    try:
        _sum_below_kernel[(1,)](torch.full_like(found, 5), found)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    else:
        reason = None if int(found[0]) == 10 else f"the numbers below 5 sum to {int(found[0])}, not 10"
    if reason is None:
        return None
    return (
        f"Triton {triton.__version__}'s interpreter does not run with numpy {np.__version__} ({reason}); "
        "pip install 'numpy<2.5'"
    )
