from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvferry.shared.errors import ConfigurationError
from kvferry.shared.model.checkpoint import read_eos_token_ids, sampling_defaults


def write(folder: Path, content: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def test_the_models_own_sampling_is_read_or_not_as_the_option_says(tmp_path: Path) -> None:
    content = {
        "do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05,
        "min_p": None, "max_new_tokens": 2048, "eos_token_id": [1, 2], "pad_token_id": 0,
    }  # fmt: skip
    model, other = write(tmp_path / "model", content), write(tmp_path / "other", {"top_k": -1, "min_p": 0.1})
    own = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}
    assert sampling_defaults("auto", model) == own
    assert sampling_defaults("none", model) == {}
    assert sampling_defaults(str(other), model) == {"top_k": 0, "min_p": 0.1}


def test_a_model_without_the_file_has_no_defaults_and_a_folder_without_it_is_refused(tmp_path: Path) -> None:
    assert sampling_defaults("auto", "demo") == {}
    with pytest.raises(ConfigurationError, match=r"which has no .*; it must be auto, none"):
        sampling_defaults(str(tmp_path), "demo")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"temperature": 3}, r"temperature is 3 in generation_config.json of .*; it must be 0 to 2"),
        ({"top_p": "high"}, "top_p is 'high'"),
        ({"top_k": 2.5}, r"top_k is 2\.5"),
        ({"temperature": True}, "temperature is True"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ([1], "is not a JSON object"),
    ],
)
def test_wrong_values_are_named(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        sampling_defaults("auto", write(tmp_path, content))
    assert sampling_defaults("none", tmp_path) == {}


@pytest.mark.parametrize("text", ["{", "[]", "1", '{"eos_token_id": "two"}', '{"eos_token_id": [1, null]}'])
def test_ids_that_end_a_completion_are_read_from_an_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"generation_config\.json"):
        read_eos_token_ids(tmp_path)
