"""Downloads a model from the Hugging Face hub, with its size and progress, or says what to do.

Called by `checkpoint.py` for ids that are no folder. Only safetensors, configuration and tokenizer files are
fetched: no pickled weights and no code. A file whose connection breaks goes on where it stopped; in a later
try, files that are in the hub's cache are not loaded again.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog

from kvferry.shared.errors import ConfigurationError

TEXT_FILES = ("*.json", "*.jinja", "tokenizer.model", "*.txt")
WEIGHT_FILES = ("*.safetensors",)
_BAR_NAME = "huggingface_hub.snapshot_download"
"""The name of the hub's bar that counts bytes on disk, including those of an earlier try."""
_LOG_PERCENT = 10

log = structlog.get_logger(__name__)


def download(model: str, *, weights: bool) -> Path:
    """Download a model of the hub; return its folder in the hub's cache.

    Args:
        model: `org/name`.
        weights: also its weights.

    Raises: ConfigurationError: the message says what to do.
    """
    from httpx2 import HTTPError
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import DryRunError, HFValidationError

    patterns = [*TEXT_FILES, *(WEIGHT_FILES if weights else ())]
    try:
        try:
            bar = _counter(lambda num_bytes: None)
            files = snapshot_download(model, allow_patterns=patterns, dry_run=True, tqdm_class=bar)
        except DryRunError:  # the cache may have it
            return Path(snapshot_download(model, allow_patterns=patterns))
        sizes = [file.file_size or 0 for file in files if file.will_download]
        if not sizes:
            return Path(snapshot_download(model, allow_patterns=patterns, tqdm_class=bar))
        check_room(model, sum(sizes), Path(HF_HUB_CACHE))
        with _shown(f"{model}: {len(sizes)} files, {_size(sum(sizes))}", sum(sizes)) as show:
            return Path(snapshot_download(model, allow_patterns=patterns, tqdm_class=_counter(show)))
    except (HFValidationError, HTTPError, OSError) as error:
        raise ConfigurationError(_advice(model, error)) from error


def check_room(model: str, size_bytes: int, folder: Path) -> None:
    """Check for room. Raises: ConfigurationError: a folder of the cache has less than `size_bytes` free."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if (free := shutil.disk_usage(existing).free) < size_bytes:
        raise ConfigurationError(
            f"model {model!r} needs {_size(size_bytes)} in {folder}, which has {_size(free)} free; "
            "make room, or set HF_HOME to a folder that has it"
        )


def _advice(model: str, error: Exception) -> str:
    """Return one sentence that says what to do."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        IncompleteSnapshotError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    token = "the token in use is of an account without access" if get_token() else "set HF_TOKEN to its token"
    if isinstance(error, HFValidationError):
        return (
            f"model is {model!r}; it must be 'demo', 'smollm2', a folder or GGUF file that exists, or a hub "
            "id such as org/name"
        )
    if isinstance(error, GatedRepoError):
        return f"model {model!r} is gated: accept its terms at {hub}/{model} with an account; {token}"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"model is {model!r}, which is no folder, and {hub} has no such model, or a private one; check "
            f"the id, or for a private model: {token}"
        )
    if isinstance(error, LocalEntryNotFoundError):
        found = "only a part of it is" if isinstance(error, IncompleteSnapshotError) else "it is not"
        if constants.HF_HUB_OFFLINE:
            return (
                f"model is {model!r}, which is no folder; {found} in {cache}, and HF_HUB_OFFLINE is set; "
                "unset it, or give the model's folder"
            )
        return (
            f"model is {model!r}, which is no folder; {found} in {cache}, and {hub} can not be reached; "
            "check the network and its proxy, set HF_ENDPOINT to a mirror, or give the model's folder"
        )
    return (
        f"the download of model {model!r} from {hub} broke off ({type(error).__name__}: {error}); start "
        "again: files that are complete are not loaded again"
    )


@contextmanager
def _shown(what: str, size_bytes: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows how many bytes are there: a bar on a terminal, else a log line for each
    tenth."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

        columns = (*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task(what, total=size_bytes)
            yield lambda num_bytes: progress.update(task, completed=num_bytes)
        return
    log.info("downloading", model=what)
    shown = 0

    def show(num_bytes: int) -> None:
        nonlocal shown
        percent = 100 * num_bytes // max(1, size_bytes) // _LOG_PERCENT * _LOG_PERCENT
        if percent > shown:
            shown = percent
            log.info("downloading", model=what, percent=percent)

    yield show


def _counter(show: Callable[[int], None]) -> Any:
    """Make a class for the hub's bars, which are not shown, that passes their bytes to `show`."""
    from huggingface_hub.utils.tqdm import tqdm

    class Counter(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._num_bytes: int | None = 0 if kwargs.get("name") == _BAR_NAME else None
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            if self._num_bytes is not None:
                self._num_bytes += int(n or 0)
                show(self._num_bytes)

    return Counter


def _size(num_bytes: int) -> str:
    """Format a size in units of 1000 bytes, as the hub counts: 1.5 GB."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes} bytes"
