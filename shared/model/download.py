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
"""Of the hub's bar that counts bytes on disk, those of an earlier try included."""
_LOG_PERCENT = 10

log = structlog.get_logger(__name__)


def download(model: str, *, weights: bool) -> Path:
    """The folder of a model of the hub, in the hub's cache.

    Args:
        model: `org/name`.
        weights: also its weights.

    Raises: ConfigurationError: the message says what to do.
    """
    from httpx2 import HTTPError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError, HFValidationError

    patterns = [*TEXT_FILES, *(WEIGHT_FILES if weights else ())]
    try:
        try:
            with _progress(None) as bar:
                files = snapshot_download(model, allow_patterns=patterns, dry_run=True, tqdm_class=bar)
        except DryRunError:  # the cache may have it
            return Path(snapshot_download(model, allow_patterns=patterns))
        sizes = [its.file_size or 0 for its in files if its.will_download]
        if sizes:
            _check_room(model, sum(sizes))
        with _progress(_report(model, len(sizes), sum(sizes)) if sizes else None) as bar:
            return Path(snapshot_download(model, allow_patterns=patterns, tqdm_class=bar))
    except (HFValidationError, HTTPError, OSError) as error:
        raise ConfigurationError(_advice(model, error)) from error


def _check_room(model: str, size_bytes: int) -> None:
    from huggingface_hub.constants import HF_HUB_CACHE

    existing = next(its for its in (Path(HF_HUB_CACHE), *Path(HF_HUB_CACHE).parents) if its.exists())
    if (free := shutil.disk_usage(existing).free) < size_bytes:
        raise ConfigurationError(
            f"model {model!r} needs {_size(size_bytes)} in {HF_HUB_CACHE}, which has {_size(free)} free; "
            "make room, or set HF_HOME to a folder that has it"
        )


def _advice(model: str, error: Exception) -> str:
    """One sentence that says what to do."""
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
        return f"model is {model!r}; it must be 'demo', a folder that exists, or a hub id such as org/name"
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


def _report(model: str, num_files: int, size_bytes: int) -> _Report:
    """What shows the progress: a bar on a terminal, else lines in the log."""
    kind = _Bar if sys.stderr.isatty() else _LogLines
    return kind(f"{model}: {num_files} files, {_size(size_bytes)}", size_bytes)


class _Report:
    """Shows the bytes that are there."""

    def __init__(self, what: str, size_bytes: int) -> None:
        self.what, self.size_bytes = what, size_bytes

    def open(self) -> None: ...

    def show(self, num_bytes: int) -> None: ...

    def close(self) -> None: ...


class _LogLines(_Report):
    """A line at the beginning, and one for each tenth."""

    _percent = 0

    def open(self) -> None:
        log.info("downloading", model=self.what)

    def show(self, num_bytes: int) -> None:
        percent = 100 * num_bytes // max(1, self.size_bytes) // _LOG_PERCENT * _LOG_PERCENT
        if percent > self._percent:
            self._percent = percent
            log.info("downloading", model=self.what, percent=percent)


class _Bar(_Report):
    """One bar for all files."""

    def open(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task(self.what, total=self.size_bytes)
        self._progress.start()

    def show(self, num_bytes: int) -> None:
        self._progress.update(self._task, completed=num_bytes)

    def close(self) -> None:
        self._progress.stop()


@contextmanager
def _progress(report: _Report | None) -> Iterator[Any]:
    """A class for the hub's bars, which are not shown, that hands the bytes on to the report."""
    if report is None:
        yield _counter(lambda num_bytes: None)
        return
    report.open()
    try:
        yield _counter(report.show)
    finally:
        report.close()


def _counter(show: Callable[[int], None]) -> Any:
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
    """1.5 GB: of 1000 bytes, as the hub counts."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes} bytes"
