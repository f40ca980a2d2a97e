"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, ClassVar, NotRequired

import msgspec
from fastapi import Request
from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError
from starlette.responses import Response
from typing_extensions import TypedDict

from kvferry.services.router.api.completions import Shared, keyed_router, named_model
from kvferry.services.router.completion.documents import first_prompt
from kvferry.services.router.completion.engine_fields import ChatFields
from kvferry.services.router.completion.requests import Message, TokenId
from kvferry.services.router.completion.tools import Tools
from kvferry.services.router.completion.translation import validated
from kvferry.services.router.http.body import ClientModel, Refused
from kvferry.shared.errors import InvalidRequest

router = keyed_router()

_OF_CHATS = (
    *("messages", "tools", "continue_final_message", "add_generation_prompt"),
    *("document_ids", "chat_template_kwargs"),
)


class TokenizeRequest(ChatFields):
    """POST /tokenize: a `prompt`, or the `messages` of a chat."""

    refused: ClassVar[Refused] = {"chat_template": ()}

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @field_validator("messages")
    @classmethod
    def _or_prompt(cls, value: list[Message] | None, info: Any) -> list[Message] | None:
        if value is not None and info.data.get("prompt") is not None:
            raise PydanticCustomError("rule", "must not be given beside prompt")
        return value

    @field_validator("add_special_tokens")
    @classmethod
    def _as_completions_have_it(cls, value: bool | None, info: Any) -> bool | None:
        if value and info.data.get("messages") is not None:
            raise PydanticCustomError("rule", "must be false for messages, as the chat template writes them")
        return value


class DetokenizeRequest(ClientModel):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class Tokens(TypedDict):
    """`token_strs` where the request wants them."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


class Detokenized(TypedDict):
    prompt: str


@router.post("/tokenize", summary="The token ids of a prompt", response_model=Tokens)
async def tokenize(request: Request, services: Shared, body: TokenizeRequest) -> Response:
    model = named_model(services, body.model)
    token_ids: Callable[[], list[int]]
    if body.messages is not None:
        given = {name: value for name in _OF_CHATS if (value := getattr(body, name)) is not None}
        chat = validated({"model": model.name, **given})
        prompt = await first_prompt(services, request.state.owner, request.state.work, chat, model)
        token_ids = partial(list, prompt.token_ids)
    elif body.prompt is not None:
        add_special = body.add_special_tokens is not False
        token_ids = partial(services.prompts.tokenizer.encode, body.prompt, add_special=add_special)
    else:
        raise InvalidRequest("prompt is missing; give it or messages", param="prompt")

    def answer() -> bytes:
        ids = token_ids()
        tokens = Tokens(count=len(ids), max_model_len=model.max_model_len, tokens=ids)
        if body.return_token_strs:
            tokens["token_strs"] = list(map(services.prompts.tokenizer.spelling, ids))
        return msgspec.json.encode(tokens)

    # In a thread, with all that is made from the tokens: a text of megabytes has millions of them.
    return Response(await request.state.work(answer), media_type="application/json")


@router.post("/detokenize", summary="The text of token ids")
async def detokenize(services: Shared, body: DetokenizeRequest) -> Detokenized:
    model = named_model(services, body.model)
    highest = max(body.tokens, default=0)
    if highest >= model.vocab_size:
        raise InvalidRequest(
            f"tokens has token {highest}; the vocabulary has ids 0 to {model.vocab_size - 1}", param="tokens"
        )
    decode = partial(services.prompts.tokenizer.decode, body.tokens, shows_special=True)
    return {"prompt": await asyncio.to_thread(decode)}
