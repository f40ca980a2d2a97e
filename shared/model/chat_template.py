"""A model's chat template: how it shows a conversation, and what it reveals about the model.

The template is the checkpoint's program; what it accepts is found by trying. Place in the request's path: the
tokenizer renders prompts with it (`tokenizer.py`), in the router.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from inspect import signature
from itertools import groupby, pairwise, product
from typing import TYPE_CHECKING, Any, NamedTuple

from kvferry.shared.errors import InvalidRequest, UnsupportedModel

if TYPE_CHECKING:
    from kvferry.shared.model.tool_format import ToolFormat

Message = Mapping[str, Any]
"""`role` and `content`, both text, and the `TEMPLATE_FIELDS` that it has, as chat templates expect them."""


class TemplateInputs(NamedTuple):
    """The inputs of a chat template beside the messages.

    Attributes:
        tools: as OpenAI and chat templates have them, `type` and `function`.
        arguments: the template's other variables, such as `enable_thinking`.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    arguments: Mapping[str, Any] = {}


NO_INPUTS = TemplateInputs()

TEMPLATE_FIELDS = ("name", "tool_call_id", "tool_calls", "reasoning_content")
"""Further fields of a message; a chat template uses all, some or none of them."""

_BASE_ROLES = ("system", "user", "assistant")
_TEMPLATE_ROLES = ("tool", "function", "ipython")
_ALIASES = {"developer": "system"}
_PROBE = "kvferry shows this"
_SEARCHED_AT_ONCE = 1 << 16
_LEAVE_ASCII = ("NFC", "NFD", "NFKC", "NFKD")


class ChatMessage(NamedTuple):
    """A message as sessions record it.

    Attributes: fields: JSON of its `TEMPLATE_FIELDS`, in that order; empty without any.
    """

    role: str
    content: str
    fields: str = ""

    def for_template(self) -> Message:
        more = json.loads(self.fields) if self.fields else {}
        return {"role": self.role, "content": self.content, **more}

    def continued(self, rest: ChatMessage) -> ChatMessage:
        """Return the answer that begins with this one and goes on with `rest`."""
        return ChatMessage(self.role, self.content + rest.content, rest.fields or self.fields)

    def without(self, name: str) -> ChatMessage:
        if not self.fields:
            return self
        more = {other: value for other, value in json.loads(self.fields).items() if other != name}
        return ChatMessage(self.role, self.content, json.dumps(more) if more else "")


def normalize_role(role: str) -> str:
    """Return the role's name in chat templates: `developer` is `system`."""
    return _ALIASES.get(role, role)


class ChatTemplate:
    """Immutable; safe to share between threads.

    Args:
        tokenizer: a transformers tokenizer.
        ends: spellings of the tokens that end a completion.

    Attributes: fields: the `TEMPLATE_FIELDS` that it uses.

    Raises: UnsupportedModel: it shows nothing of a user's message.
    """

    def __init__(self, tokenizer: Any, ends: list[str]) -> None:
        self._tokenizer = tokenizer
        self._ends = ends
        self.exists = bool(tokenizer.chat_template)
        self._source: str = tokenizer.get_chat_template() if self.exists else ""
        named = tuple(r for r in _TEMPLATE_ROLES if re.search(rf"['\"]{r}['\"]", self._source))
        self._roles = (*_BASE_ROLES, *named)
        self.fields = frozenset(f for f in TEMPLATE_FIELDS if re.search(rf"\b{f}\b", self._source))
        self._part_roles: frozenset[str] = frozenset()
        self._part_roles = self._find_part_roles()

    def knows(self, name: str) -> bool:
        """Return whether the chat template has a variable of this name, `tools` for example."""
        return re.search(rf"\b{re.escape(name)}\b", self._source) is not None

    def takes(self, name: str) -> bool:
        """Return whether clients may set this variable of the chat template."""
        taken = {"messages", *signature(self._tokenizer.apply_chat_template).parameters}
        return self.knows(name) and name not in taken

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """The format of the model's tool calls; None where the chat template does not show it."""
        from kvferry.shared.model.tool_format import tool_format

        return tool_format(self._source, self._render_example, self._ends) if self.knows("tools") else None

    @cached_property
    def response_template(self) -> Mapping[str, Any] | None:
        """transformers' description of an answer's parts: the checkpoint's own, or one that the chat template
        implies; None where an answer is content alone."""
        own: Mapping[str, Any] | None = getattr(self._tokenizer, "response_template", None)
        if own is not None or not self.exists:
            return own
        from kvferry.shared.model.tool_format import HARMONY, is_harmony, thoughts_template

        if is_harmony(self._source):
            return HARMONY
        if self.tool_format is not None and self.tool_format.response_template is not None:
            return self.tool_format.response_template
        if "think" not in self._source.lower():
            return None
        return thoughts_template(self._source, self._render_example)

    @property
    def thought_tags(self) -> tuple[str, str] | None:
        """The model's marks around thoughts; None where it has none, or they have no fixed text."""
        fields = (self.response_template or {"fields": {}})["fields"]
        for name in ("reasoning_content", "thinking"):
            field = fields.get(name, {})
            if isinstance(field.get("open"), str) and isinstance(field.get("close"), str):
                return field["open"].strip(), field["close"].strip()
        return None

    def check(self, messages: Sequence[Message]) -> None:
        """Check messages. Raises: InvalidRequest: there is no template, or it cannot show a message."""
        if not self.exists:
            raise InvalidRequest("The model has no chat template; use /v1/completions", param="messages")
        if not messages:
            raise InvalidRequest("messages is empty; there must be at least one", param="messages")
        for index, message in enumerate(messages):
            role = normalize_role(message["role"])
            if role not in self._roles:
                raise InvalidRequest(
                    f"messages[{index}].role is {message['role']!r}; the model's chat template knows "
                    f"{', '.join((*self._roles, *_ALIASES))}",
                    param=f"messages[{index}].role",
                )
            check_unicode(message["content"], f"messages[{index}].content")

    def text(self, messages: list[dict[str, Any]], inputs: TemplateInputs, continues: bool) -> str:
        """Render messages with the template.

        Args: continues: up to the end of the last message, an answer that goes on.
        Raises: InvalidRequest: it refuses them or cannot show them.
        """
        try:
            return self._text(messages, inputs, continues=continues)
        except Exception as error:  # the template is the checkpoint's program, and may fail in any way
            for other in _rewritten(messages):
                with suppress(Exception):
                    return self._text(other, inputs, continues=continues)
            raise self._refusal(messages, inputs, continues, error) from error

    def _refusal(
        self, messages: list[dict[str, Any]], inputs: TemplateInputs, continues: bool, error: Exception
    ) -> InvalidRequest:
        """Find what the template fails at, by trying less."""

        def is_refused(num_messages: int, inputs: TemplateInputs, continues: bool) -> bool:
            try:
                self._text(messages[:num_messages], inputs, continues=continues)
            except Exception:
                return True
            return False

        if continues and not is_refused(len(messages), inputs, False):
            param, problem = "continue_final_message", "the model's chat template cannot leave an answer open"
            return InvalidRequest(f"{param} is true; {problem}", param=param)
        if any(inputs) and not is_refused(len(messages), NO_INPUTS, False):
            param = "tools" if inputs.tools else "chat_template_kwargs"
            return InvalidRequest(
                f"{param} cannot be shown by the model's chat template: {error}", param=param
            )
        shorter = range(1, len(messages))
        index = bisect_left(shorter, True, key=lambda number: is_refused(number, inputs, False))
        param = f"messages[{index}]"
        if type(error).__name__ != "TemplateError":
            return InvalidRequest(
                f"{param} cannot be shown by the model's chat template: {error}", param=param
            )
        role = messages[index]["role"]
        return InvalidRequest(
            f"{param}.role is {role!r}; the model's chat template refuses it there: {error}",
            param=f"{param}.role",
        )

    def _text(
        self,
        messages: list[dict[str, Any]],
        inputs: TemplateInputs,
        *,
        add_generation_prompt: bool = True,
        continues: bool = False,
    ) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                [self._with_parts(message) for message in messages],
                tools=list(inputs.tools) or None,
                chat_template=self._source,
                tokenize=False,
                add_generation_prompt=add_generation_prompt and not continues,
                continue_final_message=continues,
                **inputs.arguments,
            )
        )

    def _with_parts(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the message as the chat template reads its role's contents."""
        if message["role"] not in self._part_roles:
            return message
        return {**message, "content": [{"type": "text", "text": message["content"]}]}

    def _find_part_roles(self) -> frozenset[str]:
        """Find, by trying, the roles whose contents the chat template reads only as parts.

        Raises: UnsupportedModel where it shows nothing of a user's message.
        """
        user, call = {"role": "user", "content": "a"}, {"name": "b", "arguments": {}}
        called = {"id": "c00000000", "type": "function", "function": call}
        caller = {"role": "assistant", "content": "", "tool_calls": [called]}
        around: dict[str, tuple[list[Any], list[Any]]] = {
            "user": ([], []),
            "system": ([], [user]),
            "assistant": ([user], [user]),
            **dict.fromkeys(self._roles[len(_BASE_ROLES) :], ([user, caller], [])),
        }
        found = set()
        for role, (before, after) in around.items() if self.exists else ():
            text: dict[str, Any] = {"role": role, "content": _PROBE}
            if role not in _BASE_ROLES:
                text["tool_call_id"] = called["id"]
            parts = {**text, "content": [{"type": "text", "text": _PROBE}]}
            shows = [self._shows_probe([*before, message, *after]) for message in (text, parts)]
            if role == "user" and shows == [False, False]:
                raise UnsupportedModel("the chat template shows nothing of a user's message")
            if shows[0] is not True and shows[1]:
                found.add(role)
        return frozenset(found)

    def _shows_probe(self, messages: list[dict[str, Any]]) -> bool | None:
        """Return whether the template shows the probe; None where it does not accept such a conversation."""
        try:
            return _PROBE in self._text(messages, NO_INPUTS)
        except Exception:  # the template is the checkpoint's program
            return None

    def examples(self) -> Iterator[str]:
        """Yield what the chat template writes, in its source and for all kinds of conversations that it
        accepts."""
        yield self._source
        user, system = ({"role": role, "content": "a"} for role in ("user", "system"))
        answer = {"role": "assistant", "content": "a", "reasoning_content": "a"}
        function = {"name": "a", "description": "a", "parameters": {"type": "object", "properties": {}}}
        call = {"id": "c00000000", "type": "function", "function": {"name": "a", "arguments": {}}}
        caller = {**answer, "content": "", "tool_calls": [call]}
        results = [{"role": r, "content": "a", "tool_call_id": call["id"]} for r in self._roles]
        called = ([user, caller, result] for result in results)
        conversations: list[list[Any]] = [[system, user], [user, answer], [user, answer, user], *called]
        tools = [{"type": "function", "function": function}]
        for messages, shown, prompted in product(conversations, (None, tools), (False, True)):
            with suppress(Exception):  # the template does not accept such a conversation
                yield self._render_example(messages, shown, add_generation_prompt=prompted)

    def _render_example(
        self, messages: list[Any], tools: list[Any] | None = None, *, add_generation_prompt: bool
    ) -> str:
        inputs = TemplateInputs(tools or ())
        return self._text(messages, inputs, add_generation_prompt=add_generation_prompt)


def check_unicode(text: str, param: str) -> None:
    """Require valid Unicode. Raises: InvalidRequest: the text is not valid."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{param} has a lone surrogate at character {error.start}; it must be valid Unicode", param=param
        ) from None


def unused(messages: Sequence[Message], character: str) -> str:
    """Return a string of this Unicode noncharacter that none of the messages contains."""
    texts = [message["content"] for message in messages]
    texts += [json.dumps(message, ensure_ascii=False) for message in messages if len(message) > 2]
    candidate = character * 2
    while any(candidate in text for text in texts):
        candidate += character
    return candidate


def _rewritten(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield the conversation as other templates take it, changed step by step: calls' arguments as objects,
    one system message at the beginning and later ones as a user's, roles that alternate, and no system
    message.
    """
    for rewrite in (_with_objects, _with_one_system, _alternating, _without_system):
        changed = rewrite(messages)
        if changed != messages:
            yield changed
            messages = changed


def _with_objects(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replace arguments that are not JSON objects, which some models write, by an empty object."""
    shown = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            function = call["function"]
            arguments = function["arguments"] if isinstance(function["arguments"], dict) else {}
            calls.append({**call, "function": {**function, "arguments": arguments}})
        shown.append({**message, "tool_calls": calls} if calls else message)
    return shown


def _with_one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    begin = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    later = [
        {**message, "role": "user"} if message["role"] == "system" else message
        for message in messages[begin:]
    ]
    return [*_joined(messages[:begin]), *later]


def _alternating(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    runs = ((role, list(run)) for role, run in groupby(messages, key=lambda message: message["role"]))
    return [each for role, run in runs for each in (_joined(run) if role == "user" else run)]


def _without_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if [message["role"] for message in messages[:2]] != ["system", "user"]:
        return messages
    return [{**messages[1], **_joined([{**messages[0], "role": "user"}, messages[1]])[0]}, *messages[2:]]


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the messages into one; none if there are none."""
    content = "\n\n".join(message["content"] for message in messages)
    return [{**messages[0], "content": content}] if messages else []


def _any_of(texts: list[str]) -> str:
    """Make a pattern for text that begins with one of these; it reads each character once, even with a
    thousand."""
    if len(texts) == 1:
        return re.escape(texts[0])
    by_first: dict[str, list[str]] = {}
    for text in texts:
        by_first.setdefault(text[:1], []).append(text[1:])
    if "" in by_first:
        return ""
    return "|".join(f"{re.escape(first)}(?:{_any_of(rests)})" for first, rests in by_first.items())


class Spellings(NamedTuple):
    """How some tokens are spelled.

    Attributes:
        begin: matches the first character of every spelling, including overlapping ones.
        longest: characters of the longest one.
        normalized: a tokenizer that finds text which its normalizer turns into one of them; None if there is
            no normalizer.
    """

    begin: re.Pattern[str]
    longest: int
    normalized: Any

    @classmethod
    def of(cls, tokens: list[Any], normalizer: Any) -> Spellings | None:
        spellings = [token.content for token in tokens if len(token.content) > 1]
        if not spellings:
            return None
        rests: dict[str, list[str]] = {}
        for text in spellings:
            rests.setdefault(text[0], []).append(text[1:])
        begin = "|".join(f"{re.escape(first)}(?={_any_of(endings)})" for first, endings in rests.items())
        finder = normalizer and _finder(spellings, normalizer)
        return cls(re.compile(begin), max(map(len, spellings)), finder)

    def interrupted(self, text: str, marker: str) -> str:
        """Return the text with a marker after the first character of each spelling.

        It is searched in pieces, because a search of megabytes would hold Python's lock until its end.
        """
        pieces, done = [], 0
        for first in range(0, len(text), _SEARCHED_AT_ONCE):
            end = first + _SEARCHED_AT_ONCE
            for match in self.begin.finditer(text, first, end + self.longest):
                if match.start() >= end:
                    break
                pieces.append(text[done : match.end()])
                done = match.end()
        pieces.append(text[done:])
        finder = self.normalized
        if finder and not (text.isascii() and type(finder.normalizer).__name__ in _LEAVE_ASCII):
            pieces = [part for piece in pieces for part in self._cut(piece)]
        return marker.join(pieces)

    def _cut(self, text: str) -> list[str]:
        """Cut the text into pieces that are not a spelling when they are normalized."""
        finder = self.normalized
        # Offsets take several times as long, and hardly any text has such spellings.
        if not any(finder.encode_batch_fast([text])[0].ids):
            return [text]
        found = finder.encode_batch([text])[0]
        ends = [first + 1 for token_id, (first, _) in zip(found.ids, found.offsets, strict=True) if token_id]
        cuts = [end for end in ends if end < len(text)]  # a single character cannot be cut
        pieces = [text[begin:end] for begin, end in pairwise([0, *cuts, len(text)])]
        return [part for piece in pieces for part in self._cut(piece)] if cuts else pieces


def _finder(spellings: list[str], normalizer: Any) -> Any:
    """Make a tokenizer whose only tokens except 0 are these, normalized."""
    from tokenizers import AddedToken, Tokenizer, models

    finder = Tokenizer(models.WordLevel({"": 0}, unk_token=""))
    finder.normalizer = normalizer
    kept = [text for text in spellings if len(normalizer.normalize_str(text)) > 1]
    finder.add_tokens([AddedToken(text, normalized=True) for text in kept])
    return finder
