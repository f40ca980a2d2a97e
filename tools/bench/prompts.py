"""Texts of random words with a given number of tokens of a tokenizer."""

from __future__ import annotations

import random
from functools import cached_property

from tokenizers import Tokenizer

from kvferry.shared.errors import ConfigurationError
from kvferry.shared.model.checkpoint import resolve_model_path

_TRIES = 8


class PromptMaker:
    """Makes texts. The server's own count may differ by what its chat template adds."""

    def __init__(self, path_or_id: str) -> None:
        """Raises: ConfigurationError: there is no tokenizer.json."""
        file = resolve_model_path(path_or_id, weights=False) / "tokenizer.json"
        if not file.is_file():
            raise ConfigurationError(
                f"--bench-tokenizer is {path_or_id!r}; it must be a folder or hub id with a tokenizer.json"
            )
        self._tokenizer = Tokenizer.from_file(str(file))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @cached_property
    def _words(self) -> list[int]:
        """Ids of tokens that are plain letters, in an order that depends on the tokenizer alone."""
        added = self._tokenizer.get_added_tokens_decoder()
        texts = {id: self._tokenizer.decode([id]) for id in self._tokenizer.get_vocab().values()}
        return sorted(id for id, text in texts.items() if id not in added and text.strip().isalpha())

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def text(self, num_tokens: int, chance: random.Random) -> str:
        """Make a text whose tokenization has this many tokens, or as near as some tokenizers allow."""
        ids = chance.choices(self._words, k=num_tokens)
        for _ in range(_TRIES):
            # A text may tokenize to other ids than those that it was decoded from.
            found = self._tokenizer.encode(self._tokenizer.decode(ids), add_special_tokens=False).ids
            if len(found) == num_tokens:
                break
            ids = [*found[:num_tokens], *chance.choices(self._words, k=max(0, num_tokens - len(found)))]
        return str(self._tokenizer.decode(ids))
