"""Lists and deletes a key's sessions and documents through the router's API, and lists the keys of a file."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import httpx
from pydantic import ValidationError

from kvferry.services.router.http.access import ApiKey, KeyFile
from kvferry.shared.errors import ConfigurationError, KvferryError, WorkerUnavailable
from kvferry.tools.operate.config import KeysConfig, StoredConfig

Kind = Literal["sessions", "documents"]
_COLUMNS: Mapping[Kind, tuple[str, ...]] = {
    "sessions": ("id", "tokens", "turns", "running", "history_bytes", "history_tier", "expires_at"),
    "documents": ("id", "tokens", "history_bytes", "history_tier", "created_at", "expires_at"),
}
_KEY_COLUMNS = (
    "name", "scopes", "requests_per_minute", "tokens_per_minute", "bytes_per_minute", "max_concurrent",
)  # fmt: skip
_TIMEOUT_S = 60.0
_FORGET_TIMEOUT_S = 600.0


def new_key(name: str) -> None:
    """Make an API key: prints it, once, and its entry for the router's --api-keys-file.

    Args:
        name: its holder, as logs and metrics show it.
    """
    key, entry = make_key(name)
    sys.stdout.write(f"{key}\n\n{entry}")


def make_key(name: str) -> tuple[str, str]:
    """Make a random key and its entry for a key file. Raises: ConfigurationError: the name is not allowed."""
    key = f"kvf-{secrets.token_urlsafe(32)}"
    entry = {"name": name, "hash": f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"}
    try:
        ApiKey.model_validate(entry)
    except ValidationError:
        message = f"name is {name!r}; it must be 1 to 64 of A-Z a-z 0-9 . _ -"
        raise ConfigurationError(message) from None
    return key, f'[[key]]\nname = "{name}"\nhash = "{entry["hash"]}"\nscopes = ["chat"]\n'


def sessions(config: StoredConfig) -> int:
    """List a key's sessions, or delete one; see `_stored`."""
    return _stored("sessions", config)


def documents(config: StoredConfig) -> int:
    """List a key's documents, or delete one; see `_stored`."""
    return _stored("documents", config)


def _stored(kind: Kind, config: StoredConfig) -> int:
    """List what the key has stored, or delete one. Returns the exit code.

    Raises: KvferryError: the router cannot be reached or refuses.
    """
    with _router(config) as client:
        if config.delete_id:
            _checked(client.delete(f"/v1/{kind}/{quote(config.delete_id, safe='')}"))
            sys.stdout.write(f"deleted {config.delete_id}\n")
            return 0
        found = _checked(client.get(f"/v1/{kind}"))["data"]
    if config.json_output:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    else:
        _show(_COLUMNS[kind], found)
    return 0


def keys(config: KeysConfig) -> int:
    """List the names, scopes and limits of a key file, or have the router forget one. Returns the exit code.

    Raises:
        ConfigurationError: there is no file, it is invalid, or has no key of the name.
        KvferryError: the router cannot be reached or refuses.
    """
    if config.forget:
        return _forget(config)
    if not config.api_keys_file:
        raise ConfigurationError("--api-keys-file is ''; it must be the router's file of hashed keys")
    found = [key.model_dump(include={*_KEY_COLUMNS}) for key in KeyFile(Path(config.api_keys_file)).keys]
    if config.json_output:
        sys.stdout.write(json.dumps(found, indent=1, default=list) + "\n")
    else:
        _show(_KEY_COLUMNS, found)
    return 0


def _forget(config: KeysConfig) -> int:
    key_hash = config.forget
    if not key_hash.startswith("sha256:"):
        entries = KeyFile(Path(config.api_keys_file)).keys if config.api_keys_file else ()
        found = [key.hash for key in entries if key.name == config.forget]
        if not found:
            raise ConfigurationError(
                f"--forget is {config.forget!r}; it must be a name in --api-keys-file "
                f"{config.api_keys_file!r}, or the sha256:... of a key"
            )
        (key_hash,) = found
    with _router(config) as client:
        answer = _checked(client.delete(f"/v1/keys/{key_hash}/data", timeout=_FORGET_TIMEOUT_S))
    sys.stdout.write(
        f"deleted {answer['sessions']} sessions and {answer['documents']} documents of {key_hash}\n"
    )
    return 0


@contextlib.contextmanager
def _router(config: StoredConfig | KeysConfig) -> Iterator[httpx.Client]:
    """Open a client of the router's API. Raises: WorkerUnavailable: in the context, it cannot be reached."""
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    # A proxy from the environment cannot reach this machine's loopback.
    with httpx.Client(base_url=config.url, headers=headers, timeout=_TIMEOUT_S, trust_env=False) as client:
        try:
            yield client
        except httpx.TransportError as error:
            what = str(error) or type(error).__name__
            raise WorkerUnavailable(f"the router at {config.url} cannot be reached: {what}") from error


def _checked(reply: httpx.Response) -> Any:
    if reply.status_code != 200:
        try:
            message = reply.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"HTTP status {reply.status_code}"
        raise KvferryError(str(message))
    return reply.json()


def _show(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of plain text, which other programs can read too."""
    cells = [[name.replace("_", " ") for name in columns]]
    cells += [[_cell(name, row.get(name)) for name in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        sys.stdout.write(text.rstrip() + "\n")


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name.endswith("_at"):
        return datetime.datetime.fromtimestamp(value, datetime.UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    if isinstance(value, list | tuple | set | frozenset):
        return ",".join(sorted(value))
    return str(value)
