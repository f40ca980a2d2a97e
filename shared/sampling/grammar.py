"""Structured output: which tokens a JSON schema, regular expression or grammar allows next.

llguidance compiles grammars over a tokenizer's vocabulary and follows a completion token by token. The
router checks a request's grammar; prefill and decode each follow it for the tokens that they draw. What is
compiled is shared by the services of a process.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvferry.shared.errors import InvalidRequest, KvferryError
from kvferry.shared.sampling.grammar_checks import GrammarChecks
from kvferry.shared.sampling.grammar_source import compiled, first_line
from kvferry.shared.sampling.params import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from kvferry.shared.model.tokenizer import ChatTokenizer

_MAX_COMPILED = 256
"""Of a vocabulary; the most recently used are cached."""

_BLOCKED_BY_BYTE = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 1, 0.0, -np.inf
).astype(np.float32)
"""`[256, 8]`: what eight bits of a mask add to eight logits. Copying a row a byte is many times as fast
as choosing for each bit."""

_vocabularies: dict[tuple[str, int, tuple[int, ...]], _Vocabulary] = {}
_lock = threading.Lock()


class TokenMatcher:
    """One completion's place in a grammar. Not thread-safe."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._bits = np.zeros((vocab_size + 31) // 32, dtype=np.int32)

    def blocked(self) -> Tensor:
        """What to add to the logits: float32 `[V]`, 0 for ids that may come next and -inf for others.

        At the grammar's end, only those that end the completion may come.

        Raises: KvferryError: the grammar takes too much time or memory here (reason `grammar_limit`).
        """
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if self._matcher.is_error():
            raise KvferryError(
                f"the grammar cannot be followed: {first_line(self._matcher)}", reason="grammar_limit"
            )
        blocked = np.take(_BLOCKED_BY_BYTE, self._bits.view(np.uint8), axis=0, mode="clip")
        return torch.from_numpy(blocked).view(-1)[: self._vocab_size]

    def accept(self, token_id: int) -> None:
        """Go on with a token.

        Raises: KvferryError: the grammar does not allow it (reason `grammar_mismatch`).
        """
        if not self._matcher.consume_token(token_id):
            raise KvferryError(
                f"the grammar does not allow token {token_id} here: {first_line(self._matcher)}",
                reason="grammar_mismatch",
            )


class GrammarCompiler:
    """Compiles grammars for a model. Thread-safe; compiling releases the GIL.

    Args:
        load_tokenizer: called once, when a request first has a grammar.
        vocab_size: V of the model.
        eos_token_ids: allowed where the grammar may end.
    """

    def __init__(
        self, load_tokenizer: Callable[[], ChatTokenizer], vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._checks = GrammarChecks(
            lambda: self._load_tokenizer().for_grammars(), vocab_size, self._eos_token_ids
        )

    def matcher(self, grammar: Grammar | None) -> TokenMatcher | None:
        """A matcher at the grammar's beginning; None for None.

        Raises: InvalidRequest: the grammar is not valid or too large, or the tokenizer does not allow any.
        """
        if grammar is None:
            return None
        return TokenMatcher(self._vocabulary.compiled(grammar), self._vocab_size)

    async def check(self, grammar: Grammar, owner: str = "") -> None:
        """Try a client's grammar where it can harm nobody, before `matcher` gets it.

        Raises: InvalidRequest: as `matcher`, or no token can begin what the grammar allows; CapacityExceeded.
        """
        await self._checks.check(grammar, owner)

    async def close(self) -> None:
        """End the processes in which grammars are tried. Idempotent."""
        await self._checks.close()

    @cached_property
    def _vocabulary(self) -> _Vocabulary:
        text = self._load_tokenizer().for_grammars()
        key = text, self._vocab_size, self._eos_token_ids
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
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        try:
            self._tokens = llguidance.LLTokenizer(tokenizer, vocab_size, list(eos_token_ids))
        except ValueError as error:
            raise InvalidRequest(f"the model's tokenizer has no structured output: {error}") from None

    def compiled(self, grammar: Grammar) -> LLMatcher:
        """A copy of the matcher at the grammar's beginning."""
        with self._lock:
            if (found := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
                return found.deep_copy()
        matcher = compiled(self._tokens, grammar.kind, grammar.text)
        with self._lock:
            self._compiled[grammar] = matcher
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return matcher.deep_copy()
