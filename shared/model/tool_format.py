"""The format of a model's tool calls and thoughts, learnt from its chat template for parsing and grammars.

A checkpoint may bring a `response_template` of transformers; without one, a template is made from what the
chat template writes for a call with known parts. Calls must be JSON objects with the name and the arguments,
or in Harmony's channels (gpt-oss). Others are not recognised, and stay in the content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.shared.sampling.schemas import guided_json

_NAME, _KEY, _VALUE = "kvferry_function", "kvferry_key", "kvferry_value"
_THOUGHTS = {"<think>": "</think>", "[THINK]": "[/THINK]"}
_EXAMPLE_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "an example",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}, "required": [_KEY]},
    },
}
_ARGUMENTS = {_KEY: _VALUE}
_WRITTEN = (
    json.dumps(_ARGUMENTS),
    json.dumps(_ARGUMENTS, separators=(",", ":")),
    json.dumps(_ARGUMENTS, indent=4),
)
"""The ways in which templates may write them."""
_USER = {"role": "user", "content": "hello"}
_HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|message|>")
_HARMONY_NAME = r" to=functions\.(?P<name>[\w.-]+)"
_HARMONY_ARGUMENTS = r"\s*(?:<\|constrain\|>)?\w*<\|message\|>"
_HARMONY_CALL = r"<\|channel\|>(?:commentary|analysis)"
HARMONY: Mapping[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|start|>assistant",
    "fields": {
        "reasoning_content": {
            "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
            "close": "<|end|>",
            "content": "text",
        },
        "tool_calls": {
            # The function's name comes after the channel's, or before it as chat templates write it.
            "open_pattern": (
                rf"(?:<\|start\|>assistant)?{_HARMONY_CALL}{_HARMONY_NAME}{_HARMONY_ARGUMENTS}"
                rf"|(?:\A|<\|start\|>assistant){_HARMONY_NAME}{_HARMONY_CALL}{_HARMONY_ARGUMENTS}"
            ),
            "close": ["<|call|>", "<|end|>"],
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {
            "close_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>\w+\s*<\|message\|>|<\|end\|>",
            "content": "text",
        },
    },
}
"""transformers' template of Harmony's channels: analysis is thoughts; final and commentary are content."""


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """The text of calls: `begin` name `middle` arguments `end`, with `between` between two.

    Attributes:
        begin, end: of all calls together.
        between: from a call's arguments to the next one's name; None where there is one call at most.
        response_template: for transformers' parser; None where its text cannot be told from content.
    """

    begin: str
    middle: str
    between: str | None
    end: str
    response_template: Mapping[str, Any] | None

    def grammar(
        self, tools: Sequence[Mapping[str, Any]], *, parallel: bool, literal: Callable[[str], str]
    ) -> str:
        """Return Lark's rules for calls of these tools; `calls` is their start.

        Args: tools: their `function` objects; literal: quotes a text for Lark.
        """
        more = f" ({literal(self.between)} call)*" if parallel and self.between is not None else ""
        rules = [f"calls: {literal(self.begin)} call{more} {literal(self.end)}"]
        alternatives = []
        for number, tool in enumerate(tools):
            schema = tool.get("parameters") or {
                "type": "object",
                "properties": {},
                "additionalProperties": False,
            }
            alternatives.append(f"{literal(json.dumps(tool['name'])[1:-1] + self.middle)} arguments_{number}")
            rules.append(f"arguments_{number}: %json {guided_json(schema)}")
        return "\n".join([*rules, f"call: {' | '.join(alternatives)}"])


def tool_format(
    chat_template: str, render: Callable[..., str], eos_texts: Sequence[str]
) -> ToolFormat | None:
    """Find what a chat template writes for calls; None where it has none, or writes them not as JSON.

    Args: render: the template's text of messages and tools, with `add_generation_prompt`; may raise.
    """
    parts = _parts(render, 1, eos_texts)
    if parts is None:
        return None
    begin, middle, _, end = parts
    several = _parts(render, 2, eos_texts)
    between = several[2] if several is not None and several[3] == end else None
    return ToolFormat(
        begin=begin,
        middle=middle,
        between=between,
        end=end,
        response_template=_response_template(
            begin, middle, end, thoughts=_thoughts(chat_template), anchor=_anchor(render)
        ),
    )


def _parts(
    render: Callable[..., str], num_calls: int, eos_texts: Sequence[str]
) -> tuple[str, str, str, str] | None:
    """Find the texts before the first name, between name and arguments, between calls, and at the end."""
    function = {"name": _NAME, "arguments": dict(_ARGUMENTS)}
    calls = [{"id": "call00000", "type": "function", "function": function} for _ in range(num_calls)]
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    try:
        prompt = render([_USER], tools=[_EXAMPLE_TOOL], add_generation_prompt=True)
        text = render([_USER, answer], tools=[_EXAMPLE_TOOL], add_generation_prompt=False)
    except Exception:  # the template is the checkpoint's program, and may refuse in any way
        return None
    text = _beyond(prompt, text)
    for eos in eos_texts:
        text = text.partition(eos)[0]
    names = text.split(_NAME)
    if len(names) != num_calls + 1:
        return None
    written = next((form for form in _WRITTEN if form in names[1]), None)
    if written is None:
        return None
    middle, _, rest = names[1].partition(written)
    end = names[-1].partition(written)[2]
    return names[0], middle, rest if num_calls > 1 else "", end.rstrip("\n")


def _anchor(render: Callable[..., str]) -> str:
    """Return what the template writes before an answer. A thought opened there is part of the answer."""
    with_prompt, without = (render([_USER], add_generation_prompt=value) for value in (True, False))
    anchor = _beyond(without, with_prompt)
    for tag in _THOUGHTS:
        anchor = anchor.partition(tag)[0]
    return anchor


def _beyond(other: str, text: str) -> str:
    """Return the text after its common beginning with another one."""
    pairs = enumerate(zip(other, text, strict=False))
    return text[next((i for i, (a, b) in pairs if a != b), min(len(other), len(text))) :]


def _response_template(
    begin: str, middle: str, end: str, *, thoughts: dict[str, Any], anchor: str
) -> dict[str, Any] | None:
    """Make transformers' template of content, thoughts and calls."""
    for thought_end in _THOUGHTS.values():
        begin = begin.rpartition(thought_end)[2]
    opening, brace, _ = begin.rpartition("{")
    closing = end.partition("}")[2]
    arguments = middle.strip(' \n\t:",')
    if not brace or not opening.strip() or not arguments.isidentifier():
        return None
    is_list = opening.strip().endswith("[") and opening.strip() != "["
    literal = opening.strip().removesuffix("[") if is_list else opening.strip()
    part = "" if is_list else "content."
    function = {"name": f"{{{part}name}}", "arguments": f"{{{part}{arguments}}}"}
    calls: dict[str, Any] = {
        # White space before a call, and between two, is not content.
        "open_pattern": r"\s*" + re.escape(literal),
        "content": "json",
        "repeats": not is_list,
        "transform": {"type": "function", "function": function},
        "transform_each": is_list,
    }
    if not is_list and closing.strip():
        calls["close"] = closing.strip()
    return _with_anchor({**thoughts, "tool_calls": calls}, anchor)


def is_harmony(chat_template: str) -> bool:
    """Return whether the chat template writes messages in Harmony's channels."""
    return all(mark in chat_template for mark in _HARMONY_MARKS)


def thoughts_template(chat_template: str, render: Callable[..., str]) -> dict[str, Any] | None:
    """Make transformers' template of content and thoughts, where the chat template has tags for thoughts."""
    fields = _thoughts(chat_template)
    return _with_anchor(fields, _anchor(render)) if fields else None


def _thoughts(chat_template: str) -> dict[str, Any]:
    for tag, end in _THOUGHTS.items():
        if tag in chat_template and end in chat_template:
            return {"reasoning_content": {"open": tag, "close": end, "content": "text"}}
    return {}


def _with_anchor(fields: dict[str, Any], anchor: str) -> dict[str, Any]:
    start = {"start_anchor": anchor} if anchor else {"start_anchor_pattern": r"\Z"}
    return {"defaults": {"role": "assistant"}, **start, "fields": {**fields, "content": {"content": "text"}}}
