"""Checkpoints with quantised weights: loaded as they are, or refused with what to do."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from importlib import util
from pathlib import Path

import pytest
import torch
from kvtest.lanes import some
from kvtest.quantised_models import ACTIVATIONS, ONE_OF_EACH_LIBRARY, WEIGHT_ONLY, save_quantised
from kvtest.tiny_models import make_model
from kvtest.transformers_model import Reference, greedy, prompt_of
from torch import Tensor, nn
from transformers import AutoConfig

from kvferry.shared.compression.presets import plan_for
from kvferry.shared.errors import ConfigurationError, UnsupportedModel
from kvferry.shared.model import quantised
from kvferry.shared.model.bridge import TransformersModel, _tensors_of
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.quantised import find_quantisation
from kvferry.tools.oracle import OneProcessGenerator

for name in ("accelerate", "bitsandbytes", "compressed_tensors", "torchao"):
    pytest.importorskip(name, reason="needs kvferry[quant]")

Checkpoint = Callable[[str], Path]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = save_quantised(kind, tmp_path_factory.mktemp("quantised"))
        return made[kind]

    return make


@pytest.fixture
def claimed(tmp_path: Path) -> Callable[..., Path]:
    """A checkpoint whose configuration says that it is quantised in some way."""

    def make(**settings: object) -> Path:
        folder = make_model("llama", tmp_path / "claimed")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
        return folder

    return make


def tokens_of(model: TransformersModel, prompt: list[int], number: int) -> list[int]:
    plan = plan_for("full")
    return [
        token.token_id
        for token in OneProcessGenerator(model).generate(prompt, plan=plan, sampling=greedy(number))
    ]


def stored_bytes(weight: Tensor) -> int:
    """Of a weight with all that belongs to it; torchao's weights are several tensors that look like one."""
    names = weight.__tensor_flatten__()[0] if hasattr(weight, "__tensor_flatten__") else []
    return sum(getattr(weight, name).nbytes for name in names) or weight.nbytes


@pytest.mark.parametrize("kind", some(WEIGHT_ONLY, *ONE_OF_EACH_LIBRARY))
def test_tokens_are_those_of_the_library_and_a_twin_has_the_same_weights(
    checkpoint: Checkpoint, kind: str
) -> None:
    prompt = prompt_of(60, seed=1)
    expected = Reference(checkpoint(kind)).tokens(prompt, 48)
    assert len(set(expected)) > 20
    model = load_model(checkpoint(kind), device="cpu")
    assert (model.spec.weights, model.spec.dtype) == (kind, "float32")
    assert tokens_of(model, prompt, 48) == expected
    twin = model.twin()
    assert tokens_of(twin, prompt, 8) == expected[:8]
    own, shared = ({id(tensor) for tensor in _tensors_of(one._model)} for one in (model, twin))
    assert shared == own


@pytest.mark.parametrize("kind", some([*WEIGHT_ONLY, *ACTIVATIONS], *ONE_OF_EACH_LIBRARY))
def test_weights_stay_quantised_after_a_pass(checkpoint: Checkpoint, kind: str) -> None:
    model = load_model(checkpoint(kind), device="cpu")
    tokens_of(model, prompt_of(9, seed=1), 3)
    projection = model._model.model.layers[0].mlp.up_proj
    assert isinstance(projection, nn.Linear)
    num_weights = projection.in_features * projection.out_features
    weights = [tensor for tensor in _tensors_of(projection) if tensor is not projection.bias]
    unique = {
        weight.data_ptr()
        if weight.layout == torch.strided and not hasattr(weight, "__tensor_flatten__")
        else id(weight): weight
        for weight in weights
    }
    assert sum(map(stored_bytes, unique.values())) < 1.3 * num_weights, "of float32 weights it would be 4"


@pytest.mark.parametrize("kind", some(ACTIVATIONS, "compressed-tensors float8, float8 activations"))
def test_with_quantised_activations_the_first_logits_are_close_to_the_librarys(
    checkpoint: Checkpoint, kind: str
) -> None:
    """A rounding difference may become one of a quantisation step, so later tokens can be others."""
    folder, prompt = checkpoint(kind), prompt_of(60, seed=1)
    with torch.inference_mode():
        expected = Reference(folder)._model(torch.tensor([prompt])).logits[0, -1].float()
    logits = OneProcessGenerator(load_model(folder, device="cpu")).generate(
        prompt, plan=plan_for("full"), sampling=greedy(1)
    )
    chosen = logits[0].token_id
    assert expected.max() - expected[chosen] < 0.05 * expected.std()


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("compressed-tensors float4", "compressed-tensors float4"),
        ("compressed-tensors float4, float4 activations", "compressed-tensors float4, float4 activations"),
        (
            "compressed-tensors float8 blocks, float8 activations",
            "compressed-tensors float8, float8 activations",
        ),
    ],
)
def test_the_kind_tells_whether_activations_are_quantised(
    checkpoint: Checkpoint, kind: str, told: str
) -> None:
    config = AutoConfig.from_pretrained(checkpoint(kind))
    quantisation = find_quantisation(config)
    assert quantisation is not None
    assert quantisation.kind == told


def test_compressed_tensors_take_any_dtype_and_the_others_their_own(checkpoint: Checkpoint) -> None:
    spec = load_model(checkpoint("compressed-tensors int4"), device="cpu", dtype="bfloat16").spec
    assert (spec.dtype, spec.weights) == ("bfloat16", "compressed-tensors int4")
    for kind in ("torchao float8 weight only", "bitsandbytes nf4"):
        assert load_model(checkpoint(kind), device="cpu", dtype="float32").spec.dtype == "float32"
        with pytest.raises(ConfigurationError, match=r"dtype is 'bfloat16'; .* it must be auto or float32"):
            load_model(checkpoint(kind), device="cpu", dtype="bfloat16")


def test_scales_of_a_quantised_kv_cache_are_left_out(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = save_quantised("compressed-tensors float8", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    config["quantization_config"]["kv_cache_scheme"] = scheme
    (folder / "config.json").write_text(json.dumps(config))
    model = load_model(folder, device="cpu")
    other = load_model(checkpoint("compressed-tensors float8"), device="cpu")
    prompt = prompt_of(20, seed=2)
    assert tokens_of(model, prompt, 8) == tokens_of(other, prompt, 8)


@pytest.mark.parametrize(
    ("settings", "command"),
    [
        ({"quant_method": "gptq", "bits": 4}, "pip install gptqmodel optimum accelerate"),
        ({"quant_method": "awq", "bits": 4}, "pip install gptqmodel accelerate"),
        ({"quant_method": "fp8"}, "pip install kernels accelerate"),
        ({"quant_method": "mxfp4"}, "pip install kernels triton accelerate"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    claimed: Callable[..., Path], settings: dict[str, object], command: str
) -> None:
    if util.find_spec("kernels") or util.find_spec("gptqmodel"):
        pytest.skip("the packages are installed")
    with pytest.raises(ConfigurationError, match=rf"\({settings['quant_method']}.*{command}$"):
        load_model(claimed(**settings), device="cpu")


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "compressed-tensors", "config_groups": {}},
        {"quant_method": "torchao"},
        {"load_in_8bit": True},
    ],
)
def test_without_the_extra_its_command_is_named(
    claimed: Callable[..., Path], settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"is not installed; .* pip install 'kvferry\[quant\]'$"):
        load_model(claimed(**settings), device="cpu")


def test_what_transformers_would_expand_is_refused(
    claimed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised, "find_spec", lambda name: util.find_spec("json"))
    with pytest.raises(UnsupportedModel, match=r"\(fp8\), which transformers can not compute with on cpu"):
        load_model(claimed(quant_method="fp8", weight_block_size=[128, 128]), device="cpu")


@pytest.mark.parametrize("settings", [{"quant_method": "mine"}, {"quant_method": "quanto"}, {}])
def test_unknown_methods_are_refused(claimed: Callable[..., Path], settings: dict[str, object]) -> None:
    with pytest.raises(UnsupportedModel, match="which is not supported; supported are compressed-tensors"):
        load_model(claimed(**settings), device="cpu")


def test_settings_that_the_library_does_not_take_are_refused(claimed: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedModel, match="does not load on cpu"):
        load_model(claimed(quant_method="torchao", quant_type={"default": {"_type": "No"}}), device="cpu")


@pytest.mark.full
def test_int8_weights_of_bitsandbytes_log_nothing_in_passes(checkpoint: Checkpoint) -> None:
    script = (
        "import sys; from kvferry.shared.model.loading import load_model\n"
        "load_model(sys.argv[1], device='cpu')"
    )
    command = [sys.executable, "-c", script, str(checkpoint("bitsandbytes int8"))]
    done = subprocess.run(command, capture_output=True, timeout=120, check=True)
    assert b"MatMul8bitLt" not in done.stderr
    assert logging.getLogger("torchao").level != logging.ERROR
