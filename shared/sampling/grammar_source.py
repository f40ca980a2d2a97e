"""A grammar in llguidance's form, and what bounds it.

Imports neither torch nor a service, because the process that tries untrusted grammars (`grammar_child.py`)
should begin soon and be small.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvferry.shared.errors import InvalidRequest
from kvferry.shared.sampling.schemas import guided_json

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_CHARACTERS = 1 << 18
_MAX_SYMBOLS = 100_000
_MAX_LEXER_STATES = 50_000
"""Of 1 to 2 KB each."""
_ASCII_CLASSES = "dws"
r"""What `\d`, `\w` and `\s` match in regular expressions: ASCII, as JSON Schema has it."""


def compiled(tokens: Any, kind: str, text: str) -> LLMatcher:
    """The matcher at the beginning of a grammar of this kind over llguidance's tokens.

    Raises: InvalidRequest: the grammar is not valid or too large.
    """
    from llguidance import LLMatcher, LLParserLimits

    if len(text) > MAX_CHARACTERS:
        raise InvalidRequest(f"it has {len(text)} characters; there may be {MAX_CHARACTERS}")
    limits = LLParserLimits(
        max_grammar_size=_MAX_SYMBOLS, max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False
    )
    try:
        matcher = LLMatcher(tokens, _source(kind, text), log_level=0, limits=limits)
    except RecursionError:
        raise InvalidRequest("it is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
    if matcher.is_error():
        raise InvalidRequest(first_line(matcher))
    return matcher


def _source(kind: str, text: str) -> str:
    """Raises: ValueError, RecursionError."""
    from llguidance import LLMatcher, regex_to_lark
    from llguidance.gbnf_to_lark import any_to_lark

    match kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(guided_json(json.loads(text)))
        case "regex":
            regex = regex_to_lark(text, _ASCII_CLASSES).replace("\n", r"\n")
            return LLMatcher.grammar_from_lark(f"start: /{regex}/")
        case "choice":
            choices = " | ".join(json.dumps(choice) for choice in json.loads(text))
            return LLMatcher.grammar_from_lark(f"start: {choices}")
        case "lark":
            return LLMatcher.grammar_from_lark(text)
        case "grammar":
            return LLMatcher.grammar_from_lark(any_to_lark(text))
    raise ValueError(f"kind is {kind!r}")


def first_line(matcher: LLMatcher) -> str:
    """What is wrong with a matcher, in one line."""
    lines = [line for line in matcher.get_error().splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["unknown"])[0].removeprefix("error: ")[:300]
