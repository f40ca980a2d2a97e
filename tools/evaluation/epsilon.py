"""Measures distortion tables on a model's own K and V, and writes them for `rdkv/epsilon.py`.

`kvferry calibrate` runs the model and adds each layer of some prompts to an `EpsilonAccumulator`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvferry.kernels.quantise import WIDTHS as CODE_WIDTHS
from kvferry.kernels.quantise import dequantise_rows, quantise_rows
from kvferry.shared.compression.rdkv.epsilon import EpsilonTable
from kvferry.shared.errors import ConfigurationError


class EpsilonAccumulator:
    """Averages a quantiser's normalised squared error over units: layers, heads, prompts.

    A K channel's error is divided by the channel's variance over tokens, a V token's by the token's energy.
    Units without variance (a prompt of one token) or energy have no normalised error and are left out.
    """

    def __init__(self) -> None:
        self._sums = torch.zeros(2, len(CODE_WIDTHS), dtype=torch.float64)
        self._units = [0, 0]

    def add(self, keys: Tensor, values: Tensor) -> None:
        """Add one layer of one prompt. Args: keys post-RoPE and values `[H_kv, T, D]`, T >= 1."""
        channels = keys.float().transpose(-1, -2)
        self._add(0, channels, channels.var(dim=-1, correction=0))
        tokens = values.float()
        self._add(1, tokens, tokens.square().mean(dim=-1))

    def table(self) -> EpsilonTable:
        """Return the averages so far.

        Raises:
            ConfigurationError: no K channel varied, or no V token had energy.
        """
        if min(self._units) == 0:
            raise ConfigurationError(
                f"epsilon was measured on {self._units[0]} K channels and {self._units[1]} V tokens; it "
                "needs at least one of each that is not constant or zero"
            )
        keys, values = (sums / units for sums, units in zip(self._sums, self._units, strict=True))
        return EpsilonTable(keys=tuple(keys.tolist()), values=tuple(values.tolist()))

    def _add(self, side: int, rows: Tensor, power: Tensor) -> None:
        used = power > 0
        self._units[side] += int(used.sum())
        for i, bits in enumerate(CODE_WIDTHS):
            error = (dequantise_rows(*quantise_rows(rows, bits)) - rows).square().mean(dim=-1)
            self._sums[side, i] += (error[used] / power[used]).double().sum().cpu()


def save_table(path: Path, table: EpsilonTable, *, origin: Mapping[str, Any] | None = None) -> None:
    """Write a table for `load_table`. The file is replaced atomically, so a reader never sees a part of it.

    Args: origin: the model's "fingerprints", and how the table was measured; any names except "keys" and
        "values".

    Raises:
        ConfigurationError: the file cannot be written.
    """
    content = {**(origin or {}), "keys": list(table.keys), "values": list(table.values)}
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigurationError(f"the epsilon table cannot be written to {path}: {error}") from error
