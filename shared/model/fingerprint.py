"""A model's identity: two workers may exchange KV only if their fingerprints agree.

It is a sha256 over the compute dtype, the configuration and the weights. A weight file of at most 256 MiB is
read whole. Of a larger one, the digest covers its size, its safetensors header (names, dtypes, shapes and
offsets of every tensor) and 64 evenly spaced chunks of 1 MiB, including the first and the last data, so that
a start need not read tens of gigabytes twice. A fine-tuned or requantized checkpoint changes tensors
throughout and so differs; a change only between the chunks is not detected. File names and the folder's path
are not included. This is no protection against forgery.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from kvferry.shared.errors import ConfigurationError

_WHOLE_FILE_BYTES = 256 << 20
_CHUNK_BYTES = 1 << 20
_NUM_CHUNKS = 64
_MAX_HEADER_BYTES = 100 << 20


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the model, sorted by name.

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


def model_fingerprint(folder: Path, *, dtype: str) -> str:
    """64 hex digits over dtype, configuration and weights.

    Raises: ConfigurationError if a weight file is missing or has no safetensors header.
    """
    digest = hashlib.sha256(f"kvferry-model-1\0{dtype}\0".encode())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    digest.update(json.dumps(config, sort_keys=True).encode())
    for file in weight_files(folder):
        digest.update(_file_digest(file))
    return digest.hexdigest()


def _file_digest(file: Path) -> bytes:
    size_bytes = file.stat().st_size
    digest = hashlib.sha256(size_bytes.to_bytes(8, "little"))
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if not 0 < header_bytes <= min(_MAX_HEADER_BYTES, size_bytes - 8):
            raise ConfigurationError(f"{file.name} is not a safetensors file: header of {header_bytes} bytes")
        stream.seek(0)
        if size_bytes <= _WHOLE_FILE_BYTES:
            while block := stream.read(_CHUNK_BYTES):
                digest.update(block)
            return digest.digest()
        digest.update(stream.read(8 + header_bytes))
        last = size_bytes - _CHUNK_BYTES
        for rank in range(_NUM_CHUNKS):
            stream.seek(8 + header_bytes + (last - 8 - header_bytes) * rank // (_NUM_CHUNKS - 1))
            digest.update(stream.read(_CHUNK_BYTES))
    return digest.digest()
