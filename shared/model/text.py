"""Token ids to text as they come: incremental detokenisation and stop strings.

Router and decode worker each run one over the same ids and find the same stop, so nothing here depends on
time or on how tokens were batched. Does not decide when a completion ends otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.shared.model.tokenizer import ChatTokenizer

_REPLACEMENT = "\ufffd"
_MAX_PENDING_TOKENS = 256
"""Bytes that never come to be a character are given up on after so many tokens: a step's work is bounded."""


@dataclass(frozen=True, kw_only=True)
class TextDelta:
    """What one token brought.

    Attributes:
        text: text to deliver now.
        stopped: a stop string was completed; `text` ends before it and nothing more will come.
        token_text: what the token adds to the text, held back or not, stop strings included; "" for special
            tokens and for those that end inside a character (the one that completes it adds it whole).
    """

    text: str
    stopped: bool
    token_text: str


class TextAssembler:
    """Assembles one completion's text.

        ids ──► window: context | pending ──decode──► token_text ──► held (may begin a stop string) ──► text

    The window is decoded as a whole, because a token's text may depend on its neighbours; `context` is the
    token(s) before, whose text is known and taken off. A token stays pending while the window's text ends
    inside a character. Without a stop, all `text` plus `flush()` is `tokenizer.decode(ids)`.

    Args:
        stop: stop strings, none of them empty.
    """

    def __init__(self, tokenizer: ChatTokenizer, stop: tuple[str, ...] = ()) -> None:
        assert all(stop), "a stop string is empty"
        self._tokenizer = tokenizer
        self._stop = stop
        self._window: list[int] = []
        self._num_context = 0
        self._context_text = ""
        self._held = ""
        self._stopped = False

    def push(self, token_id: int) -> TextDelta:
        """Take the next token. After a stop, tokens are ignored."""
        if self._stopped:
            return TextDelta(text="", stopped=True, token_text="")
        token_text = self._decode_next(token_id)
        self._held += token_text
        return TextDelta(text=self._release(), stopped=self._stopped, token_text=token_text)

    def token_text(self, token_id: int) -> str:
        """What a token would add if it came next, an unfinished character as U+FFFD (for alternatives)."""
        if self._tokenizer.is_silent(token_id):
            return ""
        return self._beyond_context(self._tokenizer.decode([*self._window, token_id]))

    def flush(self) -> str:
        """The text held back, at the completion's end: unfinished characters as U+FFFD, cut before a stop."""
        if self._stopped:
            return ""
        self._held += self._beyond_context(self._tokenizer.decode(self._window))
        self._window, self._num_context, self._context_text = [], 0, ""
        text = self._release()
        rest, self._held = ("" if self._stopped else self._held), ""
        return text + rest

    def _decode_next(self, token_id: int) -> str:
        if self._tokenizer.is_silent(token_id):
            return ""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        unfinished = text.endswith(_REPLACEMENT) or self._tokenizer.is_byte_fallback(token_id)
        is_full = len(self._window) - self._num_context >= _MAX_PENDING_TOKENS
        if unfinished and not is_full:
            return ""
        added = self._beyond_context(text)
        if added or is_full:
            del self._window[: self._num_context]
            if unfinished:
                del self._window[:-1]
            self._num_context = len(self._window)
            self._context_text = self._tokenizer.decode(self._window)
        return added

    def _beyond_context(self, text: str) -> str:
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        # only after giving up on a run of bytes: what follows may change how its last one reads
        return text

    def _release(self) -> str:
        """Take from the held text what no stop string can begin in."""
        matches = [at for s in self._stop if (at := self._held.find(s)) >= 0]
        if matches:
            text, self._held, self._stopped = self._held[: min(matches)], "", True
            return text
        keep = max((_overlap(self._held, s) for s in self._stop), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of the text that begins the stop string, short of all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
