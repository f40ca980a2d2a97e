"""Where the models that ship with the package lie on disk."""

from pathlib import Path

DEMO_MODEL = Path(__file__).parent / "demo"
SHIPPED_CURVES = Path(__file__).parent / "calibration"
"""Quality curves of the shipped models."""
