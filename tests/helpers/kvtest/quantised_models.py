"""Tiny checkpoints with quantised weights, each made by the library that such checkpoints come from.

`pip install 'kvferry[quant]'` installs the libraries.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from kvferry.shared.model.checkpoint import quiet_libraries
from kvtest.tiny_models import copy_tokenizer, make_config, save_model
from kvtest.transformers_model import prompt_of

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
_FLOAT8_BLOCKS = {**_FLOAT8, "strategy": "block", "block_structure": [_GROUP_SIZE, _GROUP_SIZE]}
_PER_TENSOR = {"strategy": "tensor", "dynamic": False}
_PER_GROUP = {"strategy": "group", "group_size": _GROUP_SIZE, "dynamic": True}
_FLOAT4 = {  # NVFP4: a scale for the tensor, and one of float8 for each 16 values
    **{"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16},
    "scale_dtype": torch.float8_e4m3fn,
}
_MXFP8 = {  # microscaling: powers of two are the scales
    **{"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32},
    "scale_dtype": torch.uint8,
}
_SCHEMES: Mapping[str, Mapping[str, Any]] = {
    "compressed-tensors int8": {"weights": _INT8},
    "compressed-tensors int4": {"weights": _INT4},
    "compressed-tensors float8": {"weights": _FLOAT8},
    "compressed-tensors float4": {"weights": _FLOAT4},
    "compressed-tensors int8, int8 activations": {
        "weights": _INT8,
        "input_activations": {**_INT8, **_PER_TOKEN},
    },
    "compressed-tensors float8, float8 activations": {
        "weights": _FLOAT8,
        "input_activations": {**_FLOAT8, **_PER_TOKEN},
    },
    "compressed-tensors float8, static float8 activations": {
        "weights": {**_FLOAT8, **_PER_TENSOR},
        "input_activations": {**_FLOAT8, **_PER_TENSOR},
    },
    "compressed-tensors float8 blocks, float8 activations": {
        "weights": _FLOAT8_BLOCKS,
        "input_activations": {**_FLOAT8, **_PER_GROUP},
    },
    "compressed-tensors float4, float4 activations": {
        "weights": _FLOAT4,
        "input_activations": {**_FLOAT4, "dynamic": "local"},
    },
    "compressed-tensors mxfp8, mxfp8 activations": {
        "weights": _MXFP8,
        "input_activations": {**_MXFP8, "dynamic": True},
    },
}
ACTIVATIONS = (
    "bitsandbytes int8",
    "torchao int8 dynamic activation int8 weight",
    "compressed-tensors int8, int8 activations",
    "compressed-tensors float8, float8 activations",
    "compressed-tensors float8, static float8 activations",
    "compressed-tensors float8 blocks, float8 activations",
    "compressed-tensors float4, float4 activations",
    "compressed-tensors mxfp8, mxfp8 activations",
)
"""Those that quantise activations, too. A difference of rounding may become one of a quantisation step."""
WEIGHT_ONLY = tuple(kind for kind in (*_CONFIGS, *_SCHEMES) if kind not in ACTIVATIONS)
ONE_OF_EACH_LIBRARY = ("bitsandbytes nf4", "torchao int8 weight only", "compressed-tensors int4")
"""Of those that quantise weights alone."""


def save_quantised(kind: str, folder: Path, config: Any = None) -> Path:
    """Write a random model with the demo tokenizer and weights of this kind; returns the folder."""
    config = config or make_config("llama", hidden_size=128, intermediate_size=256)
    with tempfile.TemporaryDirectory() as whole, quiet_libraries():
        save_model(config, Path(whole), dtype=DTYPE)
        copy_tokenizer(folder)
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

    extremes = _input_extremes(model)
    groups = {"group_0": {"targets": ["Linear"], **scheme}}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    for name, module in model.named_modules():
        if hasattr(module, "quantization_scheme"):
            applied = module.quantization_scheme
            _set_scales(
                module, "weight", applied.weights, _in_groups(module.weight.detach(), applied.weights)
            )
            if applied.input_activations and applied.input_activations.dynamic is not True:
                _set_scales(module, "input", applied.input_activations, extremes[name])
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))


def _input_extremes(model: Any) -> dict[str, Tensor]:
    """Of each linear module, the largest absolute input in a pass, and its negative: `[1, 2]`."""
    extremes: dict[str, Tensor] = {}
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):

            def see(_: Any, inputs: tuple[Tensor, ...], name: str = name) -> None:
                largest = inputs[0].abs().max()
                extremes[name] = torch.stack([-largest, largest])[None]

            hooks.append(module.register_forward_pre_hook(see))
    with torch.inference_mode():
        model(torch.tensor([prompt_of(64, seed=9)]))
    for hook in hooks:
        hook.remove()
    return extremes


def _in_groups(weight: Tensor, arguments: Any) -> Tensor:
    """The weights that share a scale, in the last dimension; those before it are the scale's."""
    if arguments.strategy == "tensor":
        return weight.view(1, -1)
    if arguments.strategy == "block":
        rows, columns = arguments.block_structure
        blocks = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        return blocks.transpose(1, 2).flatten(2)
    return weight.unflatten(1, (-1, arguments.group_size or weight.shape[1]))


def _set_scales(module: Any, name: str, arguments: Any, grouped: Tensor) -> None:
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    whole = getattr(module, f"{name}_global_scale", None)
    if whole is not None:
        whole.data.copy_(generate_gparam(grouped.min(), grouped.max()))
    if arguments.dynamic is False:
        scale, _ = calculate_qparams(grouped.amin(-1), grouped.amax(-1), arguments, global_scale=whole)
        getattr(module, f"{name}_scale").data.copy_(scale)
