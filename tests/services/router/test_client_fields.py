"""Every field of the installed clients' request types is decided on: taken, ignored or refused by name."""

from __future__ import annotations

import typing
from typing import Any

import anthropic.types as anthropic_types
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import responses as openai_types
from openai.types.responses import response_create_params, response_input_param
from openai.types.shared_params.reasoning import Reasoning as OpenAiReasoning
from pydantic import BaseModel

from kvferry.services.router.completion import messages, responses


def names(model: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


@pytest.mark.parametrize(
    ("model", "theirs"),
    [
        (responses.ResponseRequest, response_create_params.ResponseCreateParamsNonStreaming),
        (responses.ResponseRequest, response_create_params.ResponseCreateParamsStreaming),
        (responses.ResponseStreamOptions, response_create_params.StreamOptions),
        (responses.Reasoning, OpenAiReasoning),
        (responses.TextConfig, openai_types.ResponseTextConfigParam),
        (responses.TextFormat, openai_types.ResponseFormatTextJSONSchemaConfigParam),
        (responses.FunctionTool, openai_types.FunctionToolParam),
        (responses.ChosenFunction, openai_types.ToolChoiceFunctionParam),
        (responses.InputText, openai_types.ResponseInputTextParam),
        (responses.InputText, openai_types.ResponseOutputTextParam),
        (responses.InputMessage, openai_types.EasyInputMessageParam),
        (responses.InputMessage, response_input_param.Message),
        (responses.InputMessage, openai_types.ResponseOutputMessageParam),
        (responses.InputReasoning, openai_types.ResponseReasoningItemParam),
        (responses.InputCall, openai_types.ResponseFunctionToolCallParam),
        (responses.InputCallOutput, response_input_param.FunctionCallOutput),
    ],
)
def test_every_field_of_the_responses_api(model: Any, theirs: Any) -> None:
    """A name that is missing here is new in the client: support it, or say that it is ignored or refused."""
    assert set(typing.get_type_hints(theirs)) - names(model) == set()


@pytest.mark.parametrize(
    ("model", "theirs"),
    [
        (messages.MessagesRequest, message_create_params.MessageCreateParamsNonStreaming),
        (messages.MessagesRequest, message_create_params.MessageCreateParamsStreaming),
        (messages.CountTokensRequest, message_count_tokens_params.MessageCountTokensParams),
        (messages.ClientMessage, anthropic_types.MessageParam),
        (messages.ClientTool, anthropic_types.ToolParam),
        (messages.ToolChoice, anthropic_types.ToolChoiceAutoParam),
        (messages.ToolChoice, anthropic_types.ToolChoiceAnyParam),
        (messages.ToolChoice, anthropic_types.ToolChoiceToolParam),
        (messages.ToolChoice, anthropic_types.ToolChoiceNoneParam),
        (messages.Thinking, anthropic_types.ThinkingConfigEnabledParam),
        (messages.Thinking, anthropic_types.ThinkingConfigAdaptiveParam),
        (messages.Thinking, anthropic_types.ThinkingConfigDisabledParam),
        (messages.OutputConfig, anthropic_types.OutputConfigParam),
        (messages.OutputFormat, anthropic_types.JSONOutputFormatParam),
        (messages.TextBlock, anthropic_types.TextBlockParam),
        (messages.ToolUseBlock, anthropic_types.ToolUseBlockParam),
        (messages.ToolResultBlock, anthropic_types.ToolResultBlockParam),
        (messages.ThinkingBlock, anthropic_types.ThinkingBlockParam),
        (messages.RedactedThinkingBlock, anthropic_types.RedactedThinkingBlockParam),
    ],
)
def test_every_field_of_the_messages_api(model: Any, theirs: Any) -> None:
    members = typing.get_args(theirs) or (theirs,)
    fields = {name for its in members for name in typing.get_type_hints(its)}
    assert fields - names(model) == set()
