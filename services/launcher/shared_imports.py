"""Imports what services need that are forked from one process (`process.py`).

It starts no thread, looks for no device and opens nothing: these do not survive a fork.
"""

from __future__ import annotations

import importlib
import os

# NumPy's BLAS starts threads when it is imported. The services compute in torch, with threads of its own.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

for _module in (
    "transformers.activations",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "kvferry.services.decode.server",
    "kvferry.services.prefill.server",
    "kvferry.services.router.server",
    "kvferry.services.launcher.cli",
):
    importlib.import_module(_module)
