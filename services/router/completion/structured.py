"""Structured output in requests: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`, and
SGLang's `json_schema`, `regex` and `ebnf`, as one grammar.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, StringConstraints
from pydantic_core import from_json

from kvferry.services.router.completion.tools import Tool
from kvferry.services.router.http.body import ClientModel, Refused
from kvferry.shared.errors import InvalidRequest
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.sampling.params import Grammar
from kvferry.shared.sampling.schemas import guided_json

_NAMED = "response_format.json_schema.schema"
JSON_OBJECT = Grammar(kind="json_schema", text='{"type":"object"}')
_Text = Annotated[str, StringConstraints(min_length=1)]
_Schema = dict[str, Any]
_Kind = Literal["json_schema", "choice", "regex", "grammar"]
_Choices = Annotated[list[_Text], Field(min_length=1, max_length=4096)]


class JsonSchema(ClientModel):
    """A named schema. Answers follow it whether `strict` or not."""

    model_config = ConfigDict(serialize_by_alias=True, validate_by_name=False)

    name: str | None = None
    description: str | None = None
    schema_: Annotated[_Schema | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(ClientModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(ClientModel):
    """vLLM's; exactly one of the first five."""

    refused: ClassVar[Refused] = {
        **dict.fromkeys(("structural_tag", "whitespace_pattern"), ()),
        "disable_additional_properties": (False,),
    }

    json_: Annotated[_Schema | _Text | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: _Text | None = None
    choice: _Choices | None = None
    grammar: _Text | None = None
    disable_any_whitespace: bool | None = None


class StructuredField(ClientModel):
    """What asks for structured output in every API of this server."""

    structured_outputs: StructuredOutputs | None = None


class StructuredFields(StructuredField):
    """The fields that ask for structured output."""

    response_format: ResponseFormat | None = None
    guided_json: _Schema | _Text | None = None
    guided_regex: _Text | None = None
    guided_choice: _Choices | None = None
    guided_grammar: _Text | None = None
    json_schema: _Text | None = None
    regex: _Text | None = None
    ebnf: _Text | None = None


STRUCTURED = frozenset(StructuredFields.model_fields)


def grammar_of(request: StructuredFields) -> tuple[str, Grammar] | None:
    """Return the field that asks for structured output, and its grammar; None if none does.

    Raises: InvalidRequest where several do.
    """
    found = list(_asked(request))
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise InvalidRequest(f"{names} are given; only one may ask for structured output", param=found[1][0])
    return found[0] if found else None


def calls_grammar(
    tokenizer: ChatTokenizer, tools: list[Tool], *, parallel: bool, or_text: Grammar | None = None
) -> Grammar:
    """Return the grammar of calls of these tools, as the model's chat template writes them.

    Args: or_text: a JSON schema that the answer may follow in place of calls.

    Raises: InvalidRequest if the template does not say how.
    """
    if (form := tokenizer.template.tool_format) is None:
        raise InvalidRequest(
            "the model's chat template has no tool calls as JSON objects, which is how they can be demanded"
        )

    def literal(text: str) -> str:
        parts = tokenizer.special_parts(text)
        return " ".join(json.dumps(part) if isinstance(part, str) else f"<[{part}]>" for part in parts)

    rules = form.grammar([tool.function.model_dump() for tool in tools], parallel=parallel, literal=literal)
    if or_text is None:
        return Grammar(kind="lark", text=f"start: calls\n{rules}")
    schema = guided_json(from_json(or_text.text))
    return Grammar(kind="lark", text=f"start: calls | answer\nanswer: %json {schema}\n{rules}")


def _asked(request: StructuredFields) -> Iterator[tuple[str, Grammar]]:
    match request.response_format:
        case ResponseFormat(type="json_object"):
            yield "response_format", JSON_OBJECT
        case ResponseFormat(type="json_schema", json_schema=named):
            if named is None or named.schema_ is None:
                raise InvalidRequest(f"{_NAMED} is missing", param=_NAMED)
            yield _NAMED, _grammar("json_schema", named.schema_)
    given = request.structured_outputs or StructuredOutputs()
    asked: tuple[tuple[str, _Kind, Any], ...] = (
        ("structured_outputs.json_object", "json_schema", {"type": "object"} if given.json_object else None),
        ("structured_outputs.json", "json_schema", given.json_),
        ("guided_json", "json_schema", request.guided_json),
        ("json_schema", "json_schema", request.json_schema),
        ("structured_outputs.choice", "choice", given.choice),
        ("guided_choice", "choice", request.guided_choice),
        ("structured_outputs.regex", "regex", given.regex),
        ("guided_regex", "regex", request.guided_regex),
        ("regex", "regex", request.regex),
        ("structured_outputs.grammar", "grammar", given.grammar),
        ("guided_grammar", "grammar", request.guided_grammar),
        ("ebnf", "grammar", request.ebnf),
    )
    for name, kind, value in asked:
        if value is not None:
            yield name, _grammar(kind, value, is_compact=bool(given.disable_any_whitespace))


def _grammar(kind: _Kind, value: Any, *, is_compact: bool = False) -> Grammar:
    """Return a grammar. Args: value: the grammar's text, or the JSON value that is its text.

    Raises: InvalidRequest if a schema is to be compact and is not JSON.
    """
    if is_compact and kind == "json_schema":
        try:
            schema = from_json(value) if isinstance(value, str) else value
        except ValueError as error:
            raise InvalidRequest(f"structured_outputs.json is no JSON: {error}") from None
        return Grammar(kind="lark", text=f"start: %json {guided_json(schema, is_compact=True)}")
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return Grammar(kind=kind, text=text)
