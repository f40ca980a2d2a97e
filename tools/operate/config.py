"""Options of `kvferry sessions`, `documents` and `keys`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from kvferry.shared.process.config import Settings
from kvferry.shared.process.options import ACCESS, JSON, PROCESS

URL = Field("http://127.0.0.1:8000", description="address of the router")


def check_url(value: str) -> str:
    if not value.startswith(("http://", "https://")):
        raise ValueError("must be http://host:port or https://host:port")
    return value


class StoredConfig(Settings):
    """Options of `kvferry sessions` and `kvferry documents`."""

    url: Annotated[str, ACCESS] = URL
    api_key: Annotated[str, ACCESS] = Field(
        "", repr=False, description="API key whose sessions or documents are meant, if the router wants one"
    )
    delete_id: Annotated[str, PROCESS] = Field(
        "", description="delete this one, with its KV in every tier, in place of listing all"
    )
    json_output: Annotated[bool, PROCESS, JSON] = Field(False, description="print JSON in place of a table")

    _is_url = field_validator("url")(check_url)


class KeysConfig(Settings):
    """Options of `kvferry keys`."""

    url: Annotated[str, ACCESS] = URL
    api_key: Annotated[str, ACCESS] = Field("", repr=False, description="API key for admin, with --forget")
    api_keys_file: Annotated[str, ACCESS] = Field("", description="the router's TOML file of hashed keys")
    forget: Annotated[str, PROCESS] = Field(
        "",
        description="delete all that this key stored: its name in the file, or its sha256:...",
    )
    json_output: Annotated[bool, PROCESS, JSON] = Field(False, description="print JSON in place of a table")

    _is_url = field_validator("url")(check_url)
