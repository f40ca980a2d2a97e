"""`kvferry sessions`, `documents` and `keys` against a running router and a real key file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from kvtest.ports import free_port
from kvtest.stack import serving

from kvferry.shared.errors import ConfigurationError, KvferryError, WorkerUnavailable
from kvferry.tools.operate.command import documents, keys, make_key, sessions
from kvferry.tools.operate.config import KeysConfig, StoredConfig


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving("--in-process", "--api-keys", "one,two") as served:
        yield served.base_url


def test_a_keys_sessions_and_documents_are_listed_and_deleted(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    headers = {"Authorization": "Bearer one"}
    body = {"model": "demo", "max_tokens": 3, "messages": [{"role": "user", "content": "quiet bridge"}]}
    with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as client:
        for name in ("first", "second"):
            assert client.post("/v1/chat/completions", json={**body, "session_id": name}).status_code == 200
        assert client.post("/v1/documents", json={"id": "book", "text": "quiet bridge " * 40}).is_success
    mine = StoredConfig(url=url, api_key="one")
    sessions(mine)
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["id", "tokens", "turns"]
    assert {line.split()[0] for line in lines} == {"first", "second"}
    documents(StoredConfig(url=url, api_key="one", json_output=True))
    (document,) = json.loads(capsys.readouterr().out)
    assert (document["id"], document["tokens"] >= 80) == ("book", True)
    sessions(StoredConfig(url=url, api_key="two", json_output=True))
    assert json.loads(capsys.readouterr().out) == []
    sessions(StoredConfig(url=url, api_key="one", delete_id="first"))
    assert capsys.readouterr().out == "deleted first\n"
    sessions(mine)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["second"]


def test_refusals_are_the_routers_words(url: str) -> None:
    with pytest.raises(KvferryError, match="nothing"):
        documents(StoredConfig(url=url, api_key="one", delete_id="nothing"))
    with pytest.raises(KvferryError, match="key"):
        sessions(StoredConfig(url=url, api_key="wrong"))
    with pytest.raises(WorkerUnavailable, match="cannot be reached"):
        sessions(StoredConfig(url=f"http://127.0.0.1:{free_port()}"))


def test_keys_are_listed_without_their_hashes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, entry = make_key("alice")
    (tmp_path / "keys.toml").write_text(entry + "tokens_per_minute = 1000\n")
    config = KeysConfig(api_keys_file=str(tmp_path / "keys.toml"))
    keys(config)
    out = capsys.readouterr().out
    assert out.splitlines()[1].split()[:2] == ["alice", "chat"]
    assert "1000" in out
    assert "sha256" not in out
    keys(KeysConfig(api_keys_file=config.api_keys_file, json_output=True))
    assert json.loads(capsys.readouterr().out)[0]["tokens_per_minute"] == 1000
    with pytest.raises(ConfigurationError, match="--api-keys-file is ''"):
        keys(KeysConfig())


def test_a_key_is_forgotten_by_its_name_or_hash(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"model": "demo", "max_tokens": 3, "messages": [{"role": "user", "content": "quiet bridge"}]}
    headers = {"Authorization": "Bearer two"}
    key_hash = f"sha256:{hashlib.sha256(b'two').hexdigest()}"
    file = tmp_path / "keys.toml"
    file.write_text(f'[[key]]\nname = "holder"\nhash = "{key_hash}"\n')
    for forget in ("holder", key_hash):
        with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as client:
            assert client.post("/v1/chat/completions", json={**body, "session_id": "s"}).status_code == 200
        keys(KeysConfig(url=url, api_key="one", api_keys_file=str(file), forget=forget))
        assert capsys.readouterr().out == f"deleted 1 sessions and 0 documents of {key_hash}\n"
        sessions(StoredConfig(url=url, api_key="two", json_output=True))
        assert json.loads(capsys.readouterr().out) == []
    with pytest.raises(ConfigurationError, match="--forget is 'nobody'"):
        keys(KeysConfig(url=url, api_key="one", api_keys_file=str(file), forget="nobody"))
