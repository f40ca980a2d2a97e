"""Measuring distortion tables on a model's own K and V, and keeping them by model name in a JSON file.

For `kvferry calibrate epsilon`, offline: feed each layer of each calibration prompt to an
`EpsilonAccumulator`. Runs no model itself.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import cast

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
        """One layer of one prompt. Args: keys post-RoPE and values `[H_kv, T, D]`, T >= 1."""
        channels = keys.float().transpose(-1, -2)
        self._add(0, channels, channels.var(dim=-1, correction=0))
        tokens = values.float()
        self._add(1, tokens, tokens.square().mean(dim=-1))

    def table(self) -> EpsilonTable:
        """The averages so far.

        Raises:
            ConfigurationError: no K channel varied, or no V token had energy.
        """
        if min(self._units) == 0:
            raise ConfigurationError(
                f"epsilon was measured on {self._units[0]} K channels and {self._units[1]} V tokens; it "
                "needs at least one of each that is not constant or zero"
            )
        keys, values = (
            cast(tuple[float, float, float], tuple((sums / units).tolist()))
            for sums, units in zip(self._sums, self._units, strict=True)
        )
        return EpsilonTable(keys=keys, values=values)

    def _add(self, side: int, rows: Tensor, power: Tensor) -> None:
        used = power > 0
        self._units[side] += int(used.sum())
        for i, bits in enumerate(CODE_WIDTHS):
            error = (dequantise_rows(*quantise_rows(rows, bits)) - rows).square().mean(dim=-1)
            self._sums[side, i] += (error[used] / power[used]).double().sum().cpu()


def measure_epsilon(keys: Tensor, values: Tensor) -> EpsilonTable:
    """The table of one layer of one prompt: `EpsilonAccumulator` for a single pair.

    Args: keys post-RoPE and values, `[H_kv, T, D]`.
    """
    accumulator = EpsilonAccumulator()
    accumulator.add(keys, values)
    return accumulator.table()


def save_epsilon_table(path: Path, model: str, table: EpsilonTable) -> None:
    """Add or replace one model's entry; the file is replaced whole, so that no reader sees half of it.

    Raises:
        ConfigurationError: the file exists and is not one of these.
    """
    tables = {**(load_epsilon_tables(path) if path.exists() else {}), model: table}
    content = {name: {"keys": list(t.keys), "values": list(t.values)} for name, t in tables.items()}
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def load_epsilon_tables(path: Path) -> Mapping[str, EpsilonTable]:
    """Tables by model name.

    Raises:
        ConfigurationError: the file cannot be read, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"epsilon tables cannot be read from {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(
            f"{path} holds a {type(content).__name__}; it must hold tables by model name"
        )
    return {name: _parse(path, name, entry) for name, entry in content.items()}


def _parse(path: Path, model: str, entry: object) -> EpsilonTable:
    if not isinstance(entry, dict) or set(entry) != {"keys", "values"}:
        raise ConfigurationError(f"{path}: the entry of {model!r} must have keys and values, nothing else")
    curves = [entry["keys"], entry["values"]]
    for curve in curves:
        if not isinstance(curve, list) or not all(
            type(e) in (int, float) and math.isfinite(e) for e in curve
        ):
            raise ConfigurationError(f"{path}: epsilon of {model!r} is {curve!r}; it must be three numbers")
    keys, values = (cast(tuple[float, float, float], tuple(float(e) for e in curve)) for curve in curves)
    return EpsilonTable(keys=keys, values=values)
