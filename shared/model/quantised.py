"""Checkpoints with quantised weights: what they are called, and what loading them needs.

Called by `loading.py` before weights are read. transformers loads such weights with the library that made
them, straight to the device. Weights are refused if their library is missing, or if transformers would expand
them to full precision on this device.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from kvferry.shared.errors import ConfigurationError, UnsupportedModel
from kvferry.shared.model.spec import TORCH_DTYPES

_QUANT = "'kvferry[quant]'"


@dataclass(frozen=True)
class _Library:
    """The library that loads weights of one kind.

    Attributes:
        modules: those that must be installed.
        packages: those that have the modules, as pip takes them.
    """

    modules: tuple[str, ...]
    packages: str


LIBRARIES: Mapping[str, _Library] = {
    "compressed-tensors": _Library(("compressed_tensors", "accelerate"), _QUANT),
    "torchao": _Library(("torchao", "accelerate"), _QUANT),
    "bitsandbytes": _Library(("bitsandbytes", "accelerate"), _QUANT),
    "gptq": _Library(("gptqmodel", "optimum", "accelerate"), "gptqmodel optimum accelerate"),
    "awq": _Library(("gptqmodel", "accelerate"), "gptqmodel accelerate"),
    "auto-round": _Library(("auto_round", "accelerate"), "auto-round accelerate"),
    "fp8": _Library(("kernels", "accelerate"), "kernels accelerate"),
    "mxfp8": _Library(("kernels", "accelerate"), "kernels accelerate"),
    "mxfp4": _Library(("kernels", "triton", "accelerate"), "kernels triton accelerate"),
    "fbgemm_fp8": _Library(("fbgemm_gpu", "accelerate"), "fbgemm-gpu-genai accelerate"),
    "aqlm": _Library(("aqlm", "accelerate"), "'aqlm[gpu,cpu]' accelerate"),
    "bitnet": _Library(("accelerate",), "accelerate"),
    "eetq": _Library(("kernels", "accelerate"), "kernels accelerate"),
    "hqq": _Library(("hqq", "accelerate"), "hqq accelerate"),
    "quark": _Library(("quark", "accelerate"), "amd-quark accelerate"),
    "spqr": _Library(("spqr_quant", "accelerate"), "'spqr_quant[gpu]' accelerate"),
    "vptq": _Library(("vptq", "accelerate"), "vptq accelerate"),
}
"""By `quant_method`. Tests check the first five against `generate`, of which two need gptqmodel."""


@dataclass(frozen=True, kw_only=True)
class Quantisation:
    """How a checkpoint's weights are quantised.

    Attributes:
        method: `quant_method` of its configuration.
        kind: method and data types, for people: "bitsandbytes nf4".
    """

    method: str
    kind: str

    @property
    def takes_any_dtype(self) -> bool:
        """Return whether the model may compute in another dtype than that in which its weights were made."""
        return self.method == "compressed-tensors"


def find_quantisation(config: Any) -> Quantisation | None:
    """Find how the weights are quantised according to a transformers configuration; None if they are not."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    found = dict(settings) if isinstance(settings, Mapping) else settings.to_dict()
    method = found.get("quant_method")
    if found.get("load_in_8bit") or found.get("load_in_4bit"):
        method = "bitsandbytes"
    method = str(getattr(method, "value", method))
    return Quantisation(method=method, kind=" ".join([method, *_data_types(method, found)]))


def _data_types(method: str, found: Mapping[str, Any]) -> list[str]:
    if method == "bitsandbytes":
        return [str(found.get("bnb_4bit_quant_type", "fp4")) if found.get("load_in_4bit") else "int8"]
    if method == "torchao":
        name = str(((found.get("quant_type") or {}).get("default") or {}).get("_type", ""))
        return [re.sub(r"(?<!^)(?=[A-Z])", " ", name.removesuffix("Config")).lower()] if name else []
    if method == "compressed-tensors":
        groups = list((found.get("config_groups") or {}).values())
        weights, activations = (_of_groups(groups, part) for part in ("weights", "input_activations"))
        return [f"{' '.join(weights)}, {' '.join(activations)} activations"] if activations else weights
    return [f"int{found['bits']}"] if isinstance(found.get("bits"), int) else []


def _of_groups(groups: list[Mapping[str, Any]], part: str) -> list[str]:
    """Return the data types of a part of compressed-tensors' groups, each once."""
    parts = [group.get(part) or {} for group in groups]
    return list(dict.fromkeys(f"{each['type']}{each['num_bits']}" for each in parts if "num_bits" in each))


def check_quantisation(config: Any, quantisation: Quantisation, *, device: torch.device, dtype: str) -> None:
    """Check that the weights can be loaded as they are.

    Args:
        config: a transformers configuration; its scales for a quantised KV cache are removed, because KV is
            stored as the request's method says.
        dtype: as `load_model` takes it.

    Raises:
        ConfigurationError: a package is missing (the message has the command that installs it), or the dtype
            differs from the weights'.
        UnsupportedModel: transformers does not know them, or would expand them on this device.
    """
    _check_installed(quantisation)
    if quantisation.method == "bitsandbytes":  # warns in every matrix product of int8 weights
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    own = str(config.dtype or config.get_text_config().dtype or "").removeprefix("torch.")
    if not quantisation.takes_any_dtype and own in TORCH_DTYPES and dtype not in ("auto", own):
        raise ConfigurationError(
            f"dtype is {dtype!r}; weights quantised by {quantisation.method} are computed with in the dtype "
            f"in which they were made; it must be auto or {own}"
        )
    from transformers.quantizers.auto import AutoHfQuantizer

    settings = config.quantization_config
    if isinstance(settings, dict):
        settings.pop("kv_cache_scheme", None)
    try:
        quantizer = AutoHfQuantizer.from_config(copy.deepcopy(settings), pre_quantized=True)
        quantizer.validate_environment(device_map={"": device})
    except ImportError as error:
        raise ConfigurationError(
            f"the weights are quantised ({quantisation.kind}), and a package for them is missing: {error}"
        ) from error
    except (RuntimeError, ValueError, TypeError, KeyError, AssertionError) as error:
        raise UnsupportedModel(
            f"the weights are quantised ({quantisation.kind}), which does not load on {device}: {error}"
        ) from error
    if getattr(quantizer.quantization_config, "dequantize", False):
        raise UnsupportedModel(
            f"the weights are quantised ({quantisation.kind}), which transformers can not compute with on "
            f"{device} and would expand to full precision; use a checkpoint in full precision or one of "
            "compressed-tensors, torchao or bitsandbytes, or for fp8 a GPU of compute capability 8.9"
        )


def _check_installed(quantisation: Quantisation) -> None:
    library = LIBRARIES.get(quantisation.method)
    if library is None:
        raise UnsupportedModel(
            f"the weights are quantised by {quantisation.method!r}, which is not supported; supported are "
            f"{', '.join(LIBRARIES)}"
        )
    missing = [name for name in library.modules if find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"the weights are quantised ({quantisation.kind}), and {', '.join(missing)} is not installed; "
            f"install it with: pip install {library.packages}"
        )
