"""The local folder of a model: the included demo, a given folder, or a download from the Hugging Face hub.

Downloads safetensors, configuration and tokenizer files only: no pickled weights and no code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvferry.models import DEMO_MODEL
from kvferry.shared.errors import ConfigurationError

DEMO_NAME = "demo"
_TEXT_FILES = ("*.json", "*.jinja", "tokenizer.model", "*.txt")
_WEIGHT_FILES = ("*.safetensors",)


def resolve_model_path(path_or_id: str | Path, *, weights: bool) -> Path:
    """The local folder of a model.

    Args:
        path_or_id: "demo", a folder, or a hub id such as `org/name`.
        weights: also download the weights of a model from the hub.

    Raises:
        ConfigurationError: neither a folder nor a hub id that can be downloaded.
    """
    if str(path_or_id) == DEMO_NAME and not Path(path_or_id).is_dir():
        return DEMO_MODEL
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        with quiet_libraries():
            snapshot = snapshot_download(
                str(path_or_id), allow_patterns=[*_TEXT_FILES, *(_WEIGHT_FILES if weights else ())]
            )
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigurationError(
            f"model is {str(path_or_id)!r}; it must be {DEMO_NAME!r}, a folder, or a hub id that can be "
            f"downloaded ({type(error).__name__})"
        ) from error
    return Path(snapshot)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Suppress the progress bars and hints of transformers and huggingface_hub within the block."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub_bars = not are_progress_bars_disabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
        if hub_bars:
            enable_progress_bars()
