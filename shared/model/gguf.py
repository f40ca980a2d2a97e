"""Makes a folder of a GGUF file, once; afterwards its model is like any other.

    FILE.gguf ──► digest ──► folder in the cache? ──yes────────────────────────────────► folder
                                    └──no──► lock ──► read and expand beside it ──► rename ──┘

Called by `checkpoint.py` for files. The cache is that of models from the hub (`HF_HOME`). transformers reads
the file, with the package gguf; nothing of it is run but the chat template. A router needs no weights, and
gets a folder without them.
"""

from __future__ import annotations

import fcntl
import io
import json
import shutil
import sys
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stderr, suppress
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import structlog
import torch

from kvferry.shared.errors import ConfigurationError, KvferryError, UnsupportedModel
from kvferry.shared.model.checkpoint import file_digest, quiet_libraries
from kvferry.shared.model.download import check_room

_FORMAT = b"kvferry-gguf-1"
"""Changes whenever files are converted differently."""
_HEAD_BYTES = 64 << 20
"""The beginning of a large file, which its digest covers whole: vocabulary, chat template, list of
tensors."""
_ENDS = ("eos", "eot", "eom")
_ROTARY_FACTORS = "rope_freqs.weight"
_PROBE = "kvferry"

log = structlog.get_logger(__name__)


def gguf_folder(file: Path, *, weights: bool) -> Path:
    """Return the folder of a GGUF file's model, made if missing: configuration, tokenizer and chat template.

    Args: weights: also the weights, as safetensors. They have the file's dtype; quantised ones are bfloat16.

    Raises:
        ConfigurationError: there is no such file, it is not whole, or packages or room for it are missing.
        UnsupportedModel: transformers does not read it, or not all of it.
    """
    from huggingface_hub.constants import HF_HOME

    if not file.is_file():
        raise ConfigurationError(f"model is {str(file)!r}; there is no such file")
    cache = Path(HF_HOME) / "kvferry"
    try:
        name = sha256(_FORMAT + file_digest(file, head_bytes=_HEAD_BYTES)).hexdigest()[:20]
        whole = cache / f"gguf-{name}"
        folder = whole if weights or whole.is_dir() else cache / f"gguf-{name}-text"
        if folder.is_dir():
            return folder
        cache.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                _make(file, folder, weights=weights)
    except OSError as error:
        raise ConfigurationError(
            f"model {str(file)!r} cannot be read into {cache}: {error}; HF_HOME names another folder"
        ) from error
    return folder


def _make(file: Path, folder: Path, *, weights: bool) -> None:
    """Make the folder, whole or not at all. Call with its lock."""
    missing = [name for name in ("accelerate", "gguf") if find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"model is {str(file)!r}, and to read it {' and '.join(missing)} must be installed: "
            "pip install 'kvferry[gguf]'"
        )
    partial = folder.with_suffix(".part")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir()
    log.info("reading a GGUF file, once", file=str(file), folder=str(folder))
    # transformers shows a bar, terminal or not
    shown = nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())
    try:
        with quiet_libraries(), shown:
            _write(file.resolve(), partial, weights=weights)
        partial.rename(folder)
    except (KvferryError, OSError):
        raise
    except Exception as error:  # each architecture is read in its own way
        raise UnsupportedModel(
            f"model {str(file)!r} is none that transformers reads from a GGUF file: {error}"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(file: Path, folder: Path, *, weights: bool) -> None:
    """Write a file's model into an empty folder.

    The file is named by its path, and the folder is empty, so nothing that lies beside the file is read.
    """
    from transformers import AutoConfig, AutoTokenizer

    metadata, tensors = _read(file)
    read = {"gguf_file": str(file), "trust_remote_code": False, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(folder, **read)
    config = AutoConfig.from_pretrained(folder, **read)
    _scale_positions(config, metadata, tensors)
    kinds = {tensor.tensor_type.name for tensor in tensors.values()} - {"F32"}  # norms are F32 in any file
    config.dtype = torch.float32 if not kinds else torch.float16 if kinds == {"F16"} else torch.bfloat16
    tokenizer.save_pretrained(folder)
    if weights:
        num_bytes = sum(tensor.n_elements for tensor in tensors.values()) * config.dtype.itemsize
        check_room(str(file), num_bytes, folder)
        _load(folder, config, read).save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    described.pop("transformers_version", None)  # the fingerprint must not depend on the version
    (folder / "config.json").write_text(json.dumps(described, indent=2), encoding="utf-8")
    ends = json.dumps({"eos_token_id": _ends(tokenizer, metadata)})
    (folder / "generation_config.json").write_text(ends, encoding="utf-8")


def _read(file: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Read a file's metadata, and its tensors as the package gguf describes them, by name.

    Raises: ConfigurationError: it is not complete.
    """
    from gguf import GGUFReader
    from transformers.integrations.gguf.reader import read_gguf_metadata

    try:
        # First, because the other reader reads as far as a broken file says, beyond its end.
        metadata, _ = read_gguf_metadata(str(file))
        return metadata, {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    except OSError:
        raise
    except Exception as error:  # neither reader has its own error classes
        raise ConfigurationError(f"model {str(file)!r} is no whole GGUF file: {error}") from error


def _load(folder: Path, config: Any, read: Mapping[str, Any]) -> Any:
    """Load the model in full precision. Raises: ConfigurationError: the file lacks tensors."""
    from transformers import AutoModelForCausalLM, GgufConfig

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=config.dtype,
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
        **read,
    )
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise ConfigurationError(
            f"model {read['gguf_file']!r} lacks {len(missing)} tensors, {missing[0]!r} among them"
        )
    # transformers does not save a model that it has marked as quantised
    model.hf_quantizer = None
    model.config.__dict__.pop("quantization_config", None)
    return model


def _scale_positions(config: Any, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Add a file's scaling of rotary positions, which transformers ignores, to a configuration.

    Llama 3's divide each frequency by a factor of its own, as `longrope` with one table does.

    Raises: ValueError: they are scaled in another way.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kind = metadata.get(f"{metadata['general.architecture']}.rope.scaling.type") or "none"
    if rope.get("rope_type", "default") != "default":
        return
    if kind != "none" or "rope_factors_long.weight" in tensors:
        raise ValueError(f"its rotary positions are scaled ({kind}); use the model's safetensors")
    if _ROTARY_FACTORS in tensors and "rope_type" in rope:
        factors = tensors[_ROTARY_FACTORS].data.tolist()
        length = config.max_position_embeddings
        rope |= {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
        rope |= {"attention_factor": 1.0, "original_max_position_embeddings": length}


def _ends(tokenizer: Any, metadata: Mapping[str, Any]) -> list[int]:
    """Return the ids that end an answer: those that a file names, and the token that its chat template writes
    after an answer. Files may name only the end of a text."""
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _ENDS]
    with suppress(Exception):  # the template is the file's program
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}]
        rest = tokenizer.apply_chat_template(turns, tokenize=False).rpartition(_PROBE)[2].lstrip()
        special = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        ids.append(special[max(filter(rest.startswith, special), key=len)])
    return list(dict.fromkeys(token_id for token_id in ids if isinstance(token_id, int)))
