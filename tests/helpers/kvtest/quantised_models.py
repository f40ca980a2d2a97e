"""Tiny checkpoints with quantised weights, each made by the library that such checkpoints come from.

`pip install 'kvferry[quant]'` installs the libraries.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from kvferry.shared.model.checkpoint import quiet_libraries
from kvtest.tiny_models import make_config, save_model

DTYPE = torch.float32
_GROUP_SIZE = 32


def _bitsandbytes(**settings: Any) -> Callable[[], Any]:
    return lambda: BitsAndBytesConfig(**settings)


def _torchao(name: str, **settings: Any) -> Callable[[], Any]:
    def make() -> Any:
        import torchao.quantization

        return TorchAoConfig(getattr(torchao.quantization, name)(**settings))

    return make


_CONFIGS: Mapping[str, Callable[[], Any]] = {
    "bitsandbytes int8": _bitsandbytes(load_in_8bit=True),
    "bitsandbytes nf4": _bitsandbytes(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=DTYPE
    ),
    "bitsandbytes fp4": _bitsandbytes(
        load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=DTYPE
    ),
    "torchao int8 weight only": _torchao("Int8WeightOnlyConfig"),
    "torchao int8 dynamic activation int8 weight": _torchao("Int8DynamicActivationInt8WeightConfig"),
    "torchao float8 weight only": _torchao("Float8WeightOnlyConfig"),
    "torchao intx weight only": _torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4),
}
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": _GROUP_SIZE}
_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
_PER_TOKEN = {"strategy": "token", "dynamic": True}
_SCHEMES: Mapping[str, Mapping[str, Any]] = {
    "compressed-tensors int8": {"weights": _INT8},
    "compressed-tensors int4": {"weights": _INT4},
    "compressed-tensors float8": {"weights": _FLOAT8},
    "compressed-tensors int8, int8 activations": {
        "weights": _INT8,
        "input_activations": {**_INT8, **_PER_TOKEN},
    },
    "compressed-tensors float8, float8 activations": {
        "weights": _FLOAT8,
        "input_activations": {**_FLOAT8, **_PER_TOKEN},
    },
}
ACTIVATIONS = (
    "bitsandbytes int8",
    "torchao int8 dynamic activation int8 weight",
    "compressed-tensors int8, int8 activations",
    "compressed-tensors float8, float8 activations",
)
"""Those that quantise activations, too. A difference of rounding may become one of a quantisation step."""
WEIGHT_ONLY = tuple(kind for kind in (*_CONFIGS, *_SCHEMES) if kind not in ACTIVATIONS)


def save_quantised(kind: str, folder: Path, config: Any = None) -> Path:
    """Write a random model with the demo tokenizer and weights of this kind; returns the folder."""
    config = config or make_config("llama", hidden_size=128, intermediate_size=256)
    save_model(config, folder, dtype=DTYPE)
    with tempfile.TemporaryDirectory() as whole, quiet_libraries():
        save_model(config, Path(whole), dtype=DTYPE)
        if kind in _CONFIGS:
            settings = _CONFIGS[kind]()
            AutoModelForCausalLM.from_pretrained(
                whole, dtype=DTYPE, quantization_config=settings
            ).save_pretrained(folder)
        else:
            _compress(AutoModelForCausalLM.from_pretrained(whole, dtype=DTYPE), _SCHEMES[kind], folder)
    return folder


def _compress(model: Any, scheme: Mapping[str, Any], folder: Path) -> None:
    """Round the weights to the nearest value of the scheme, with the scales of their extremes."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams

    groups = {"group_0": {"targets": ["Linear"], **scheme}}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            arguments = module.quantization_scheme.weights
            rows = module.weight.detach()
            grouped = rows.unflatten(1, (-1, arguments.group_size or rows.shape[1]))
            scale, _ = calculate_qparams(grouped.amin(-1), grouped.amax(-1), arguments)
            module.weight_scale.data.copy_(scale)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
