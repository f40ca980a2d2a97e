"""POST /v1/completions: its fields beside those that chats have, too."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from kvferry.services.router.completion import refused_fields
from kvferry.services.router.completion.requests import CompletionFields, TokenId
from kvferry.services.router.http.body import Range

_Prompt = str | Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


class TextRequest(CompletionFields):
    """POST /v1/completions. A prompt is a string or token ids; a list of prompts has the choices of each in
    turn.

    With `echo` the answer's text begins with the prompt, and `logprobs` lists the prompt's tokens too.
    `prompt_logprobs` lists them apart from the text, as vLLM does. `max_tokens` may be 0 with either. No
    session takes them, and the prompt is run afresh for its logprobs.
    """

    refused = refused_fields.OF_TEXTS

    prompt: _Prompt | Annotated[list[_Prompt], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Range(0)] | None = None
    logprobs: Annotated[int, Range(0, 5)] | None = None
    echo: bool | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompts_are_alike(cls, value: Any) -> Any:
        if isinstance(value, list) and any(isinstance(item, str | list) for item in value):
            wrong = [item for item in value if not isinstance(item, str | list)]
            if wrong:
                raise PydanticCustomError(
                    "rule", "must be a prompt or a list of them, each text or token ids"
                )
        return value

    @property
    def prompts(self) -> list[str | list[int]]:
        """Every prompt of a list, or the only one."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt

    @property
    def num_alternatives(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_alternatives(self) -> int | None:
        counts = (self.logprobs if self.echo else None, self.prompt_logprobs)
        return max((count for count in counts if count is not None), default=None)
