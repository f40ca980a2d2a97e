"""A grammar in llguidance's form, and the limits on compiling and following it.

Imports neither torch nor a service, because the process that tries untrusted grammars (`grammar_child.py`)
should start fast and be small.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvferry.shared.errors import InvalidRequest, KvferryError
from kvferry.shared.sampling.schemas import guided_json

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_CHARACTERS = 1 << 18
FREE_S, TOKEN_S = 0.25, 0.02
"""The processor time that following a grammar may take: this much at once, and this much more per token. A
completion then delays others by at most this and one mask. At 151,936 ids ordinary grammars take 0.01 to 2 ms
a token, and llama.cpp's grammar of JSON takes 6 ms."""
_SHORT_S = 0.001
_MAX_SYMBOLS = 50_000
_MAX_LEXER_STATES = 50_000
"""States of 0.2 to 1 KB each."""
_MAX_FUEL = 100_000
"""Steps of the lexer for one mask: about 10 ms. With llguidance's 50,000 parser items, the most costly mask
found takes 0.3 s."""
_ASCII_CLASSES = "dws"
r"""What `\d`, `\w` and `\s` match in regular expressions: ASCII, as JSON Schema has it."""


def compiled(tokens: Any, kind: str, text: str) -> LLMatcher:
    """Compile a matcher at the beginning of a grammar of this kind over llguidance's tokens.

    Raises: InvalidRequest: the grammar is not valid or too large.
    """
    from llguidance import LLMatcher, LLParserLimits

    if len(text) > MAX_CHARACTERS:
        raise InvalidRequest(f"it has {len(text)} characters; there may be {MAX_CHARACTERS}")
    limits = LLParserLimits(
        max_grammar_size=_MAX_SYMBOLS,
        max_lexer_states=_MAX_LEXER_STATES,
        step_lexer_fuel=_MAX_FUEL,
        verbose_errors=False,
    )
    try:
        matcher = LLMatcher(tokens, _source(kind, text), log_level=0, limits=limits)
    except RecursionError:
        raise InvalidRequest("it is nested too deeply") from None
    except MemoryError:
        raise
    except Exception as error:  # of any class, when EBNF is converted
        raise InvalidRequest(str(error)) from None
    if matcher.is_error():
        raise InvalidRequest(first_line(matcher))
    return matcher


class Follower:
    """Follows a grammar from a matcher's place as long as that takes no more than `FREE_S` and `TOKEN_S`.

    The thread's own time counts, which other threads and processes hardly lengthen. It is read only after a
    call was not short by the wall clock, because reading it takes as long as an ordinary mask.

    Args: took: called with the processor time of each call in seconds; infinity if that was too much for
        llguidance, which then invalidates all copies of the matcher.
    """

    def __init__(self, matcher: LLMatcher, took: Callable[[float], None] = lambda time_s: None) -> None:
        self._matcher = matcher
        self._took = took
        self._left_s = FREE_S
        self._clock = time.perf_counter
        self._mask = b""

    def mask(self) -> bytes:
        """Return a bit for each token: whether it may come next. At the grammar's end only ending tokens may.

        Raises: InvalidRequest: that takes too much time or memory (reason `grammar_limit`).
        """
        self._mask = self._timed(self._matcher.compute_bitmask)
        if self._matcher.is_error():
            self._took(float("inf"))
            raise _limit(first_line(self._matcher))
        return self._mask

    def accept(self, token_id: int) -> bool:
        """Go on with a token. Return whether another one may follow.

        Raises: InvalidRequest: as `mask`; KvferryError: it may not come next (reason `grammar_mismatch`).
        """
        if not self._timed(self._matcher.consume_token, token_id):
            error = first_line(self._matcher)
            if self._mask and self._mask[token_id // 8] >> token_id % 8 & 1:  # it was allowed
                raise _limit(error)
            raise KvferryError(
                f"the grammar does not allow token {token_id} here: {error}", reason="grammar_mismatch"
            )
        self._mask = b""
        self._left_s = min(self._left_s + TOKEN_S, FREE_S)
        return not self._matcher.is_stopped()

    def _timed(self, call: Callable[..., Any], *args: Any) -> Any:
        if self._left_s < 0:
            raise _limit(f"it takes more than {TOKEN_S * 1000:g} ms of a processor for each token")
        begin_s = self._clock()
        result = call(*args)
        time_s = self._clock() - begin_s
        if time_s > _SHORT_S and self._clock is not time.thread_time:
            self._clock = time.thread_time
            time_s = min(time_s, TOKEN_S)  # others may have taken the rest
        self._left_s -= time_s
        self._took(time_s)
        return result


def _limit(why: str) -> InvalidRequest:
    return InvalidRequest(f"the grammar cannot be followed: {why}", reason="grammar_limit")


def _source(kind: str, text: str) -> str:
    """Convert a grammar's text for llguidance. Raises: ValueError, RecursionError."""
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
    """Return what is wrong with a matcher, in one line."""
    lines = [line for line in matcher.get_error().splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["unknown"])[0].removeprefix("error: ")[:300]
