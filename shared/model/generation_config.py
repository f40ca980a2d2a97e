"""A checkpoint's own sampling, from its `generation_config.json`: the defaults of requests that say nothing.

The router reads it when it starts. Ids that end a completion are read from the same file, by `checkpoint.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from kvferry.shared.errors import ConfigurationError
from kvferry.shared.model.checkpoint import resolve_model_path

FILE = "generation_config.json"
_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0, 10),
}
"""The fields that are used, and their ranges, as requests have them."""


def sampling_defaults(option: str, model: str | Path) -> dict[str, float]:
    """The fields of `SamplingParams` that requests leave to the model.

    Args:
        option: "auto" (the model's own file, if it has one), "none", or a folder that has one.
        model: "demo", a folder or a hub id.

    Raises: ConfigurationError: the folder has no such file, or a value is out of its range.
    """
    if option == "none":
        return {}
    folder = resolve_model_path(model, weights=False) if option == "auto" else Path(option).expanduser()
    file = folder / FILE
    if not file.is_file():
        if option == "auto":
            return {}
        raise ConfigurationError(
            f"generation_config is {option!r}, which has no {FILE}; it must be auto, none or a folder that "
            "has one"
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        found = {name: content[name] for name in _RANGES if content.get(name) is not None}
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{FILE} of {folder} is not a JSON object: {error}") from error
    for name, value in found.items():
        low, high = _RANGES[name]
        is_number = isinstance(value, int if name == "top_k" else int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (name == "repetition_penalty" and value == 0):
            raise ConfigurationError(
                f"{name} is {value!r} in {FILE} of {folder}; it must be {low} to {high}; with "
                "generation_config none the file is not used"
            )
    if "top_k" in found:
        found["top_k"] = max(0, found["top_k"])
    return found
