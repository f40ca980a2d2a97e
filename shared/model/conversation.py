"""A session's next prompt: recorded token ids as far as they go, the rest rendered.

What a model generated is not what its text would be tokenised to. A prompt that starts with the ids as they
were generated finds all of their KV in the history, whether the client sends new messages only or the whole
conversation again. Does not keep sessions; the router does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.shared.model.tokenizer import ChatTokenizer, Message, normalize_role


@dataclass(frozen=True, kw_only=True)
class RecordedConversation:
    """A conversation as text and as the token ids that it really had.

    Attributes:
        messages: (role, text), the last completion included.
        token_ids: prompt and completion of the last turn.
        assistant_ends: one entry for each assistant message of `messages`, in order: how many of `token_ids`
            lie before its content's end; 0 for messages whose own ids are not known (a client made them up).
    """

    messages: tuple[tuple[str, str], ...]
    token_ids: tuple[int, ...]
    assistant_ends: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RenderedConversation:
    """A prompt.

    Attributes:
        token_ids: up to where the assistant speaks next.
        assistant_ends: as in RecordedConversation, for the assistant messages in the prompt. The record after
            the turn has these, and the length of prompt plus completion for the new one.
    """

    token_ids: tuple[int, ...]
    assistant_ends: tuple[int, ...]


def render_conversation(
    tokenizer: ChatTokenizer, messages: Sequence[Message], *, recorded: RecordedConversation | None = None
) -> RenderedConversation:
    """The prompt of a whole conversation, reusing recorded ids up to the last recorded answer in it.

    Args:
        messages: all of the conversation, recorded messages included.
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
