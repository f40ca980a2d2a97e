"""For weights quantised by compressed-tensors, which expands all of them for good in the first pass.

Here each module expands its weight when it runs, and drops it again. The results are the same.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvferry.shared.errors import UnsupportedModel


def keep_compressed(model: Any) -> None:
    """Let every compressed module run with its weights as they are stored.

    Raises: UnsupportedModel: a module that is neither linear nor an embedding is compressed.
    """
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationStatus

    model.hf_quantizer.compressor.remove_decompression_hook(model)
    for name, module in model.named_modules():
        if getattr(module, "quantization_status", None) != QuantizationStatus.COMPRESSED:
            continue
        if type(module) not in (nn.Linear, nn.Embedding):
            raise UnsupportedModel(
                f"{name} is a {type(module).__name__} with compressed weights; they may be of nn.Linear and "
                "nn.Embedding"
            )
        compressor = BaseCompressor.get_value_from_registry(module.quantization_scheme.format.value)
        module.forward = partial(_forward, module, compressor, model.dtype)


def _forward(module: Any, compressor: Any, dtype: torch.dtype, inputs: Tensor) -> Tensor:
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize
    from compressed_tensors.utils import get_direct_state_dict

    scheme = module.quantization_scheme
    # float4 and microscaling formats expand to bfloat16, whatever the model's compute dtype
    weight = compressor.decompress(get_direct_state_dict(module), scheme)["weight"].to(dtype)
    if scheme.input_activations:
        inputs = forward_quantize(module, inputs, "input", scheme.input_activations)
    if isinstance(module, nn.Linear):
        output = F.linear(inputs, weight, module.bias)
    else:
        output = F.embedding(inputs, weight, module.padding_idx)
    if scheme.output_activations:
        output = forward_quantize(module, output, "output", scheme.output_activations)
    return output
