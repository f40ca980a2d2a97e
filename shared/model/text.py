"""Incremental detokenization: turns token ids into text one by one, and finds stop strings.

Router and decode worker each run one over the same ids and must find the same stop, so nothing here depends
on time or on batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from kvferry.shared.model.tokenizer import ChatTokenizer

_REPLACEMENT = "\ufffd"
_MAX_PENDING_TOKENS = 256
"""Bytes that form no character after this many tokens are output as they are; this bounds a step's work."""


@dataclass(frozen=True, kw_only=True)
class TextDelta:
    """The result of one token.

    Attributes:
        text: text to deliver now.
        stopped: a stop string is complete; `text` ends before it, or with it where that is wanted, and it is
            the last text.
        token_text: what the token adds to the text, delivered or not, including stop strings; "" for special
            tokens and for those that end inside a character (the token that completes the character adds all
            of it).
    """

    text: str
    stopped: bool
    token_text: str


class TextAssembler:
    """Assembles one completion's text.

        ids ──► window: context | pending ──decode──► token_text ──► undelivered ──► text

    The window is decoded as a whole, because a token's text may depend on its neighbors. `context` is the
    previous tokens, whose text is known and removed from the result. A token stays pending while the window's
    text ends inside a character. Text that may begin a stop string stays undelivered. Without a stop, all
    `text` plus `flush()` is `tokenizer.decode(ids)`.

    Args:
        stop: stop strings, none of them empty.
        min_tokens: stop strings are searched in the text of later tokens only.
        includes_stop: whether the text has the stop string that ended it.
        shows_special: whether it has special tokens, other than those that end a completion.

    Attributes:
        stop_string: the stop string that ended the text; None without one.
        partial_bytes: see `ChatTokenizer`.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        stop: tuple[str, ...] = (),
        *,
        min_tokens: int = 0,
        includes_stop: bool = False,
        shows_special: bool = False,
    ) -> None:
        assert all(stop), "a stop string is empty"
        self._is_byte_fallback = tokenizer.is_byte_fallback
        self._stop = stop
        self._includes_stop = includes_stop
        self.partial_bytes = tokenizer.partial_bytes
        self._is_silent = partial(tokenizer.is_silent, shows_special=shows_special)
        self._decode = partial(tokenizer.decode, shows_special=shows_special)
        self._decode_one = partial(tokenizer.decode_one, shows_special=shows_special)
        self._num_unsearched = min_tokens if stop else 0
        self._window: list[int] = []
        self._num_context = 0
        self._context_text = ""
        self._undelivered = ""
        self._stopped = False
        self.stop_string: str | None = None

    def push(self, token_id: int) -> TextDelta:
        """Take the next token. After a stop, tokens are ignored."""
        if self._stopped:
            return TextDelta(text="", stopped=True, token_text="")
        token_text = self._decode_next(token_id)
        self._undelivered += token_text
        return TextDelta(text=self._release(), stopped=self._stopped, token_text=token_text)

    def token_text(self, token_id: int) -> str:
        """Return the text that a token would add next, an unfinished character as U+FFFD (for
        alternatives)."""
        if self._is_silent(token_id):
            return ""
        return self._beyond_context(self._decode([*self._window, token_id]))

    def flush(self) -> str:
        """Return the text held back at the end: unfinished characters as U+FFFD, cut before a stop."""
        if self._stopped:
            return ""
        self._undelivered += self._beyond_context(self._decode(self._window))
        self._window, self._num_context, self._context_text = [], 0, ""
        text = self._release()
        rest, self._undelivered = ("" if self._stopped else self._undelivered), ""
        return text + rest

    def _decode_next(self, token_id: int) -> str:
        if self._is_silent(token_id):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        unfinished = text.endswith(_REPLACEMENT) or self._is_byte_fallback(token_id)
        is_full = len(self._window) - self._num_context >= _MAX_PENDING_TOKENS
        if unfinished and not is_full:
            return ""
        added = self._beyond_context(text)
        if added or is_full:
            del self._window[: self._num_context]
            if unfinished:
                del self._window[:-1]
            self._num_context = len(self._window)
            alone = len(self._window) == 1
            self._context_text = self._decode_one(token_id) if alone else self._decode(self._window)
        return added

    def _beyond_context(self, text: str) -> str:
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        # Only after output of bytes that form no character: the next token can change the last one's text.
        return text

    def _release(self) -> str:
        """Remove from the undelivered text, and return, the part in which no stop string can begin."""
        if not self._stop or self._num_unsearched > 0:
            self._num_unsearched -= 1
            text, self._undelivered = self._undelivered, ""
            return text
        matches = [
            (at, at + len(s) * self._includes_stop, s)
            for s in self._stop
            if (at := self._undelivered.find(s)) >= 0
        ]
        if matches:
            _, end, self.stop_string = min(matches)
            text, self._undelivered, self._stopped = self._undelivered[:end], "", True
            return text
        keep = max((_overlap(self._undelivered, s) for s in self._stop), default=0)
        cut = len(self._undelivered) - keep
        text, self._undelivered = self._undelivered[:cut], self._undelivered[cut:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of the text that is a proper prefix of the stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
