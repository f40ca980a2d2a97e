"""Models that the cache could not stand for are refused, and the refusal names the reason."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from kvtest import tiny_models
from kvtest.families import FAMILIES
from torch import nn

from kvferry.shared.errors import UnsupportedModel
from kvferry.shared.model import adapters
from kvferry.shared.model.bridge import PrefillPass, attention_forward
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.model_types import MODEL_TYPES, check_described
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.model.support import check_config

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("DeepseekV32", {}, "an indexer selects .* in layer 0"),
    ("T5", {}, "encoder-decoder"),
    ("Bart", {}, "encoder-decoder"),
    ("GPT2", {}, r"no rotary positions .* in layer 0"),
    ("OPT", {}, r"no rotary positions .* in layer 0"),
    ("Bloom", {}, r"no rotary positions .* in layer 0"),
    ("Falcon", {"alibi": True}, "ALiBi positions in layer 0"),
    ("Doge", {}, "has not been checked"),
    (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0},
        "a window in layer 0",
    ),
    ("MiniMaxM3VLText", {}, "has not been checked"),
    (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "served": 4096},
        r"in layer 0 \(rope_type 'dynamic' beyond 2048",
    ),
    (
        "Gemma3Text",
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "num_hidden_layers": 2,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            },
            "max_position_embeddings": 2048,
            "served": 4096,
        },
        r"in layer 1 \(rope_type 'dynamic' beyond 2048",
    ),
]


@pytest.mark.parametrize(("family", "settings", "feature"), REFUSED, ids=lambda value: str(value)[:30])
def test_features_that_a_configuration_tells_are_refused_by_name(
    family: str, settings: dict[str, Any], feature: str
) -> None:
    served = settings.get("served", 2048)
    fields = {key: value for key, value in settings.items() if key != "served"}
    if family in ("Llama", "Mistral", "Phi3", "Qwen2", "Qwen3"):
        fields |= {"max_position_embeddings": 2048, "hidden_size": 64, "num_attention_heads": 4}
    config = getattr(transformers, f"{family}Config")(**fields)
    with pytest.raises(UnsupportedModel, match=feature) as error:
        check_config(config, max_model_len=served)
    assert repr(config.model_type) in error.value.message


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Llama", {}),
        ("Mistral", {"sliding_window": None}),
        ("Mistral", {"sliding_window": 2048}),
        ("Mistral", {"sliding_window": 1024}),
        ("Qwen2", {"sliding_window": 1024}),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 4096}),
        ("Qwen2Moe", {}),
        ("Mixtral", {}),
        ("Phi3", {}),
        ("Gemma", {}),
        ("Olmo2", {}),
        ("Cohere", {}),
        ("Granite", {}),
        ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_plain_rotary_decoders_and_windows_that_limit_nothing_are_accepted(
    family: str, settings: dict[str, Any]
) -> None:
    config = getattr(transformers, f"{family}Config")(**{"max_position_embeddings": 2048, **settings})
    check_config(config, max_model_len=2048)


def test_a_refused_configuration_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    transformers.DeepseekV32Config().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing that could be read")
    with pytest.raises(UnsupportedModel, match="an indexer"):
        load_model(tmp_path, device="cpu")


def test_an_unknown_model_type_is_refused_and_its_code_not_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "surprise", "auto_map": {"AutoConfig": "code.Surprise"}}'
    )
    (tmp_path / "code.py").write_text("raise SystemExit('ran')")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(UnsupportedModel, match="does not know"):
        load_model(tmp_path, device="cpu")


@pytest.mark.parametrize("family", ["StableLm", "Nemotron"])
def test_families_that_do_not_hand_on_our_argument_need_their_adapter(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = getattr(transformers, f"{family}Config")(**{**tiny_models._COMMON, "head_dim": 8})
    folder = tiny_models.save_model(config, tmp_path)
    model, token_ids = load_model(folder, device="cpu"), torch.arange(9, 19)
    logits = [
        instance.prefill(token_ids, start=0, observer=_Observer()) for instance in (model, model.twin())
    ]
    assert torch.equal(*logits)
    monkeypatch.setattr(adapters, "ADAPTERS", {})
    with pytest.raises(UnsupportedModel, match="does not pass"):
        load_model(folder, device="cpu")


def test_llama_4_counts_positions_in_its_own_cache(tmp_path: Path) -> None:
    config = FAMILIES["llama4_text"].config()
    attention = transformers.models.llama4.modeling_llama4.Llama4TextAttention(config, layer_idx=3)
    assert attention.attn_temperature_tuning
    assert not attention.use_rope
    assert "past_key_values.get_seq_length" in inspect.getsource(type(attention).forward)


def test_the_logits_of_a_llama_4_prompt_are_those_of_its_prefixes(tmp_path: Path) -> None:
    model = load_model(FAMILIES["llama4_text"].save(tmp_path), device="cpu")
    token_ids, rows = torch.arange(9, 49), list[torch.Tensor]()
    model.prefill(token_ids, start=0, observer=_Observer(), on_logits=lambda first, some: rows.append(some))
    expected = model.prefill(token_ids[:20], start=0, observer=_Observer())
    torch.testing.assert_close(torch.cat(rows)[19].float(), expected, atol=1e-4, rtol=1e-4)


def test_accepted_model_types_are_those_that_tests_check() -> None:
    text_configs = [family.config().get_text_config() for family in FAMILIES.values()]
    assert {config.model_type for config in text_configs} == MODEL_TYPES


def test_no_accepted_type_is_refused_by_its_name_alone() -> None:
    for family in FAMILIES.values():
        check_described(family.config().to_dict())
    check_described({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}})
    check_described({"model_type": "gemma3"})
    check_described({"model_type": "gemma3", "text_config": {"vocab_size": 3}})
    check_described({"vocab_size": 3})
    for described in ({"model_type": "bert"}, {"model_type": "llava", "text_config": {"model_type": "bert"}}):
        with pytest.raises(UnsupportedModel, match="model type 'bert' has not been checked"):
            check_described(described)


SPEC = ModelSpec(
    name="tiny",
    fingerprint="f00d",
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=50,
    max_model_len=100,
    dtype="float32",
    eos_token_ids=(),
)


class _Observer:
    def history(self, layer: int) -> None:
        return None

    def layer_done(self, layer: int, *_: object) -> None:
        return None


class _Attention(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in {"layer_idx": 0, **attributes}.items():
            setattr(self, name, value)


def attend(
    module: nn.Module, *, mask: torch.Tensor | None = None, value_dim: int = 8, **arguments: Any
) -> None:
    current = PrefillPass(_Observer(), start=0, spec=SPEC)
    query, key, value = torch.ones(1, 4, 3, 8), torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, value_dim)
    attention_forward(module, query, key, value, mask, kvferry=current, **arguments)


@pytest.mark.parametrize(
    ("arguments", "feature"),
    [
        ({"sliding_window": 99}, "sliding_window 99, and the configuration says 0"),
        ({"position_bias": torch.zeros(1)}, "uses position_bias"),
        ({"block_indices": torch.zeros(1)}, "uses block_indices"),
        ({"mask": torch.zeros(1)}, "of layer 0 passes an attention mask"),
        ({"value_dim": 4}, "of layer 0 has keys of size 8 and values of size 4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_features_that_only_the_call_tells_are_refused_by_name(
    arguments: dict[str, Any], feature: str
) -> None:
    attend(_Attention(), sliding_window=100, softcap=None, s_aux=None, dropout=0.0)
    with pytest.raises(UnsupportedModel, match=feature):
        attend(_Attention(), **arguments)


@pytest.mark.parametrize(
    ("attributes", "feature"),
    [({"layer_idx": None}, "layer_idx"), ({"is_causal": False}, "of layer 0 is not causal")],
)
def test_attention_modules_without_index_or_causality_are_refused(
    attributes: dict[str, Any], feature: str
) -> None:
    with pytest.raises(UnsupportedModel, match=feature):
        attend(_Attention(**attributes))
