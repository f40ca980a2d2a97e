"""Where the models that ship with the package lie on disk."""

from pathlib import Path

DEMO_MODEL = Path(__file__).parent / "demo"
DEMO_EXAMPLE = DEMO_MODEL / "example.json"
"""A request to the demo model that shows compression: a body for POST /v1/chat/completions."""
SHIPPED_CALIBRATION = Path(__file__).parent / "calibration"
"""Quality curves and RDKV's distortion tables of the shipped models."""
CALIBRATION_TEXT = SHIPPED_CALIBRATION / "text"
"""The documents that calibration of other models cuts its prompts from."""
