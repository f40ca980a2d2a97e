"""Finds the quality curves of a plan: the model's own, those of its family, or another's that the user names.

Curves of another model may be far off, so a bound on the loss is refused without curves of the model or its
family, unless the user names others. A family is a model type: `qwen3` of Qwen3-0.6B and of Qwen3-32B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kvferry.shared.compression.calibrations import calibration_files
from kvferry.shared.compression.curves import SUFFIX, QualityCurve, load_curves
from kvferry.shared.errors import ConfigurationError
from kvferry.tools.plan.config import PlanConfig

Whose = Literal["own", "family", "named", "none"]


@dataclass(frozen=True, kw_only=True)
class PlanCurves:
    """The curves of a plan.

    Attributes:
        of: name of the model on which they were measured; "" if there are none.
        by_method: those of the methods that were measured.
    """

    whose: Whose = "none"
    of: str = ""
    by_method: Mapping[str, QualityCurve] = field(default_factory=dict)


def find_curves(config: PlanConfig, *, fingerprint: str, family: str) -> PlanCurves:
    """Find the curves for a model.

    Args:
        fingerprint: of the model; "" if its weights are not on this machine.
        family: its model type; "" if that is not known.

    Raises:
        ConfigurationError: `curves_of` names no curves; `max_loss` is given and there are none of the model's
            family; the folder of curves does not exist, or a file is not a curve file.
    """
    files = [load_curves(path) for path in calibration_files(config.calibration, SUFFIX)]
    if config.curves_of:
        named = [file for file in files if config.curves_of in (file.model, file.name)]
        if not named:
            known = ", ".join(file.name for file in files)
            raise ConfigurationError(f"--curves-of is {config.curves_of!r}; there are curves of {known}")
        return PlanCurves(whose="named", of=named[-1].name, by_method=named[-1].curves)
    if own := [file for file in files if fingerprint in file.fingerprints.values()]:
        curves = {method: curve for file in own for method, curve in file.curves.items()}
        return PlanCurves(whose="own", of=own[-1].name, by_method=curves)
    if family and (related := [file for file in files if file.origin.get("family") == family]):
        return PlanCurves(whose="family", of=related[-1].name, by_method=related[-1].curves)
    if "max_loss" in config.model_fields_set:
        raise ConfigurationError(
            f"--max-loss is {config.max_loss:g}, and neither this model nor one of its family ({family}) has "
            f"quality curves: measure them with kvferry calibrate --model {config.model}, or name another "
            f"model's with --curves-of ({', '.join(file.name for file in files)}), which may be far off"
        )
    return PlanCurves()
