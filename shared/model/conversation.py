"""The prompt of a session's next turn: recorded token ids as far as possible, the rest rendered.

Tokenizing a generated text does not always give the token ids that were generated. A prompt that starts with
the recorded ids finds all of their KV in the history, whether the client sends only new messages or the whole
conversation. The router stores the records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.shared.model.tokenizer import ChatTokenizer, Message, normalize_role


@dataclass(frozen=True, kw_only=True)
class RecordedConversation:
    """A conversation as text and as the token ids that were really used.

    Attributes:
        messages: (role, text), including the last completion.
        token_ids: prompt and completion of the last turn.
        assistant_ends: for each assistant message of `messages`, in order: the number of `token_ids` up to
            the end of its content; 0 if its ids are not known, because a client wrote it.
    """

    messages: tuple[tuple[str, str], ...]
    token_ids: tuple[int, ...]
    assistant_ends: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RenderedConversation:
    """A prompt.

    Attributes:
        token_ids: up to the beginning of the next assistant message.
        assistant_ends: as in RecordedConversation, for the assistant messages in the prompt. The next record
            has these and, for the new message, the length of prompt plus completion.
    """

    token_ids: tuple[int, ...]
    assistant_ends: tuple[int, ...]


def render_conversation(
    tokenizer: ChatTokenizer, messages: Sequence[Message], *, recorded: RecordedConversation | None = None
) -> RenderedConversation:
    """The prompt of a whole conversation, reusing recorded ids up to the last recorded answer in it.

    Args:
        messages: the whole conversation, including recorded messages.
        recorded: the session's record, if there is one.

    Raises: InvalidRequest for roles that the template refuses.
    """
    num_assistants = sum(message["role"] == "assistant" for message in messages)
    match = _last_match(messages, recorded) if recorded is not None else None
    if recorded is not None and match is not None:
        index, rank = match
        reused = recorded.token_ids[: recorded.assistant_ends[rank]]
        rest = tokenizer.render_after(messages, index, last_token_id=reused[-1])
        if rest is not None:
            kept = recorded.assistant_ends[: rank + 1]
            return RenderedConversation(
                token_ids=(*reused, *rest), assistant_ends=kept + (0,) * (num_assistants - len(kept))
            )
    return RenderedConversation(
        token_ids=tuple(tokenizer.render(messages)), assistant_ends=(0,) * num_assistants
    )


def _last_match(messages: Sequence[Message], recorded: RecordedConversation) -> tuple[int, int] | None:
    """Index among all messages, and among assistant messages, of the last one whose ids can be reused."""
    found, rank = None, -1
    for index, (message, (role, text)) in enumerate(zip(messages, recorded.messages, strict=False)):
        if (normalize_role(message["role"]), message["content"]) != (normalize_role(role), text):
            break
        if role == "assistant":
            rank += 1
            if recorded.assistant_ends[rank] > 0:
                found = (index, rank)
    return found
