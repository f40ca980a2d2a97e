"""Loads a model: finds its files, refuses unsupported models, registers our attention, builds its spec.

Called once when a worker starts. It loads safetensors only: no code from the checkpoint and no pickle.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvferry.shared.errors import ConfigurationError, UnsupportedModel
from kvferry.shared.model.adapters import adapt
from kvferry.shared.model.adapters.compressed import keep_compressed
from kvferry.shared.model.bridge import ATTENTION_NAME, TransformersModel, attention_forward
from kvferry.shared.model.checkpoint import (
    model_fingerprint,
    quiet_libraries,
    read_eos_token_ids,
    resolve_model_path,
    weight_files,
)
from kvferry.shared.model.flash_attention import use_flash_attention_3
from kvferry.shared.model.fused_decode import has_known_modules
from kvferry.shared.model.narrow import multiplies_in_bfloat16, narrow
from kvferry.shared.model.parallel.ranks import Ranks
from kvferry.shared.model.probe import probed_model
from kvferry.shared.model.quantised import check_quantisation, find_quantisation
from kvferry.shared.model.spec import TORCH_DTYPES, DTypeName, ModelSpec, dtype_name
from kvferry.shared.model.support import check_config, check_parallel


def load_model(
    path_or_id: str | Path,
    *,
    name: str = "",
    device: str = "auto",
    dtype: str = "auto",
    max_model_len: int = 0,
    ranks: Ranks | None = None,
) -> TransformersModel:
    """Load a model for prefill or decode.

    Args:
        path_or_id: as `resolve_model_path` takes it.
        name: public model id; the folder's or id's last part if empty.
        device: "auto" (CUDA where there is one), "cpu", "cuda" or "cuda:N".
        dtype: "auto" (float32 on CPU, the checkpoint's own on CUDA), "float32", "float16" or "bfloat16". For
            quantised weights "auto" is the checkpoint's own, except with compressed-tensors. With "auto" the
            products of a checkpoint in bfloat16 may use bfloat16 on a CPU, too (`narrow.py`).
        max_model_len: context window in tokens; 0 takes the model's own.
        ranks: load one rank's part of the model, which the spec then describes; its passes need all ranks.

    Raises:
        ConfigurationError: there is no such model, device or dtype, or its weights are incomplete.
        UnsupportedModel: the model needs an unsupported feature; the message names it.
    """
    target = _resolve_device(device) if ranks is None else ranks.device
    if dtype != "auto" and dtype not in TORCH_DTYPES:
        raise ConfigurationError(f"dtype is {dtype!r}; it must be auto, {', '.join(TORCH_DTYPES)}")
    folder = resolve_model_path(path_or_id, weights=True)
    weight_files(folder)
    with quiet_libraries():
        config = _load_config(folder, str(path_or_id))
        quantised = find_quantisation(config)
        if quantised is not None:
            check_quantisation(config, quantised, device=target, dtype=dtype)
        text_config, is_narrow = config.get_text_config(), False
        # before the weights are loaded, which changes the configuration's dtype to the compute dtype
        own_dtype = _own_dtype(config)
        if dtype == "auto" and target.type == "cpu" and (quantised is None or quantised.takes_any_dtype):
            dtype = "float32"
            is_narrow = own_dtype == "bfloat16" and quantised is None and multiplies_in_bfloat16()
        own_len = int(getattr(text_config, "max_position_embeddings", None) or 0)
        layers = check_config(config, max_model_len=max_model_len or own_len)
        if ranks is not None:
            check_parallel(config, ranks.num_ranks, is_quantised=quantised is not None)
        max_model_len = _resolve_max_model_len(text_config, max_model_len, own_len)
        rope = _make_rope_static(text_config, max_model_len)
        if target.type == "cuda":
            _prepare_cuda(target)
        num_ranks = 1 if ranks is None else ranks.num_ranks
        model = _load_weights(
            folder, config, dtype, target, is_quantised=quantised is not None, num_ranks=num_ranks
        )
        if quantised is not None and quantised.method == "compressed-tensors":
            keep_compressed(model)
        adapt(model)
        if is_narrow and has_known_modules(model):
            narrow(model)
        if ranks is not None:
            ranks.loaded()
        loaded_dtype = dtype_name(model.dtype)
        spec = ModelSpec(
            name=name or Path(path_or_id).name,
            fingerprint=model_fingerprint(folder, dtype=loaded_dtype, rope=rope),
            num_layers=len(layers) or int(text_config.num_hidden_layers),
            num_heads=0,
            num_kv_heads=0,
            head_dim=0,
            vocab_size=int(text_config.vocab_size),
            max_model_len=max_model_len,
            dtype=loaded_dtype,
            eos_token_ids=_eos_token_ids(folder),
            layers=layers,
            weights=loaded_dtype if quantised is None else quantised.kind,
            checkpoint_dtype=own_dtype,
        )
        return probed_model(model, spec)


def checkpoint_dtype(path_or_id: str | Path) -> DTypeName:
    """Return the dtype of a checkpoint's weights according to its configuration; no weights are loaded.

    Raises:
        ConfigurationError: there is no such model, or its configuration names another dtype or none.
    """
    folder = resolve_model_path(path_or_id, weights=False)
    with quiet_libraries():
        config = _load_config(folder, str(path_or_id))
    return dtype_name(config.dtype or config.get_text_config().dtype)


def _own_dtype(config: Any) -> DTypeName | None:
    """Return the dtype that a configuration names; None if it names none that models may have."""
    with suppress(ConfigurationError):
        return dtype_name(config.dtype or config.get_text_config().dtype)
    return None


def _load_config(folder: Path, path_or_id: str) -> Any:
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ConfigurationError(f"model {path_or_id!r} has no config.json")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except OSError as error:
        raise ConfigurationError(f"config.json of {path_or_id!r} does not load: {error}") from error
    except (KeyError, ValueError) as error:
        raise UnsupportedModel(
            f"model {path_or_id!r} is of a type that transformers does not know without its own code: {error}"
        ) from error
    except Exception as error:  # each type's configuration has its own checks
        raise ConfigurationError(f"config.json of {path_or_id!r} is not valid: {error}") from error


def _load_weights(
    folder: Path, config: Any, dtype: str, device: torch.device, *, is_quantised: bool, num_ranks: int
) -> Any:
    from safetensors import SafetensorError
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    options: dict[str, Any] = {}
    if is_quantised:  # quantised weights go straight to the device; this needs accelerate
        options["device_map"] = {"": device}
    if num_ranks > 1:  # each rank reads its part only, as transformers' tp_plan divides the model
        options["distributed_config"] = _distributed_config(num_ranks)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype if dtype == "auto" else TORCH_DTYPES[dtype],
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
    except (OSError, ImportError, RuntimeError, SafetensorError) as error:
        raise ConfigurationError(f"weights in {folder} do not load: {error}") from error
    except ValueError as error:
        raise UnsupportedModel(f"model type {config.model_type!r} does not load: {error}") from error
    model, info = loaded
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ConfigurationError(
            f"weights in {folder} lack {len(missing)} tensors, {missing[0]!r} among them"
        )
    model = model.eval().requires_grad_(False)
    if num_ranks > 1:
        _use_local_weights(model)
    return model if is_quantised else model.to(device)


def _distributed_config(num_ranks: int) -> Any:
    """Make transformers' configuration of `num_ranks` ranks.

    Raises: ConfigurationError: transformers is too old.
    """
    try:
        from transformers.distributed.configuration_utils import DistributedConfig

        return DistributedConfig(tp_size=num_ranks)
    except (ImportError, TypeError) as error:
        raise ConfigurationError(
            f"tensor_parallel is {num_ranks}, and the installed transformers cannot divide a model with a "
            "DistributedConfig; install a newer one, or set tensor_parallel to 1"
        ) from error


def _use_local_weights(model: Any) -> None:
    """Replace the linear modules' distributed tensors by this rank's part, which saves a conversion in every
    call. transformers' own hooks of these modules exchange what is needed."""
    from torch.distributed.tensor import DTensor

    for module in model.modules():
        if isinstance(module, nn.Linear):
            for name, weight in module.named_parameters(recurse=False):
                if isinstance(weight, DTensor):
                    module._parameters[name] = nn.Parameter(weight.to_local(), requires_grad=False)


def _resolve_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not (kind == "cuda" and index.isdecimal())):
        raise ConfigurationError(f"device is {device!r}; it must be auto, cpu, cuda or cuda:N")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(f"device is {device!r}; there are {torch.cuda.device_count()} CUDA devices")
    return torch.device(device)


def _prepare_cuda(device: torch.device) -> None:
    """Set up the process for our kernels and for prompts of ever new lengths."""
    # Triton launches on the thread's current device; "cuda" without a number means that device.
    if device.index is not None:
        torch.cuda.set_device(device)
    # On the newest GPUs torch prefers cuDNN's attention, which builds and caches a plan for every length.
    torch.backends.cuda.enable_cudnn_sdp(False)
    use_flash_attention_3(device)


def _make_rope_static(config: Any, max_model_len: int) -> str:
    """Replace rotary positions that depend on the length. They would change keys that are stored already, and
    a GPU would have to be synchronized at every step.

    `dynamic` ones become the default ones, which are equal within the original window; `check_config`
    enforces it. Of the two tables of `longrope`, the long one is taken if the served window is longer than
    the original one, else the short one.

    Deviation: transformers takes the long table for sequences beyond the original window only; so with a
        longer window, shorter sequences differ from transformers. (vLLM does the same.)

    Returns: what was chosen, which is part of the model's identity; "" if there was no choice.
    """
    rope, chosen = getattr(config, "rope_parameters", None) or {}, ""
    for part in [rope] if "rope_type" in rope else [part for part in rope.values() if part]:
        if part["rope_type"] == "dynamic":
            part["rope_type"] = "default"
            part.pop("factor", None)
        elif part["rope_type"] == "longrope":
            original = part.get("original_max_position_embeddings") or config.max_position_embeddings
            chosen = "long" if max_model_len > original else "short"
            part["long_factor"] = part["short_factor"] = part[f"{chosen}_factor"]
    return chosen


def _resolve_max_model_len(config: Any, requested: int, own: int) -> int:
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("factor") and rope.get("original_max_position_embeddings"):
        limit = max(own, int(rope["factor"] * rope["original_max_position_embeddings"]))
    elif rope.get("rope_type") == "linear":
        limit = int(own * rope["factor"])
    else:
        limit = own
    if not own:
        if requested < 1:
            raise ConfigurationError(
                f"max_model_len is {requested}, and the model's configuration has no limit; it must be at "
                "least 1"
            )
        return requested
    if not 0 <= requested <= limit:
        raise ConfigurationError(f"max_model_len is {requested}; it must be in 1..{limit}, or 0 for {own}")
    return requested or own


def _eos_token_ids(folder: Path) -> tuple[int, ...]:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError):
        tokenizer = None
    return read_eos_token_ids(folder, tokenizer)
