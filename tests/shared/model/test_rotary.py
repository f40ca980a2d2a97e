"""Keys turned back equal what the model's own key projection and norm gave, family by family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from kvtest import tiny_models
from kvtest.counted_device import READS
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from kvferry.shared.errors import UnsupportedModel
from kvferry.shared.model.bridge import TransformersModel
from kvferry.shared.model.loading import load_model

TinyModelDir = Callable[[str], Path]
LayerKV = tuple[Tensor, Tensor]
NUM_TOKENS = 300


class Observer:
    """Asks for every layer's pre-RoPE keys as the pass goes by; hands in given history."""

    def __init__(self, model: TransformersModel, history: list[LayerKV] | None = None) -> None:
        self._model = model
        self._history = history
        self.kv: list[LayerKV] = []
        self.pre_rope: list[Tensor] = []

    def history(self, layer: int) -> LayerKV | None:
        return self._history[layer] if self._history else None

    def layer_done(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        before = keys.clone()
        self.pre_rope.append(self._model.pre_rope_keys(layer, keys))
        assert torch.equal(keys, before)
        self.kv.append((before, values.clone()))


class Projections:
    """What each layer's key projection gave, after its norm where it has one, over all passes."""

    def __init__(self, model: TransformersModel) -> None:
        spec = model.spec
        self._shape = (spec.num_kv_heads, spec.head_dim)
        self._chunks: dict[int, list[Tensor]] = {layer: [] for layer in range(spec.num_layers)}
        attentions = [m for m in model._model.modules() if isinstance(getattr(m, "layer_idx", None), int)]
        attentions = [m for m in attentions if hasattr(m, "q_proj") or hasattr(m, "qkv_proj")]
        assert len(attentions) == spec.num_layers
        for module in attentions:
            norm = getattr(module, "k_norm", None)
            source = norm or getattr(module, "k_proj", None) or module.qkv_proj
            source.register_forward_hook(self._hook(module.layer_idx))

    def _hook(self, layer: int) -> Callable[[nn.Module, object, Tensor], None]:
        heads, dim = self._shape

        def hook(module: nn.Module, arguments: object, output: Tensor) -> None:
            flat = output.flatten(2) if output.ndim == 4 and output.shape[1] != heads else output
            if flat.ndim == 4:  # a norm after the heads were moved forward
                flat = flat.transpose(1, 2).flatten(2)
            keys = flat if flat.shape[-1] == heads * dim else flat[..., -2 * heads * dim : -heads * dim]
            self._chunks[layer].append(keys[0].unflatten(-1, (heads, dim)).transpose(0, 1).clone())

        return hook

    def keys(self, layer: int) -> Tensor:
        return torch.cat(self._chunks[layer], dim=1)


def assert_pre_rope_keys_are_the_projections(folder: Path) -> None:
    model = load_model(folder, device="cpu")
    projections = Projections(model)
    generator = torch.Generator().manual_seed(3)
    token_ids = torch.randint(7, 600, (NUM_TOKENS,), generator=generator)
    first = Observer(model)
    model.prefill(token_ids[: NUM_TOKENS - 41], start=0, observer=first)
    second = Observer(model, first.kv)
    model.prefill(token_ids[NUM_TOKENS - 41 :], start=NUM_TOKENS - 41, observer=second)
    for layer, pre_rope in enumerate(second.pre_rope):
        assert pre_rope.dtype is torch.float32
        expected = projections.keys(layer)
        torch.testing.assert_close(pre_rope, expected, atol=2e-5, rtol=1e-5)
        # so that the comparison means something
        assert (second.kv[layer][0] - expected).norm() > 0.1 * expected.norm()


@pytest.mark.parametrize(
    "family", ["llama", "llama-mqa", "llama-yarn", "mistral", "qwen2", "qwen3", "phi3", "gemma", "granite"]
)
def test_pre_rope_keys_are_the_key_projections_with_and_without_history(
    tiny_model_dir: TinyModelDir, family: str
) -> None:
    assert_pre_rope_keys_are_the_projections(tiny_model_dir(family))


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("Phi", {"partial_rotary_factor": 0.5, "head_dim": None}),
        ("Glm", {"head_dim": 16, "partial_rotary_factor": 0.5}),
        ("Cohere", {"head_dim": None}),
        ("Olmo2", {"head_dim": None}),
        ("Gemma3Text", {"sliding_window": 4096, "layer_types": ["sliding_attention", "full_attention"]}),
        (
            "Llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 10000.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 256,
                }
            },
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_partial_interleaved_scaled_and_per_layer_rotations_are_undone(
    tmp_path: Path, architecture: str, overrides: dict[str, object]
) -> None:
    settings = {**tiny_models._COMMON, **overrides}
    settings = {name: value for name, value in settings.items() if value is not None}
    config = getattr(transformers, f"{architecture}Config")(**settings)
    assert_pre_rope_keys_are_the_projections(tiny_models.save_model(config, tmp_path))


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 2**-7), ("float16", 2**-10)])
def test_half_precision_keys_come_back_within_their_rounding(
    tiny_model_dir: TinyModelDir, dtype: str, tolerance: float
) -> None:
    model = load_model(tiny_model_dir("qwen3"), device="cpu", dtype=dtype)
    projections = Projections(model)
    observer = Observer(model)
    model.prefill(torch.arange(7, 107), start=0, observer=observer)
    for layer, pre_rope in enumerate(observer.pre_rope):
        expected = projections.keys(layer).float()
        assert (pre_rope - expected).norm() <= tolerance * expected.norm()


class Called(TorchDispatchMode):
    """Attributes: names: of the operators that are called while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **kwargs or {})


def test_to_undo_a_rotation_the_host_waits_for_nothing(tiny_model_dir: TinyModelDir) -> None:
    model = load_model(tiny_model_dir("llama"), device="cpu")
    with torch.inference_mode(), Called() as called:
        model.pre_rope_keys(0, torch.randn(model.spec.num_kv_heads, 33, model.spec.head_dim))
    assert called.names
    assert not called.names.intersection(READS)


def test_a_single_token_has_its_key(tiny_model_dir: TinyModelDir) -> None:
    model = load_model(tiny_model_dir("llama"), device="cpu")
    observer = Observer(model)
    model.prefill(torch.tensor([9]), start=0, observer=observer)
    torch.testing.assert_close(observer.pre_rope[0], observer.kv[0][0])


def test_a_model_that_rotates_otherwise_is_served_but_refuses_pre_rope_keys(
    tiny_model_dir: TinyModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    own = modeling_llama.apply_rotary_pos_emb

    def doubled(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return own(*own(q, k, cos, sin), cos, sin)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", doubled)
    model = load_model(tiny_model_dir("llama"), device="cpu")
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM"):
        model.pre_rope_keys(0, torch.zeros(2, 3, 16))
