"""GGUF files of tiny models, written as llama.cpp's converter writes them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

from kvferry.shared.model.checkpoint import quiet_libraries
from kvtest.text_models import CHATML, make_text_model
from kvtest.tiny_models import make_config

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
"""GGUF's token types."""


def make_gguf_source(family: str, folder: Path, **overrides: Any) -> Path:
    """Write a random model with a byte-level tokenizer; returns the folder.

    Args: overrides: of the model's configuration.
    """
    make_text_model(folder, added=("<think>",))
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    config = make_config(family, vocab_size=vocab_size, **overrides)
    with torch.random.fork_rng(devices=[]), quiet_libraries():
        torch.manual_seed(21)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)
        model.save_pretrained(folder)
    return folder


def write_gguf(
    folder: Path,
    file: Path,
    *,
    kind: str = "F32",
    template: str = CHATML,
    left_out: str = "",
    more: Callable[[Any], None] = lambda writer: None,
) -> Path:
    """Write a model's folder, a Llama's or a Qwen 2's, as a GGUF file; returns the file.

    Args:
        kind: of the matrices: F32, F16, BF16 or a quantisation's name.
        left_out: a tensor that is not written.
        more: gets the gguf package's writer.
    """
    from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
    from gguf.quants import quantize

    config = transformers.AutoConfig.from_pretrained(folder)
    arch = config.model_type
    writer = GGUFWriter(file, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config.vocab_size)
    _write_tokenizer(writer, folder, config.vocab_size, template)
    more(writer)
    known = next(key for key, name in MODEL_ARCH_NAMES.items() if name == arch)
    names = get_tensor_name_map(known, config.num_hidden_layers)
    for name, weight in load_file(folder / "model.safetensors").items():
        if name == left_out:
            continue
        array = weight.float().numpy()
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            # llama.cpp rotates neighbours, transformers the halves of a head
            array = array.reshape(-1, 2, head_dim // 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        stored = GGMLQuantizationType[kind if array.ndim > 1 else "F32"]
        known_as = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(known_as, quantize(np.ascontiguousarray(array), stored), raw_dtype=stored)
    if config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config.rope_parameters, head_dim))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _write_tokenizer(writer: Any, folder: Path, vocab_size: int, template: str) -> None:
    data = json.loads((folder / "tokenizer.json").read_text())
    ids = data["model"]["vocab"] | {token["content"]: token["id"] for token in data["added_tokens"]}
    added = {token["id"]: _CONTROL if token["special"] else _USER_DEFINED for token in data["added_tokens"]}
    tokens = {token_id: text for text, token_id in ids.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens.get(i, f"[PAD{i}]") for i in range(vocab_size)])
    writer.add_token_types([added.get(i, _NORMAL if i in tokens else _UNUSED) for i in range(vocab_size)])
    writer.add_token_merges([" ".join(pair) for pair in data["model"]["merges"]])
    writer.add_eos_token_id(ids["<|endoftext|>"])
    writer.add_chat_template(template)


def llama3_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray[Any, Any]:
    """What Llama 3 divides each frequency by, float32 of shape (head_dim / 2,).

    f_i = theta^(-2i / d), w_i = 2 pi / f_i. 1 where w_i < L / high; `factor` where w_i > L / low; between
    them 1 / ((1 - s) / factor + s) with s = (L / w_i - low) / (high - low).
    """
    length, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    found = []
    for index in range(head_dim // 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (2 * index / head_dim)
        smooth = (length / wave - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        found.append(1.0 if wave < length / high else factor if wave > length / low else between)
    return np.array(found, dtype=np.float32)
