"""Distortion tables: the normalised squared error that a bit-width leaves (RDKV section J, Table 14).

The knapsack prices widths with them. Built in for the paper's five models; `calibrate_epsilon.py` measures
them for others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.shared.errors import ConfigurationError

WIDTHS = (0, 2, 4, 8, 16)
"""Bit-widths of a unit; 0 is eviction, 16 full precision."""


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


def paper_table(model: str) -> EpsilonTable:
    """The paper's table of a model.

    Raises:
        ConfigurationError: the paper has none of that name.
    """
    table = PAPER_TABLES.get(model)
    if table is None:
        raise ConfigurationError(
            f"no built-in epsilon table is named {model!r}; there are {', '.join(PAPER_TABLES)}"
        )
    return table
