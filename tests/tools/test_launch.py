"""`kvferry launch`: each program's configuration is of the server that is asked, and is written once."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvtest.router import base_url as base_url
from kvtest.router import tokenizer as tokenizer

from kvferry.shared.errors import ConfigurationError
from kvferry.tools.launch import PROGRAMS, launch


def text_of(base_url: str, name: str, capsys: pytest.CaptureFixture[str], key: str = "secret") -> str:
    assert launch(name, url=base_url, api_key=key, write=False) == 0
    out = capsys.readouterr().out
    return out[max(0, out.find("# ")) :]  # after the router's own log


def values_of(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for inner in value.values() for leaf in values_of(inner)]
    return [leaf for inner in value for leaf in values_of(inner)] if isinstance(value, list) else [value]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_configuration_has_address_model_and_key(
    base_url: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = text_of(base_url, name, capsys)
    path = PROGRAMS[name].path(Path("/home/someone")) if PROGRAMS[name].path is not None else None
    assert "demo" in text or name == "open-webui"  # which asks the server itself
    assert base_url.removeprefix("http://127.0.0.1") in text
    assert "secret" in text
    if path is None:
        return
    head, _, rest = text.partition("\n")
    content, _, start = rest.partition("\n# then: ")
    assert head.startswith("# ")
    assert start.strip()
    read = {".json": json.loads, ".toml": tomllib.loads, ".yaml": yaml.safe_load, ".yml": yaml.safe_load}
    parsed = read[path.suffix](content)
    urls = [value for value in values_of(parsed) if isinstance(value, str) and value.startswith(base_url)]
    assert urls == [base_url if name == "claude" else f"{base_url}/v1"]


def test_it_is_written_once_and_for_the_user_alone(
    base_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name, program in PROGRAMS.items():
        launch(name, url=f"{base_url}/v1/", api_key="", write=True)
        if program.path is None:
            continue
        path = program.path(tmp_path)
        assert path.stat().st_mode & 0o777 == 0o600
        assert "/v1/v1" not in path.read_text()
        with pytest.raises(ConfigurationError, match="exists"):
            launch(name, url=base_url, api_key="", write=True)
    assert "start Codex with: KVFERRY_API_KEY=none codex" in capsys.readouterr().out


def test_what_is_wrong_is_said(base_url: str) -> None:
    with pytest.raises(ConfigurationError, match="there are claude, codex"):
        launch("emacs", url=base_url, api_key="", write=False)
    with pytest.raises(ConfigurationError, match="does not say which model"):
        launch("codex", url="http://127.0.0.1:1", api_key="", write=False)
