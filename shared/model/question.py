"""Finds the question in a chat's prompt: its last message, before what the template writes after it.

Methods that score by a prompt's last queries take those of the question (`LayerInputs.observing`). Place in
the request's path: the router finds it in a prompt that it has tokenized, and tells prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.shared.errors import InvalidRequest
from kvferry.shared.model.chat_template import NO_INPUTS, Message, TemplateInputs, normalize_role, unused

if TYPE_CHECKING:
    from kvferry.shared.model.tokenizer import ChatTokenizer

_MOST_CHARACTERS = 16 << 10
"""The characters of a question that are tokenized: about the largest window of a method in tokens."""
_MOST_AFTER_CHARACTERS = 256
"""The characters that the template may write after it: marks of a message's end and an answer's beginning,
about 60."""
_EARLIER_CHARACTERS = 64
"""The characters kept of each earlier message, where the template is rendered only for the question."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """Attributes:
    num_tokens: tokens of the question, at least 1.
    num_after: the prompt's tokens after it: the template's marks and the beginning of the answer.
    """

    num_tokens: int
    num_after: int

    def before(self, num_dropped: int) -> Question | None:
        """Return the question of the prompt without its last tokens; None if nothing is left of it."""
        num_tokens = self.num_tokens - max(num_dropped - self.num_after, 0)
        if num_tokens < 1:
            return None
        return Question(num_tokens=num_tokens, num_after=max(self.num_after - num_dropped, 0))


def find_question(
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    token_ids: Sequence[int],
    inputs: TemplateInputs = NO_INPUTS,
) -> Question | None:
    """Find a conversation's question at the end of its prompt: the last message, if a user's, or the results
    of tools that it ends with. White space around it is not part of it.

    The template is rendered again with a mark before and after the question, and its text from the first mark
    on is tokenized and compared with the prompt's end. Long messages are shortened for this, so that the time
    does not depend on their lengths.

    Args: messages, inputs: as of `ChatTokenizer.render`; token_ids: the prompt, up to the beginning of the
        next assistant message.

    Returns: None if it is not known: the conversation ends otherwise, or the template refuses the marks or
        does not show the question once, shortly before the prompt's end.
    """
    role = normalize_role(messages[-1]["role"])
    if role in ("system", "assistant"):
        return None
    last = first = len(messages) - 1
    while role != "user" and first and messages[first - 1]["role"] == role:
        first -= 1
    shown = [dict(message) for message in messages]
    for index, message in enumerate(shown):
        text = message["content"]
        message["content"] = text[:_EARLIER_CHARACTERS] if index < first else text[-_MOST_CHARACTERS:]
    mark = unused(shown, "\ufdd2")
    begin = shown[first]["content"]
    shown[first]["content"] = begin[: len(begin) - len(begin.lstrip())] + mark + begin.lstrip()
    end = shown[last]["content"]
    shown[last]["content"] = end.rstrip() + mark + end[len(end.rstrip()) :]
    try:
        text, marker = tokenizer.render_text(shown, inputs, False)
    except InvalidRequest:
        return None
    parts = text.split(mark)
    if len(parts) != 3 or len(parts[2]) > _MOST_AFTER_CHARACTERS:
        return None
    _, question, after = parts
    num_after = _common_suffix(token_ids, tokenizer.encode_rendered(after, marker))
    both = tokenizer.encode_rendered(question[-_MOST_CHARACTERS:] + after, marker)
    num_tokens = _common_suffix(token_ids, both) - num_after
    return Question(num_tokens=num_tokens, num_after=num_after) if num_tokens > 0 else None


def _common_suffix(one: Sequence[int], other: Sequence[int]) -> int:
    limit = min(len(one), len(other))
    return next((n for n in range(limit) if one[-1 - n] != other[-1 - n]), limit)
