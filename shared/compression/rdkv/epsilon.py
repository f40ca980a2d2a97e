"""Distortion tables: the normalised squared error of each bit-width (RDKV section J, Table 14).

The knapsack uses them as costs. The tables of the paper's five models are built in;
`tools/evaluation/epsilon.py` measures other models, with one JSON file each:

    {"keys": [e2, e4, e8], "values": [e2, e4, e8], "fingerprints": {"float32": "43f5...", ...}, ...}

"fingerprints" are those of the measured model by compute dtype; other entries describe the measurement. The
name "model" means the table measured on the served model; `calibrations.py` says where that lies. A
service may have a folder of other tables, which requests name by their files' names, never by paths. Both are
read once, at start (`install_tables`). Router and workers should have the same tables: one that lacks a table
refuses requests that name it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvferry.shared.compression.calibrations import calibration_files
from kvferry.shared.compression.plan import ResolvedPlan, look_up
from kvferry.shared.errors import ConfigurationError

WIDTHS = (0, 2, 4, 8, 16)
"""Bit-widths of a unit; 0 drops it, 16 is full precision."""


@dataclass(frozen=True, kw_only=True)
class EpsilonTable:
    """epsilon(2), epsilon(4), epsilon(8) of K channels and of V tokens; epsilon(0) = 1 and epsilon(16) = 0.

    Attributes:
        fingerprints: of the model that it was measured on, one for each compute dtype.

    Raises:
        ConfigurationError: not three finite numbers of at least 0.
    """

    keys: tuple[float, ...]
    values: tuple[float, ...]
    fingerprints: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, entries in (("keys", self.keys), ("values", self.values)):
            numbers = all(type(e) in (int, float) and math.isfinite(e) and e >= 0 for e in entries)
            if len(entries) != 3 or not numbers:
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

OWN_TABLE = "model"
"""The name of the served model's own table."""
FALLBACK = "LLaMA-3.1-8B"
"""The table that OWN_TABLE means if none was measured on the model."""
SUFFIX = ".epsilon.json"


@dataclass
class _Tables:
    """What `install_tables` read. Attributes: measured: the tables of models; None until they are read."""

    named: dict[str, EpsilonTable] = field(default_factory=dict)
    measured: tuple[EpsilonTable, ...] | None = None


_tables = _Tables()
"""One set per process."""


def find_table(name: str, *, fingerprint: str = "") -> EpsilonTable:
    """Find a table by its name: OWN_TABLE, one of the paper's models, or of the installed folder's.

    Args: fingerprint: of the served model. Its own table is the one that was measured on it, the installed
        folder's before the calibrations'; else FALLBACK.

    Raises: InvalidRequest: there is none.
    """
    own = own_table(fingerprint) or PAPER_TABLES[FALLBACK]
    return look_up("epsilon_table", name, {OWN_TABLE: own, **PAPER_TABLES, **_tables.named})


def stand_in(resolved: ResolvedPlan, *, fingerprint: str) -> str:
    """Return the name of another model's table that a plan uses because the served model has none; "" if the
    model has its own, or if the plan names a table or needs none.

    Args: fingerprint: of the served model.
    """
    wants_own = resolved.plan.representation.params.get("epsilon_table") == OWN_TABLE
    return FALLBACK if wants_own and resolved.method != "full" and own_table(fingerprint) is None else ""


def own_table(fingerprint: str) -> EpsilonTable | None:
    """Return the table that was measured on a model."""
    if _tables.measured is None:  # a process that installs none
        _tables.measured = _measured("")
    own = None
    for table in (*_tables.measured, *_tables.named.values()):
        if fingerprint in table.fingerprints:
            own = table
    return own


def _measured(calibration: str) -> tuple[EpsilonTable, ...]:
    return tuple(load_table(path) for path in calibration_files(calibration, SUFFIX))


def install_tables(folder: str, *, calibration: str = "") -> None:
    """Install tables in this process, in place of those installed before.

    Args:
        folder: of tables that plans may name: a table's name is its file's name without `.json`. Files with
            another ending are ignored; empty for none.
        calibration: as in `calibration_files`.

    Raises:
        ConfigurationError: a folder or a table cannot be read, or a name is one of the paper's.
    """
    if folder and not Path(folder).is_dir():
        raise ConfigurationError(f"epsilon_tables is {folder!r}; it must be a folder of tables")
    paths = sorted(Path(folder).glob("*.json")) if folder else []
    if taken := [path.name for path in paths if path.stem in (OWN_TABLE, *PAPER_TABLES)]:
        raise ConfigurationError(
            f"epsilon_tables {folder!r} has {', '.join(taken)}; those names are built in"
        )
    named = {path.stem: load_table(path) for path in paths}
    _tables.measured, _tables.named = _measured(calibration), named


def load_table(path: Path) -> EpsilonTable:
    """Load the table of one file.

    Raises:
        ConfigurationError: the file cannot be read, or is not a table.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return EpsilonTable(
            keys=tuple(content["keys"]),
            values=tuple(content["values"]),
            fingerprints=tuple(content.get("fingerprints", {}).values()),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigurationError) as error:
        raise ConfigurationError(f"no epsilon table can be read from {path}: {error!r}") from error
