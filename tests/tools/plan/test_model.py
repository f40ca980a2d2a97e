"""What a plan reads from a configuration is what loading the model finds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kvtest.families import FAMILIES

from kvferry.shared.errors import UnsupportedModel
from kvferry.shared.model.loading import load_model
from kvferry.tools.plan.model import read_model

SHAPES = (
    "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "max_model_len", "dtype",
    "kv_token_bytes",
)  # fmt: skip
NAMES = ("llama", "gemma2", "gpt_oss", "mixtral", "jetmoe", "deepseek_v3", "phi3", "cohere2", "gemma3-vision")


@pytest.mark.parametrize("name", [name for name in NAMES if name in FAMILIES])
def test_shapes_and_layers_are_the_loaded_models(name: str, tmp_path: Path) -> None:
    folder = FAMILIES[name].save(tmp_path / name)
    read = read_model(str(folder))
    loaded = load_model(folder, dtype=read.spec.dtype).spec
    assert {field: getattr(read.spec, field) for field in SHAPES} == {
        field: getattr(loaded, field) for field in SHAPES
    }
    assert [read.spec.layer(i) for i in range(loaded.num_layers)] == [
        loaded.layer(i) for i in range(loaded.num_layers)
    ]


def test_parameters_are_counted_and_of_experts_the_chosen_ones_are_active(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = FAMILIES["mixtral"].config()
    model = AutoModelForCausalLM.from_config(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    read = read_model(str(FAMILIES["mixtral"].save(tmp_path / "mixtral")), dtype="bfloat16")
    assert read.num_parameters == sum(sizes.values())
    assert read.weights_bytes == 2 * read.num_parameters
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert experts
    assert read.num_active == read.num_parameters - experts // 2


def test_attention_of_a_window_costs_less(tmp_path: Path) -> None:
    full = read_model(str(FAMILIES["llama"].save(tmp_path / "full")))
    windowed = read_model(str(FAMILIES["mistral"].save(tmp_path / "windowed")))
    assert windowed.spec.layer(0).window
    torch.testing.assert_close(float(full.num_parameters), float(windowed.num_parameters))
    assert windowed.prefill_flops(400) < full.prefill_flops(400)
    assert windowed.prefill_flops(8) == full.prefill_flops(8)


def test_states_are_refused_by_name(tmp_path: Path) -> None:
    for name in ("mamba", "jamba"):
        with pytest.raises(UnsupportedModel, match="layers with a state"):
            read_model(str(FAMILIES[name].save(tmp_path / name)))
