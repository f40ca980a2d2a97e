"""Where a model's files lie: the shipped demo, a local folder, or a hub id fetched into the hub's cache.

Everything else in this package works on a local folder. Fetches safetensors, configuration and tokenizer
files only: no pickled weights and no code. Does not read any of them.
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
        weights: fetch the weights too where the model comes from the hub.

    Raises:
        ConfigurationError: neither a folder nor a hub id that can be had.
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
            f"fetched ({type(error).__name__})"
        ) from error
    return Path(snapshot)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep transformers' and the hub's progress bars and advice out of a service's output for a while."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )
    from transformers.utils import logging

    verbosity, hub_bars, bars = (
        logging.get_verbosity(),
        not are_progress_bars_disabled(),
        logging.is_progress_bar_enabled(),
    )
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
