"""All methods, those of `baselines/` among them."""

from __future__ import annotations

from kvferry.shared.compression.presets import method_names, preset

PRESETS = {name: preset(name) for name in method_names()}
