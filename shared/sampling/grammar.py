"""Structured output: which tokens a JSON schema, regular expression or grammar allows next.

llguidance compiles grammars over a tokenizer's vocabulary and follows a completion token by token. The router
checks a request's grammar; prefill and decode each follow it for the tokens that they draw. The services of a
process share compiled grammars.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from kvferry.shared.errors import InvalidRequest
from kvferry.shared.sampling.grammar_checks import GrammarChecks
from kvferry.shared.sampling.grammar_source import Follower, compiled
from kvferry.shared.sampling.params import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from kvferry.shared.model.tokenizer import ChatTokenizer

_MAX_COMPILED = 24
_COPIED_S = 0.025
"""How much processor time following the copies of a cached grammar may take before it is compiled anew. The
copies share the lexer's states, which grow by up to 0.4 MiB a millisecond, and all fail if there are too
many. Compiled, the largest grammar that was found takes 28 MiB (ordinary ones 0.1 to 5), and 14 more by then,
so that a vocabulary's cache has at most 1 GiB."""

_BLOCKED_BY_BYTE = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 1, 0.0, -np.inf
).astype(np.float32)
"""`[256, 8]`: what eight bits of a mask add to eight logits. Copying a row per byte is many times as fast as
choosing for each bit."""

_vocabularies: dict[tuple[str, int, tuple[int, ...]], _Vocabulary] = {}
_lock = threading.Lock()


class TokenMatcher(Follower):
    """One completion's place in a grammar. Not thread-safe."""

    def block(self, row: np.ndarray) -> None:
        """Write what to add to the logits: 0 for ids that may come next and -inf for others.

        Args: row: float32, V rounded up to a multiple of 32. Raises: InvalidRequest: see `Follower.mask`.
        """
        # a mask has one word more than a row if 32 divides V
        bits = np.frombuffer(self.mask(), dtype=np.uint8, count=len(row) // 8)
        _BLOCKED_BY_BYTE.take(bits, axis=0, mode="clip", out=row.reshape(-1, 8))


class GrammarCompiler(GrammarChecks):
    """Compiles grammars for a model, those of clients after `check`.

    `matcher` is thread-safe, and compiling releases the GIL.

    Args:
        load_tokenizer: called once, when a request first has a grammar.
        vocab_size: V of the model.
        eos_token_ids: allowed where the grammar may end.
    """

    def __init__(
        self, load_tokenizer: Callable[[], ChatTokenizer], vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        super().__init__(lambda: load_tokenizer().for_grammars(), vocab_size, eos_token_ids)

    def matcher(self, grammar: Grammar | None, owner: str = "") -> TokenMatcher | None:
        """Return a matcher at the grammar's beginning; None for None. Nothing is shared with other owners.

        Raises: InvalidRequest: the grammar is not valid or too large, or the tokenizer does not allow any.
        """
        if grammar is None:
            return None
        return self._compiled_over.matcher(grammar, owner)

    @cached_property
    def _compiled_over(self) -> _Vocabulary:
        key = self._load_tokenizer(), *self._vocabulary
        with _lock:
            if key not in _vocabularies:
                _vocabularies[key] = _Vocabulary(*key)
            return _vocabularies[key]


class _Vocabulary:
    """A tokenizer's tokens as llguidance sees them, and the grammars compiled over them.

    Args: tokenizer: as `tokenizer.json`.
    """

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        import llguidance

        self._lock = threading.Lock()
        self._compiled: OrderedDict[tuple[str, Grammar], _Compiled] = OrderedDict()
        try:
            self._tokens = llguidance.LLTokenizer(tokenizer, vocab_size, list(eos_token_ids))
        except ValueError as error:
            raise InvalidRequest(f"the model's tokenizer has no structured output: {error}") from None

    def matcher(self, grammar: Grammar, owner: str) -> TokenMatcher:
        """See `GrammarCompiler.matcher`."""
        key = owner, grammar
        with self._lock:
            found = self._compiled.get(key)
        matcher = found.matcher if found is not None else None
        if found is None or matcher is None:
            matcher = compiled(self._tokens, grammar.kind, grammar.text)
            found = _Compiled(matcher)
        with self._lock:
            self._compiled[key] = found
            self._compiled.move_to_end(key)
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return TokenMatcher(matcher.deep_copy(), found.took)


class _Compiled:
    """A matcher that stays at the grammar's beginning, until its copies have taken too much."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher: LLMatcher | None = matcher
        self._left_s = _COPIED_S

    def took(self, time_s: float) -> None:
        self._left_s -= time_s
        if self._left_s < 0:
            self.matcher = None
