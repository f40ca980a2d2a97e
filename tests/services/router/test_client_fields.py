"""Every field of the installed clients' request types is decided on: taken, ignored and named, or refused by
name."""

from __future__ import annotations

import typing
from typing import Any

import anthropic.types as anthropic_types
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import chat as openai_chat
from openai.types import completion_create_params as text_params
from openai.types import responses as openai_types
from openai.types import shared_params
from openai.types.chat import completion_create_params
from openai.types.responses import response_create_params, response_input_param
from openai.types.shared_params.reasoning import Reasoning as OpenAiReasoning

from kvferry.services.router.completion import messages, requests, responses, structured, texts, tools
from kvferry.services.router.http.body import ClientModel

_CACHED = "prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier service_tier user"
_OF_CHATS = f"metadata prediction store verbosity {_CACHED}"
_OF_RESPONSES = f"access_programs image max_tool_calls stream_options {_CACHED}"
_OF_PROMPTS = "speed user_profile_id workspace_id"
_OF_MESSAGES = f"diagnostics inference_geo metadata service_tier {_OF_PROMPTS}"

CASES: list[tuple[type[ClientModel], Any, str]] = [
    (requests.ChatRequest, completion_create_params.CompletionCreateParamsNonStreaming, _OF_CHATS),
    (requests.ChatRequest, completion_create_params.CompletionCreateParamsStreaming, _OF_CHATS),
    (texts.TextRequest, text_params.CompletionCreateParamsNonStreaming, "user"),
    (texts.TextRequest, text_params.CompletionCreateParamsStreaming, "user"),
    *((requests.Message, param, "") for param in typing.get_args(openai_chat.ChatCompletionMessageParam)),
    (requests.ContentPart, openai_chat.ChatCompletionContentPartTextParam, "prompt_cache_breakpoint"),
    (requests.ContentPart, openai_chat.ChatCompletionContentPartRefusalParam, ""),
    (requests.StreamOptions, openai_chat.ChatCompletionStreamOptionsParam, "include_obfuscation"),
    (tools.Tool, openai_chat.ChatCompletionFunctionToolParam, ""),
    (tools.Function, shared_params.FunctionDefinition, "strict"),
    (tools.NamedTool, openai_chat.ChatCompletionNamedToolChoiceParam, ""),
    (tools.NamedFunction, openai_chat.chat_completion_named_tool_choice_param.Function, ""),
    (tools.AllowedTools, openai_chat.ChatCompletionAllowedToolChoiceParam, ""),
    (tools.ToolSubset, openai_chat.ChatCompletionAllowedToolsParam, ""),
    (tools.ToolCall, openai_chat.ChatCompletionMessageFunctionToolCallParam, ""),
    (tools.CalledFunction, openai_chat.chat_completion_message_function_tool_call_param.Function, ""),
    (structured.ResponseFormat, shared_params.ResponseFormatText, ""),
    (structured.ResponseFormat, shared_params.ResponseFormatJSONObject, ""),
    (structured.ResponseFormat, shared_params.ResponseFormatJSONSchema, ""),
    (structured.JsonSchema, shared_params.response_format_json_schema.JSONSchema, ""),
    (responses.ResponseRequest, response_create_params.ResponseCreateParamsNonStreaming, _OF_RESPONSES),
    (responses.ResponseRequest, response_create_params.ResponseCreateParamsStreaming, _OF_RESPONSES),
    (responses.Reasoning, OpenAiReasoning, "context generate_summary mode summary"),
    (responses.TextConfig, openai_types.ResponseTextConfigParam, "verbosity"),
    (responses.TextFormat, openai_types.ResponseFormatTextJSONSchemaConfigParam, ""),
    (responses.FunctionTool, openai_types.FunctionToolParam, "allowed_callers defer_loading output_schema"),
    (responses.Namespace, openai_types.NamespaceToolParam, "description"),
    (responses.ChosenFunction, openai_types.ToolChoiceFunctionParam, ""),
    (responses.AllowedFunctions, openai_types.ToolChoiceAllowedParam, ""),
    (requests.ContentPart, openai_types.ResponseInputTextParam, "prompt_cache_breakpoint"),
    (requests.ContentPart, openai_types.ResponseOutputTextParam, ""),
    (requests.ContentPart, openai_types.ResponseOutputRefusalParam, ""),
    (responses.InputMessage, openai_types.EasyInputMessageParam, "phase"),
    (responses.InputMessage, response_input_param.Message, ""),
    (responses.InputMessage, openai_types.ResponseOutputMessageParam, "phase"),
    (responses.InputReasoning, openai_types.ResponseReasoningItemParam, "encrypted_content"),
    (responses.InputCall, openai_types.ResponseFunctionToolCallParam, "caller"),
    (responses.InputCustomCall, openai_types.ResponseCustomToolCallParam, "async caller namespace"),
    (responses.InputCallOutput, response_input_param.FunctionCallOutput, "caller name namespace"),
    (responses.InputCallOutput, openai_types.ResponseCustomToolCallOutputParam, "caller"),
    (responses.ItemReference, response_input_param.ItemReference, ""),
    (messages.MessagesRequest, message_create_params.MessageCreateParamsNonStreaming, _OF_MESSAGES),
    (messages.MessagesRequest, message_create_params.MessageCreateParamsStreaming, _OF_MESSAGES),
    (messages.CountTokensRequest, message_count_tokens_params.MessageCountTokensParams, _OF_PROMPTS),
    (messages.ClientMessage, anthropic_types.MessageParam, ""),
    (
        messages.ClientTool,
        anthropic_types.ToolParam,
        "allowed_callers cache_control defer_loading eager_input_streaming input_examples strict",
    ),
    (messages.ToolChoice, anthropic_types.ToolChoiceAutoParam, ""),
    (messages.ToolChoice, anthropic_types.ToolChoiceAnyParam, ""),
    (messages.ToolChoice, anthropic_types.ToolChoiceToolParam, ""),
    (messages.ToolChoice, anthropic_types.ToolChoiceNoneParam, ""),
    (messages.Thinking, anthropic_types.ThinkingConfigEnabledParam, ""),
    (messages.Thinking, anthropic_types.ThinkingConfigAdaptiveParam, ""),
    (messages.Thinking, anthropic_types.ThinkingConfigDisabledParam, ""),
    (messages.OutputConfig, anthropic_types.OutputConfigParam, ""),
    (messages.OutputFormat, anthropic_types.JSONOutputFormatParam, ""),
    (requests.ContentPart, anthropic_types.TextBlockParam, "cache_control citations"),
    (requests.ContentPart, anthropic_types.DocumentBlockParam, "cache_control citations context title"),
    (messages.ToolUseBlock, anthropic_types.ToolUseBlockParam, "cache_control caller toolset_name"),
    (messages.ToolResultBlock, anthropic_types.ToolResultBlockParam, "cache_control is_error toolset_name"),
    (messages.ThinkingBlock, anthropic_types.ThinkingBlockParam, ""),
    (tools.LeftOut, anthropic_types.RedactedThinkingBlockParam, "data"),
]


@pytest.mark.parametrize(("model", "theirs", "ignored"), CASES)
def test_every_field_of_the_installed_clients(model: type[ClientModel], theirs: Any, ignored: str) -> None:
    """A name that is new here is new in the client: take it, refuse it by name (`refused_fields.py`) if it
    would change the answer, or note here that it is ignored."""
    taken = {field.alias or name for name, field in model.model_fields.items()}
    known = taken | model.echoed | model.refused.keys()
    members = typing.get_args(theirs) or (theirs,)
    fields = {name for member in members for name in typing.get_type_hints(member)}
    assert fields - known == set(ignored.split())


def kinds_of(union: Any, field: str = "type") -> set[str]:
    """The types by which members of a union tell themselves apart."""
    kinds = set()
    for member in typing.get_args(union):
        hint = {} if member is str else typing.get_type_hints(member)
        kinds |= {name for name in typing.get_args(hint.get(field)) if isinstance(name, str)}
    return kinds


def test_the_unions_of_the_installed_clients() -> None:
    """A member that is new here is new in the client: see whether leaving it out and naming it, or refusing
    contents by name, is right."""
    assert kinds_of(openai_chat.ChatCompletionMessageParam, "role") == {
        "developer", "system", "user", "assistant", "tool", "function",
    }  # fmt: skip
    assert kinds_of(openai_chat.ChatCompletionToolUnionParam) == {"function", "custom"}
    assert kinds_of(openai_chat.ChatCompletionMessageToolCallUnionParam) == {"function", "custom"}
    assert kinds_of(openai_chat.ChatCompletionContentPartParam) == {
        "text", "image_url", "input_audio", "file",
    }  # fmt: skip
    assert kinds_of(completion_create_params.ResponseFormat) == set(
        typing.get_args(structured.ResponseFormat.model_fields["type"].annotation)
    )
    choices = typing.get_args(openai_chat.ChatCompletionToolChoiceOptionParam)
    plain = {
        name
        for choice in choices
        if typing.get_origin(choice) is typing.Literal
        for name in typing.get_args(choice)
    }
    assert plain == {"none", "auto", "required"}
    assert kinds_of(openai_types.ToolParam) == {
        "apply_patch", "code_interpreter", "computer", "computer_use_preview", "custom", "file_search",
        "function", "image_generation", "local_shell", "mcp", "namespace", "programmatic_tool_calling",
        "shell", "tool_search", "web_search", "web_search_2025_08_26", "web_search_preview",
        "web_search_preview_2025_03_11",
    }  # fmt: skip
    assert kinds_of(response_input_param.ResponseInputItemParam) == {
        "additional_tools", "apply_patch_call", "apply_patch_call_output", "code_interpreter_call",
        "compaction", "compaction_trigger", "computer_call", "computer_call_output", "configuration_update",
        "custom_tool_call", "custom_tool_call_output", "file_search_call", "function_call",
        "function_call_output", "image_generation_call", "local_shell_call", "local_shell_call_output",
        "mcp_approval_request", "mcp_approval_response", "mcp_call", "mcp_list_tools", "message", "program",
        "program_output", "reasoning", "shell_call", "shell_call_output", "tool_search_call",
        "tool_search_output", "web_search_call",
    }  # fmt: skip
    assert kinds_of(anthropic_types.ContentBlockParam) == {
        "bash_code_execution_tool_result", "code_execution_tool_result", "container_upload", "document",
        "image", "redacted_thinking", "search_result", "server_tool_use", "text",
        "text_editor_code_execution_tool_result", "thinking", "tool_result", "tool_search_tool_result",
        "tool_use", "web_fetch_tool_result", "web_search_tool_result",
    }  # fmt: skip
