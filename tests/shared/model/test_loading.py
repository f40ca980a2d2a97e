from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kvtest import tiny_models
from safetensors.torch import load_file, save_file

from kvferry.models import DEMO_MODEL
from kvferry.shared.errors import ConfigurationError, UnsupportedModel
from kvferry.shared.model import checkpoint, loading
from kvferry.shared.model.checkpoint import model_fingerprint
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.spec import ModelSpec

TinyModelDir = Callable[[str], Path]


@pytest.fixture
def llama_copy(tiny_model_dir: TinyModelDir, tmp_path: Path) -> Path:
    """A tiny model's folder that a test may change."""
    return Path(shutil.copytree(tiny_model_dir("llama"), tmp_path / "copied-llama"))


def change_config(folder: Path, **fields: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def test_the_demo_loads_with_its_shapes() -> None:
    model = load_model("demo", name="", device="cpu", dtype="auto", max_model_len=0)
    assert model.spec == ModelSpec(
        name="demo",
        fingerprint=model_fingerprint(DEMO_MODEL, dtype="float32"),
        num_layers=4,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=704,
        max_model_len=8192,
        dtype="float32",
        eos_token_ids=(6,),
        weights="float32",
        checkpoint_dtype="float16",
    )
    assert model.device == torch.device("cpu")
    assert model.dtype is torch.float32


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_the_full_kv_is_counted_in_the_checkpoints_dtype_whichever_it_is_computed_in(dtype: str) -> None:
    spec = load_model("demo", device="cpu", dtype=dtype).spec
    assert spec.full_bytes(101) == 101 * 4 * 2 * 2 * 64 * 2  # tokens, layers, K and V, heads, head_dim, bytes
    assert spec.kv_token_bytes == 4 * 2 * 2 * 64 * (2 if dtype == "bfloat16" else 4)


@pytest.mark.parametrize(("stored", "counted"), [("float32", 4), ("bfloat16", 2), (None, 4), ("float64", 4)])
def test_a_checkpoint_that_names_no_dtype_of_ours_is_counted_as_it_is_computed(
    llama_copy: Path, stored: str | None, counted: int
) -> None:
    config = json.loads((llama_copy / "config.json").read_text())
    config = {name: value for name, value in config.items() if name not in ("dtype", "torch_dtype")}
    (llama_copy / "config.json").write_text(json.dumps({**config, **({"dtype": stored} if stored else {})}))
    spec = load_model(llama_copy, device="cpu", dtype="float32").spec
    assert spec.full_bytes(7) * 4 == 7 * spec.kv_token_bytes * counted


def test_name_window_and_dtype_are_as_asked(tiny_model_dir: TinyModelDir) -> None:
    folder = tiny_model_dir("llama")
    assert load_model(folder, device="cpu").spec.name == "llama"
    spec = load_model(str(folder), name="mine", device="cpu", dtype="bfloat16", max_model_len=100).spec
    assert (spec.name, spec.dtype, spec.max_model_len) == ("mine", "bfloat16", 100)


def test_a_yarn_models_window_may_be_its_stretched_one(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model_dir("llama-yarn"), tmp_path / "yarn"))
    change_config(folder, max_position_embeddings=512)
    assert load_model(folder, device="cpu").spec.max_model_len == 512
    assert load_model(folder, device="cpu", max_model_len=2048).spec.max_model_len == 2048
    with pytest.raises(ConfigurationError, match=r"1\.\.2048, or 0 for 512"):
        load_model(folder, device="cpu", max_model_len=2049)


def test_a_window_with_linear_positions_may_be_stretched(
    tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_model_dir("llama"), tmp_path / "linear"))
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    change_config(folder, max_position_embeddings=512, rope_parameters=rope)
    assert load_model(folder, device="cpu").spec.max_model_len == 512
    assert load_model(folder, device="cpu", max_model_len=2048).spec.max_model_len == 2048
    with pytest.raises(ConfigurationError, match=r"1\.\.2048, or 0 for 512"):
        load_model(folder, device="cpu", max_model_len=2049)


@pytest.mark.parametrize(
    "change", [{"rope_scaling": 1}, {"rope_parameters": "linear"}, {"num_hidden_layers": "two"}]
)
def test_a_broken_configuration_is_said_to_be(
    tiny_model_dir: TinyModelDir, tmp_path: Path, change: dict[str, object]
) -> None:
    folder = Path(shutil.copytree(tiny_model_dir("llama"), tmp_path / "broken"))
    change_config(folder, **change)
    with pytest.raises((ConfigurationError, UnsupportedModel)):
        load_model(folder, device="cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 2049}, r"max_model_len is 2049; it must be in 1\.\.2048"),
        ({"max_model_len": -1}, "max_model_len is -1"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"device": "cuda:x"}, "device is 'cuda:x'"),
        ({"device": "cpu:0"}, "device is 'cpu:0'"),
        ({"device": "cuda:99"}, "there are . CUDA devices"),
    ],
)
def test_options_out_of_range_are_named(
    tiny_model_dir: TinyModelDir, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load_model(tiny_model_dir("llama"), **{"device": "cpu", **options})


@pytest.mark.parametrize("path", ["/no/such/folder", "no-such/model", "not a hub id"])
def test_a_model_that_cannot_be_had_is_named(path: str) -> None:
    with pytest.raises(ConfigurationError, match=path):
        load_model(path, device="cpu")


def test_pickled_weights_are_never_read(llama_copy: Path) -> None:
    weights = load_file(llama_copy / "model.safetensors")
    (llama_copy / "model.safetensors").unlink()
    torch.save(weights, llama_copy / "pytorch_model.bin")
    with pytest.raises(ConfigurationError, match="must be safetensors"):
        load_model(llama_copy, device="cpu")


def test_a_checkpoint_that_lacks_tensors_is_refused_and_not_filled_at_random(llama_copy: Path) -> None:
    weights = load_file(llama_copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, llama_copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigurationError, match=r"lack 1 tensors, 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load_model(llama_copy, device="cpu")


def test_a_truncated_checkpoint_is_a_configuration_error(llama_copy: Path) -> None:
    data = (llama_copy / "model.safetensors").read_bytes()
    (llama_copy / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigurationError, match="do not load"):
        load_model(llama_copy, device="cpu")


def test_a_folder_without_configuration_is_a_configuration_error(llama_copy: Path) -> None:
    (llama_copy / "config.json").unlink()
    with pytest.raises(ConfigurationError, match=r"has no config\.json"):
        load_model(llama_copy, device="cpu")


def test_a_model_without_tokenizer_loads_with_its_configured_eos(llama_copy: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (llama_copy / name).unlink()
    (llama_copy / "generation_config.json").write_text('{"eos_token_id": [9, 6]}')
    assert load_model(llama_copy, device="cpu").spec.eos_token_ids == (9, 6)


def test_sharded_checkpoints_load(llama_copy: Path, tiny_model_dir: TinyModelDir) -> None:
    weights = load_file(llama_copy / "model.safetensors")
    names = sorted(weights)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: weights[name] for name in part}, llama_copy / file, metadata={"format": "pt"})
    (llama_copy / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
    (llama_copy / "model.safetensors.index.json").write_text(json.dumps(index))
    whole = load_model(tiny_model_dir("llama"), device="cpu")
    sharded = load_model(llama_copy, device="cpu")
    for one, other in zip(whole._model.parameters(), sharded._model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0)


def test_a_start_writes_nothing_and_importing_does_nothing() -> None:
    script = (
        "import sys\n"
        "from kvferry.shared.model import checkpoint, loading, tokenizer, text\n"
        "assert 'transformers' not in sys.modules\n"
        "with checkpoint.quiet_libraries():\n"
        "    from transformers import AttentionInterface\n"
        "assert 'kvferry' not in AttentionInterface()\n"
        "loading.load_model('demo', name='', device='cpu', dtype='auto', max_model_len=0)\n"
        "tokenizer.ChatTokenizer.load('demo')\n"
        "assert 'kvferry' in AttentionInterface()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_equal_models_have_equal_fingerprints_wherever_they_lie(
    tiny_model_dir: TinyModelDir, llama_copy: Path
) -> None:
    original = model_fingerprint(tiny_model_dir("llama"), dtype="float32")
    assert len(original) == 64
    assert model_fingerprint(llama_copy, dtype="float32") == original
    assert load_model(llama_copy, device="cpu").spec.fingerprint == original


def test_dtype_configuration_and_weights_each_change_the_fingerprint(llama_copy: Path) -> None:
    seen = {model_fingerprint(llama_copy, dtype=dtype) for dtype in ("float32", "float16", "bfloat16")}
    change_config(llama_copy, rms_norm_eps=1e-5)
    seen.add(model_fingerprint(llama_copy, dtype="float32"))
    weights = bytearray((llama_copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (llama_copy / "model.safetensors").write_bytes(weights)
    seen.add(model_fingerprint(llama_copy, dtype="float32"))
    assert len(seen) == 5


def test_large_files_are_known_by_size_header_and_sampled_chunks(
    llama_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_WHOLE_FILE_BYTES", 4096)
    monkeypatch.setattr(checkpoint, "_CHUNK_BYTES", 256)
    file = llama_copy / "model.safetensors"
    original = file.read_bytes()
    header_end = 8 + int.from_bytes(original[:8], "little")
    assert len(original) > 64 * 512
    seen = {model_fingerprint(llama_copy, dtype="float32")}
    for at in (header_end - 3, header_end, len(original) - 1):
        changed = bytearray(original)
        changed[at] ^= 1
        file.write_bytes(changed)
        seen.add(model_fingerprint(llama_copy, dtype="float32"))
    file.write_bytes(original + b"\0")
    seen.add(model_fingerprint(llama_copy, dtype="float32"))
    assert len(seen) == 5


def test_a_file_without_a_header_has_no_fingerprint(llama_copy: Path) -> None:
    for data in (b"", b"\xff" * 64, b"\0" * 64):
        (llama_copy / "model.safetensors").write_bytes(data)
        with pytest.raises(ConfigurationError, match="not a safetensors file"):
            model_fingerprint(llama_copy, dtype="float32")


def test_tiny_models_are_the_same_each_time(tmp_path: Path) -> None:
    folders = [tiny_models.make_model("qwen2", tmp_path / name) for name in ("one", "two")]
    files = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert files[0] == files[1]


def test_a_config_that_is_no_json_or_of_other_shapes_is_a_configuration_error(llama_copy: Path) -> None:
    change_config(llama_copy, intermediate_size=80)
    with pytest.raises(ConfigurationError, match="do not load"):
        load_model(llama_copy, device="cpu")
    (llama_copy / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match="does not load"):
        load_model(llama_copy, device="cpu")


@pytest.mark.parametrize(("device", "expected"), [("cuda", []), ("cuda:0", [0]), ("cuda:1", [1])])
def test_cuda_is_prepared_with_and_without_a_number(
    monkeypatch: pytest.MonkeyPatch, device: str, expected: list[int]
) -> None:
    """Down to the driver's call, which a build without CUDA lacks."""
    current: list[int] = []
    monkeypatch.setattr(torch._C, "_cuda_setDevice", current.append, raising=False)
    was_on = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        loading._prepare_cuda(torch.device(device))
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_on)
    assert current == expected
