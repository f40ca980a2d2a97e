"""Where calibrations lie: what `kvferry calibrate` measured on a model, found by the model's fingerprint.

    NAME-HASH.quality.json   quality curves (`curves.py`)
    NAME-HASH.epsilon.json   RDKV's distortion table (`rdkv/epsilon.py`)

Those of the shipped models are part of the package, all others lie in one folder: the user's, or the one that
the setting `calibration` names. A folder's files may be copied to another machine.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvferry.models import SHIPPED_CALIBRATION
from kvferry.shared.errors import ConfigurationError

USERS_FOLDER = "~/.cache/kvferry/calibration"


def calibration_folder(setting: str) -> Path:
    """Return the folder, which need not exist yet. Args: setting: its path; empty: the user's."""
    return Path(os.path.expanduser(setting or USERS_FOLDER))


def calibration_files(setting: str, suffix: str) -> list[Path]:
    """Return the files with this ending: the shipped ones, then the folder's. Each wins over those before it.

    Raises: ConfigurationError: the setting names no folder.
    """
    folder = calibration_folder(setting)
    if setting and not folder.is_dir():
        raise ConfigurationError(f"calibration is {setting!r}; it must be a folder")
    return [path for each in (SHIPPED_CALIBRATION, folder) for path in sorted(each.glob(f"*{suffix}"))]
