"""Options of `kvferry chat`."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from kvferry.shared.process.config import Settings
from kvferry.shared.process.options import ACCESS, COMPRESSION, TIMEOUTS, Seconds, group

ANSWERS = group("Session and answers")


class ChatConfig(Settings):
    """Options of `kvferry chat`."""

    url: Annotated[str, ACCESS] = Field("http://127.0.0.1:8000", description="address of the router")
    api_key: Annotated[str, ACCESS] = Field(
        "", repr=False, description="API key to send, if the router wants one"
    )
    chat_model: Annotated[str, ANSWERS] = Field(
        "", description="model to ask for; empty: the first that the router serves"
    )
    session: Annotated[str, ANSWERS] = Field("", description="session id to continue; empty: a new session")
    method: Annotated[str, COMPRESSION] = Field(
        "", description="compression method; empty: the router's default"
    )
    token_budget: Annotated[int, COMPRESSION] = Field(
        0, ge=0, description="token budget of each turn; 0: the router's default"
    )
    max_tokens: Annotated[int, ANSWERS] = Field(
        0, ge=0, description="longest answer in tokens; 0: the router's default"
    )
    temperature: Annotated[float, ANSWERS] = Field(
        0.0, ge=0, le=2, description="sampling temperature; 0 always takes the most likely token"
    )
    input_history: Annotated[str, ANSWERS] = Field(
        "", description="file that stores typed messages, for the arrow keys of later chats; empty: no file"
    )
    chat_timeout_s: Annotated[Seconds, TIMEOUTS] = Field(
        300.0, gt=0, description="how long to wait for the router's next data"
    )

    @field_validator("url")
    @classmethod
    def _is_url(cls, value: str) -> str:
        if not value.startswith(("http://", "https://")) or not urlsplit(value).hostname:
            raise ValueError("must be http://host:port or https://host:port")
        return value
