"""Distortion tables: the normalised squared error of each bit-width (RDKV section J, Table 14).

The knapsack uses them as costs. The tables of the paper's five models are built in; `calibrate_epsilon.py`
measures other models, with one JSON file each:

    {"keys": [e2, e4, e8], "values": [e2, e4, e8], ...}              # other entries describe the measurement

A service reads its folder of such files once at start (`install_tables`). Requests name tables, never paths.
Router and workers should have the same tables: one that lacks a table refuses requests that name it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from kvferry.shared.errors import ConfigurationError

WIDTHS = (0, 2, 4, 8, 16)
"""Bit-widths of a unit; 0 drops it, 16 is full precision."""


@dataclass(frozen=True, kw_only=True)
class EpsilonTable:
    """epsilon(2), epsilon(4), epsilon(8) of K channels and of V tokens; epsilon(0) = 1 and epsilon(16) = 0.

    Raises:
        ConfigurationError: not three finite numbers of at least 0.
    """

    keys: tuple[float, float, float]
    values: tuple[float, float, float]

    def __post_init__(self) -> None:
        for name, entries in (("keys", self.keys), ("values", self.values)):
            if len(entries) != 3 or not all(math.isfinite(e) and e >= 0 for e in entries):
                raise ConfigurationError(
                    f"epsilon of {name} is {entries}; it must be three finite numbers of at least 0, for 2, "
                    "4 and 8 bits"
                )

    @property
    def key_curve(self) -> tuple[float, ...]:
        """epsilon^K at each of `WIDTHS`."""
        return (1.0, *self.keys, 0.0)

    @property
    def value_curve(self) -> tuple[float, ...]:
        """epsilon^V at each of `WIDTHS`."""
        return (1.0, *self.values, 0.0)


PAPER_TABLES: Mapping[str, EpsilonTable] = {
    "LLaMA-3.1-8B": EpsilonTable(keys=(0.149, 0.0062, 2.2e-5), values=(0.313, 0.0140, 4.9e-5)),
    "LLaMA-2-13B": EpsilonTable(keys=(0.288, 0.0124, 5.5e-5), values=(0.272, 0.0122, 4.4e-5)),
    "Mistral-7B": EpsilonTable(keys=(0.280, 0.0116, 6.9e-5), values=(0.296, 0.0130, 4.5e-5)),
    "Qwen2.5-72B": EpsilonTable(keys=(0.296, 0.0164, 4.4e-3), values=(0.281, 0.0126, 4.4e-5)),
    "Qwen3-4B": EpsilonTable(keys=(0.347, 0.0147, 1.5e-4), values=(0.313, 0.0139, 4.8e-5)),
}
"""Table 14, every number as printed."""


_SUFFIX = ".json"
_installed: dict[str, EpsilonTable] = {}
"""The tables of the last `install_tables`; one set per process."""


def table_names() -> tuple[str, ...]:
    """The names that `find_table` accepts: the paper's models, then the installed folder's."""
    return (*PAPER_TABLES, *_installed)


def find_table(name: str) -> EpsilonTable:
    """A table by its name.

    Raises:
        ConfigurationError: there is none.
    """
    table = PAPER_TABLES.get(name) or _installed.get(name)
    if table is None:
        raise ConfigurationError(f"no epsilon table is named {name!r}; there are {', '.join(table_names())}")
    return table


def install_tables(folder: str) -> None:
    """Install the tables of a folder in this process, in place of those installed before.

    A table's name is its file's name without `.json`.

    Args: folder: empty for none; files with another ending are ignored.

    Raises:
        ConfigurationError: the folder or a table cannot be read, or a name is one of the paper's.
    """
    paths: list[Path] = []
    if folder:
        try:
            paths = sorted(path for path in Path(folder).iterdir() if path.suffix == _SUFFIX)
        except OSError as error:
            raise ConfigurationError(
                f"epsilon_tables is {folder!r}; it must be a folder of tables: {error}"
            ) from error
    taken = [path.name for path in paths if path.stem in PAPER_TABLES]
    if taken:
        raise ConfigurationError(
            f"epsilon_tables {folder!r} has {', '.join(taken)}; those names are built in"
        )
    tables = {path.stem: load_table(path) for path in paths}
    _installed.clear()
    _installed.update(tables)


def load_table(path: Path) -> EpsilonTable:
    """The table of one file.

    Raises:
        ConfigurationError: the file cannot be read, or is not a table.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"an epsilon table cannot be read from {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} holds a {type(content).__name__}; it must have keys and values")
    return EpsilonTable(
        keys=_curve(path, content, "keys"),
        values=_curve(path, content, "values"),
    )


def save_table(
    path: Path, table: EpsilonTable, *, origin: Mapping[str, str | int | float] | None = None
) -> None:
    """Write a table for `load_table`. The file is replaced atomically, so a reader never sees a part of it.

    Args: origin: how the table was measured; any names except "keys" and "values".

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


def _curve(path: Path, content: Mapping[str, object], name: str) -> tuple[float, float, float]:
    curve = content.get(name)
    numbers = isinstance(curve, list) and all(type(entry) in (int, float) for entry in curve)
    if not numbers:
        raise ConfigurationError(
            f"{path}: {name} is {curve!r}; it must be three numbers, for 2, 4 and 8 bits"
        )
    return cast(tuple[float, float, float], tuple(float(entry) for entry in cast(list[float], curve)))
