"""Text to token ids and back, the chat template, and prompts of conversations, for router and decode worker.

Prompts of ordinary text have exactly the ids of `apply_chat_template`. There is one exception: if a message's
content spells a special token (`<|end|>`), the rendered text is split inside that spelling and the pieces are
tokenized separately, so that it stays text and cannot fake a message's end. The same holds for other added
tokens that the template writes (`<|User|>` of some models), except in answers, which may have thoughts. What
the tokenizer's normalizer makes such a spelling (NFKC makes U+FF1C a `<`) is one, too.
Markers that a template writes as plain text (`[INST]`) cannot be told from content; they are not protected.

Tokenizing a generated text does not always give the token ids that were generated. The prompt of a session's
next turn therefore has recorded token ids as far as possible, and only the rest is rendered. A prompt that
starts with the recorded ids finds all of their KV in the history, whether the client sends only new messages
or the whole conversation. The router stores the records.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from itertools import groupby, pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvferry.shared.errors import (
    ConfigurationError,
    ContextLengthExceeded,
    InvalidRequest,
    KvferryError,
    UnsupportedModel,
)
from kvferry.shared.model.checkpoint import quiet_libraries, read_eos_token_ids, resolve_model_path

if TYPE_CHECKING:
    from kvferry.shared.model.tool_format import ToolFormat

Message = Mapping[str, Any]
"""`role` and `content`, both text, and the `TEMPLATE_FIELDS` that it has, as chat templates expect them."""


class TemplateInputs(NamedTuple):
    """What a chat template shows the model beside the messages.

    Attributes:
        tools: as OpenAI and chat templates have them, `type` and `function`.
        arguments: the template's other variables, such as `enable_thinking`.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    arguments: Mapping[str, Any] = {}


NO_INPUTS = TemplateInputs()


TEMPLATE_FIELDS = ("name", "tool_call_id", "tool_calls", "reasoning_content")
"""What a message may have besides; a chat template uses all, some or none of them."""

_BASE_ROLES = ("system", "user", "assistant")
_TEMPLATE_ROLES = ("tool", "function", "ipython")
_ALIASES = {"developer": "system"}
_PROBE = "kvferry shows this"
_SEARCHED_AT_ONCE = 1 << 16
_DECODED_AT_ONCE = 1000
"""So many ids become text in less than 0.1 ms, for which a call may have Python's lock."""
_LEAVE_ASCII = ("NFC", "NFD", "NFKC", "NFKD")
_KEEP_ALL = frozenset(
    {"ByteLevel", "Digits", "Lowercase", "Metaspace", "NFC", "NFD", "NFKC", "NFKD", "Prepend"}
)
_MOST_COMPOSED = 4
"""Characters that Unicode's composition makes one of."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


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
        """The answer that this one is the beginning of."""
        return ChatMessage(self.role, self.content + rest.content, rest.fields or self.fields)

    def without(self, name: str) -> ChatMessage:
        """The message without one of its fields."""
        if not self.fields:
            return self
        more = {other: value for other, value in json.loads(self.fields).items() if other != name}
        return ChatMessage(self.role, self.content, json.dumps(more) if more else "")


def normalize_role(role: str) -> str:
    """The role's name in chat templates: `developer` is `system`."""
    return _ALIASES.get(role, role)


class ChatTokenizer:
    """A model's tokenizer and chat template. Immutable; safe to share between threads.

    Args:
        tokenizer: a transformers tokenizer with a fast backend.
        eos_token_ids: ids that end a completion.

    Raises:
        UnsupportedModel: there is no fast backend, or the chat template shows nothing of a user's message.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: tuple[int, ...]) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise UnsupportedModel(
                f"tokenizer {type(tokenizer).__name__} has no fast backend (tokenizer.json); one is needed"
            )
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._template: str | None = tokenizer.get_chat_template() if tokenizer.chat_template else None
        named = tuple(r for r in _TEMPLATE_ROLES if re.search(rf"['\"]{r}['\"]", self._template or ""))
        self._roles = (*_BASE_ROLES, *named)
        template = self._template or ""
        self.template_fields = frozenset(f for f in TEMPLATE_FIELDS if re.search(rf"\b{f}\b", template))
        """The `TEMPLATE_FIELDS` that the chat template uses."""
        self.eos_token_ids = eos_token_ids
        self._texts: tuple[dict[int, str], dict[int, str]] = {}, {}
        """Of tokens that were decoded alone: without and with special tokens."""
        added = self._backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        data = json.loads(self._backend.to_str())
        self._longest, self._shrinks = _longest_token(data, self._backend.get_vocab()), _composes(data)
        decoder = data["decoder"]
        self._has_byte_fallback = _has_decoder(decoder, "ByteFallback")
        self._is_byte_level = _has_decoder(decoder, "ByteLevel")
        self._partial_bytes: dict[int, bytes | None] = {}
        self._part_roles: frozenset[str] = frozenset()
        self._part_roles = self._find_part_roles()
        written = {i for text in self._examples() for i in self._ids(text, add_special_tokens=False)}
        markers = {i: t for i, t in added.items() if t.special or (i in written and t.content.strip())}
        normalizer = self._backend.normalizer
        self._spelled_special = _Spellings.of([t for t in markers.values() if t.special], normalizer)
        self._spelled_marker = _Spellings.of([*markers.values()], normalizer)
        """Also added tokens that the template writes: in some models those of roles are not special."""

    @classmethod
    def load(cls, path: str | Path) -> ChatTokenizer:
        """Load from "demo", a folder or a hub id; no weights are read.

        Raises:
            ConfigurationError: no tokenizer there.
            UnsupportedModel: the tokenizer has no fast backend.
        """
        from transformers import AutoTokenizer

        folder = resolve_model_path(path, weights=False)
        try:
            with quiet_libraries():
                tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            return cls(tokenizer, read_eos_token_ids(folder, tokenizer))
        except KvferryError:
            raise
        except Exception as error:  # the files are the checkpoint's, and each type reads them in its own way
            raise ConfigurationError(f"model {str(path)!r} has no tokenizer that loads: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Number of ids, including added tokens; a model's vocabulary may be larger."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def to_json(self) -> str:
        """The contents of `tokenizer.json`, with all added tokens."""
        return str(self._backend.to_str())

    def for_grammars(self) -> str:
        """As `to_json`, with names that no text spells for `marks`. A grammar's text is then never one of
        them, which it could not allow."""
        data, names = json.loads(self.to_json()), {text: f"<\ufdd1{i}>" for text, i in self.marks.items()}
        for token in data["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        model = data["model"]
        if isinstance(vocabulary := model.get("vocab"), dict):
            model["vocab"] = {names.get(text, text): i for text, i in vocabulary.items()}
        elif vocabulary is not None:
            model["vocab"] = [[names.get(text, text), *rest] for text, *rest in vocabulary]
        if (unknown := model.get("unk_token")) is not None:
            model["unk_token"] = names.get(unknown, unknown)
        return json.dumps(data, ensure_ascii=False)

    @cached_property
    def marks(self) -> Mapping[str, int]:
        """Spellings of the added tokens that grammars take for no text: special ones, and those in angle
        brackets."""
        added = self._backend.get_added_tokens_decoder().items()
        return {t.content: i for i, t in added if t.special or re.fullmatch("<.*>", t.content, re.DOTALL)}

    def partial_bytes(self, token_id: int) -> bytes | None:
        """A token's bytes where it begins or ends within a character; None where its text has all of it."""
        if token_id not in self._partial_bytes:
            self._partial_bytes[token_id] = self._find_partial_bytes(token_id)
        return self._partial_bytes[token_id]

    def _find_partial_bytes(self, token_id: int) -> bytes | None:
        token = self._backend.id_to_token(token_id)
        if token is None or token_id in self._backend.get_added_tokens_decoder():
            return None
        if self._has_byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)) is not None:
            found = bytes([int(match.group(1), 16)])
        elif self._is_byte_level:
            from transformers.convert_slow_tokenizer import bytes_to_unicode

            table: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
            byte_of = {character: byte for byte, character in table.items()}
            found = bytes(byte_of[character] for character in token)
        else:
            return None
        try:
            found.decode()
        except UnicodeDecodeError:
            return found
        return None

    def encode(self, text: str, *, add_special: bool = True, max_model_len: int | None = None) -> list[int]:
        """Ids of a plain prompt (/v1/completions): the tokenizer parses special tokens and adds its own.

        Raises:
            InvalidRequest: the text is not valid Unicode.
            ContextLengthExceeded: it is too long for `max_model_len`, by `least_tokens`.
        """
        _check_unicode(text, "prompt")
        self._check_length([text], max_model_len, "prompt")
        return self._ids(text, add_special_tokens=add_special)

    def least_tokens(self, text: str) -> int:
        """A number that the text's tokens are not below, by its length alone; 0 where that says nothing."""
        if self._longest is None:
            return 0
        most = self._longest if not self._shrinks or text.isascii() else self._longest * _MOST_COMPOSED
        return -(-len(text) // most)

    def _check_length(self, pieces: Sequence[str], max_model_len: int | None, param: str) -> None:
        """Raises: ContextLengthExceeded: a context of `max_model_len` cannot hold these and a token more."""
        if max_model_len is None or self._longest is None:
            return
        if (least := sum(map(self.least_tokens, pieces))) >= max_model_len:
            raise ContextLengthExceeded(
                f"The prompt has {least} tokens or more; the context of {max_model_len} tokens must hold it "
                "and at least one more",
                param=param,
            )

    def spelling(self, token_id: int) -> str:
        """The id's entry in the vocabulary; empty for ids of a padded one."""
        return self._backend.id_to_token(token_id) or ""

    def decode(self, token_ids: Sequence[int], *, shows_special: bool = False) -> str:
        """Text of ids, by default without special tokens; spaces are not cleaned up."""
        skips = not shows_special
        if len(token_ids) > _DECODED_AT_ONCE:  # see `_ids`
            return str(self._backend.decode_batch([list(token_ids)], skip_special_tokens=skips)[0])
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skips))

    def decode_one(self, token_id: int, *, shows_special: bool = False) -> str:
        """As `decode` of this id alone."""
        texts = self._texts[shows_special]
        if token_id not in texts:
            texts[token_id] = self.decode((token_id,), shows_special=shows_special)
        return texts[token_id]

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def knows(self, name: str) -> bool:
        """Whether the chat template has a variable of this name, `tools` for example."""
        return re.search(rf"\b{re.escape(name)}\b", self._template or "") is not None

    def takes(self, name: str) -> bool:
        """Whether clients may set this variable of the chat template."""
        taken = {"messages", *signature(self._tokenizer.apply_chat_template).parameters}
        return self.knows(name) and name not in taken

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes tool calls; None where the chat template does not say."""
        from kvferry.shared.model.tool_format import tool_format

        ends = [self._backend.id_to_token(token_id) for token_id in self.eos_token_ids]
        return tool_format(self._template or "", self._render_example, ends) if self.knows("tools") else None

    @cached_property
    def response_template(self) -> Mapping[str, Any] | None:
        """transformers' description of an answer's parts: the checkpoint's own, or one that the chat template
        implies; None where an answer is content alone."""
        own: Mapping[str, Any] | None = getattr(self._tokenizer, "response_template", None)
        if own is not None or self._template is None:
            return own
        from kvferry.shared.model.tool_format import HARMONY, is_harmony, thoughts_template

        if is_harmony(self._template):
            return HARMONY
        if self.tool_format is not None and self.tool_format.response_template is not None:
            return self.tool_format.response_template
        if "think" not in self._template.lower():
            return None
        return thoughts_template(self._template, self._render_example)

    @property
    def thought_tags(self) -> tuple[str, str] | None:
        """What the model writes around thoughts; None where it has none, or they have no fixed text."""
        fields = (self.response_template or {"fields": {}})["fields"]
        for name in ("reasoning_content", "thinking"):
            field = fields.get(name, {})
            if isinstance(field.get("open"), str) and isinstance(field.get("close"), str):
                return field["open"].strip(), field["close"].strip()
        return None

    def token_id(self, text: str) -> int | None:
        """The added token with this spelling; None if it is not one."""
        found = self._backend.token_to_id(text)
        return found if found in self._backend.get_added_tokens_decoder() else None

    def special_parts(self, text: str) -> list[str | int]:
        """A text in pieces: the ids of the `marks` that it spells, and the texts between them."""
        if not self.marks:
            return [text]
        spelled = "|".join(map(re.escape, sorted(self.marks, key=len, reverse=True)))
        return [self.marks.get(piece, piece) for piece in re.split(f"({spelled})", text) if piece]

    def render(
        self,
        messages: Sequence[Message],
        *,
        inputs: TemplateInputs = NO_INPUTS,
        continues: bool = False,
        max_model_len: int | None = None,
    ) -> list[int]:
        """Ids of a conversation up to the beginning of the next assistant message.

        Args: continues: up to the end of the last message, an answer that goes on.

        Raises:
            InvalidRequest: the template refuses it or cannot show it.
            ContextLengthExceeded: what the template makes of it is too long for `max_model_len`.
        """
        text, marker = self._render_text(messages, inputs, continues)
        return self._encode_rendered(text, marker, max_model_len)

    def render_after(
        self,
        messages: Sequence[Message],
        index: int,
        *,
        last_token_id: int,
        inputs: TemplateInputs = NO_INPUTS,
        continues: bool = False,
        max_model_len: int | None = None,
    ) -> list[int] | None:
        """Ids of what the template writes after the content of one message.

        Args:
            last_token_id: the token before. If it is an end-of-sequence id that the template would write
                next, it is not repeated.

        Returns: None if the template does not contain that content exactly once.

        Raises: as `render`.
        """
        sentinel = _unused(messages, "\ufdd2")
        replaced = [dict(message) for message in messages]
        # Generated text includes tool calls and thoughts; only what the template writes after it is wanted.
        replaced[index] = {"role": messages[index]["role"], "content": sentinel}
        text, marker = self._render_text(replaced, inputs, continues)
        if text.count(sentinel) != 1:
            return None
        rest = text.split(sentinel)[1]
        if last_token_id in self.eos_token_ids:
            stripped = rest.lstrip()
            if stripped.startswith(self._backend.id_to_token(last_token_id)):
                ids = self._encode_rendered(stripped, marker, max_model_len)
                if ids[0] == last_token_id:
                    return ids[1:]
        return self._encode_rendered(rest, marker, max_model_len)

    def is_silent(self, token_id: int, *, shows_special: bool = False) -> bool:
        """Whether the id adds no text: special tokens, and ids of a padded vocabulary.

        Args: shows_special: only those special tokens that end a completion.
        """
        silent = self.eos_token_ids if shows_special else self._special_ids
        return token_id in silent or self._backend.id_to_token(token_id) is None

    def is_byte_fallback(self, token_id: int) -> bool:
        """Whether the token is one byte of a sequence that can only be decoded as a whole."""
        if not self._has_byte_fallback:
            return False
        token = self._backend.id_to_token(token_id)
        return token is not None and _BYTE_TOKEN.fullmatch(token) is not None

    def _render_text(
        self, messages: Sequence[Message], inputs: TemplateInputs, continues: bool
    ) -> tuple[str, str]:
        """The template's text, and the marker at which it must be split before tokenizing."""
        self._check_messages(messages)
        marker = _unused(
            [*messages, *({"content": "", "tool": tool, "": ""} for tool in inputs.tools)], "\ufdd0"
        )
        prepared = [
            {name: self._mark(value, marker, spelled) for name, value in message.items()}
            | {"role": normalize_role(message["role"])}
            for message in messages
            # A model's own answer may have such tokens, those of a thought for example.
            for spelled in [self._spelled_special if message["role"] == "assistant" else self._spelled_marker]
        ]
        if any(inputs):
            parts = [list(inputs.tools), dict(inputs.arguments)]
            inputs = TemplateInputs(*self._mark(parts, marker, self._spelled_marker))
        return self._apply_template(prepared, inputs, continues), marker

    def _mark(self, value: Any, marker: str, spelled: _Spellings | None) -> Any:
        """The value with every spelling of these tokens in its texts interrupted."""
        if spelled is None:
            return value
        if isinstance(value, str):
            return spelled.interrupted(value, marker)
        if isinstance(value, dict):
            return {
                self._mark(key, marker, spelled): self._mark(item, marker, spelled)
                for key, item in value.items()
            }
        return [self._mark(item, marker, spelled) for item in value] if isinstance(value, list) else value

    def _apply_template(self, messages: list[dict[str, Any]], inputs: TemplateInputs, continues: bool) -> str:
        try:
            return self._template_text(messages, inputs, continues=continues)
        except Exception as error:  # the template is the checkpoint's program, and may fail in any way
            for other in _rewritten(messages):
                with suppress(Exception):
                    return self._template_text(other, inputs, continues=continues)
            raise self._refusal(messages, inputs, continues, error) from error

    def _refusal(
        self, messages: list[dict[str, Any]], inputs: TemplateInputs, continues: bool, error: Exception
    ) -> InvalidRequest:
        """What the template fails at, by trying less."""

        def is_refused(num_messages: int, inputs: TemplateInputs, continues: bool) -> bool:
            try:
                self._template_text(messages[:num_messages], inputs, continues=continues)
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
        low, high = 1, len(messages)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if is_refused(middle, inputs, False) else (middle + 1, high)
        param = f"messages[{low - 1}]"
        if type(error).__name__ != "TemplateError":
            return InvalidRequest(
                f"{param} cannot be shown by the model's chat template: {error}", param=param
            )
        role = messages[low - 1]["role"]
        return InvalidRequest(
            f"{param}.role is {role!r}; the model's chat template refuses it there: {error}",
            param=f"{param}.role",
        )

    def _template_text(
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
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt and not continues,
                continue_final_message=continues,
                **inputs.arguments,
            )
        )

    def _with_parts(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message as the chat template reads its role's contents."""
        if message["role"] not in self._part_roles:
            return message
        return {**message, "content": [{"type": "text", "text": message["content"]}]}

    def _find_part_roles(self) -> frozenset[str]:
        """The roles whose contents the chat template reads as parts alone, found by trying.

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
        for role, (before, after) in around.items() if self._template is not None else ():
            text: dict[str, Any] = {"role": role, "content": _PROBE}
            if role not in _BASE_ROLES:
                text["tool_call_id"] = called["id"]
            parts = {**text, "content": [{"type": "text", "text": _PROBE}]}
            shows = [self._shows_probe([*before, its, *after]) for its in (text, parts)]
            if role == "user" and shows == [False, False]:
                raise UnsupportedModel("the chat template shows nothing of a user's message")
            if shows[0] is not True and shows[1]:
                found.add(role)
        return frozenset(found)

    def _shows_probe(self, messages: list[dict[str, Any]]) -> bool | None:
        """Whether the template shows the probe; None where it takes no such conversation."""
        try:
            return _PROBE in self._template_text(messages, NO_INPUTS)
        except Exception:  # the template is the checkpoint's program
            return None

    def _examples(self) -> Iterator[str]:
        """What the chat template writes, in its source and for conversations of every kind that it takes."""
        yield self._template or ""
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
            with suppress(Exception):  # the template takes no such conversation
                yield self._render_example(messages, shown, add_generation_prompt=prompted)

    def _render_example(
        self, messages: list[Any], tools: list[Any] | None = None, *, add_generation_prompt: bool
    ) -> str:
        inputs = TemplateInputs(tools or ())
        return self._template_text(messages, inputs, add_generation_prompt=add_generation_prompt)

    def _check_messages(self, messages: Sequence[Message]) -> None:
        if self._template is None:
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
            _check_unicode(message["content"], f"messages[{index}].content")

    def _encode_rendered(self, text: str, marker: str, max_model_len: int | None) -> list[int]:
        ids: list[int] = []
        pieces = text.split(marker)
        self._check_length(pieces, max_model_len, "messages")
        for piece in pieces:
            ids += self._ids(piece, add_special_tokens=False)
        return ids

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # Of the backend's calls only those for batches let other threads run; megabytes take seconds.
        return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)


@dataclass(frozen=True, kw_only=True)
class RecordedConversation:
    """A conversation as text and as the token ids that were really used.

    Attributes:
        messages: including the last completion.
        token_ids: prompt and completion of the last turn.
        assistant_ends: for each assistant message of `messages`, in order: the number of `token_ids` up to
            the end of its content; 0 if its ids are not known, because a client wrote it.
    """

    messages: tuple[ChatMessage, ...]
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
    tokenizer: ChatTokenizer,
    messages: Sequence[ChatMessage],
    *,
    continues: ChatMessage | None = None,
    recorded: RecordedConversation | None = None,
    inputs: TemplateInputs = NO_INPUTS,
    max_model_len: int | None = None,
) -> RenderedConversation:
    """The prompt of a whole conversation, reusing recorded ids up to the last recorded answer in it.

    Args:
        messages: the whole conversation, including recorded messages.
        continues: an answer that follows them and goes on.
        recorded: the session's record, if there is one that had the same inputs.

    Raises: as `ChatTokenizer.render`.
    """
    shown = [message.for_template() for message in (*messages, *([] if continues is None else [continues]))]
    goes_on = continues is not None
    num_assistants = [message.role for message in messages].count("assistant")
    match = _last_match(messages, recorded) if recorded is not None else None
    if recorded is not None and match is not None:
        index, rank = match
        reused = recorded.token_ids[: recorded.assistant_ends[rank]]
        rest = tokenizer.render_after(
            shown,
            index,
            last_token_id=reused[-1],
            inputs=inputs,
            continues=goes_on,
            max_model_len=max_model_len,
        )
        if rest is not None:
            ends = recorded.assistant_ends[: rank + 1]
            return RenderedConversation(
                token_ids=(*reused, *rest), assistant_ends=ends + (0,) * (num_assistants - len(ends))
            )
    return RenderedConversation(
        token_ids=tuple(
            tokenizer.render(shown, inputs=inputs, continues=goes_on, max_model_len=max_model_len)
        ),
        assistant_ends=(0,) * num_assistants,
    )


def _last_match(messages: Sequence[ChatMessage], recorded: RecordedConversation) -> tuple[int, int] | None:
    """Index among all messages, and among assistant messages, of the last one whose ids can be reused."""
    found, rank = None, -1
    for index, (message, other) in enumerate(zip(messages, recorded.messages, strict=False)):
        if message[1:] != other[1:] or normalize_role(message.role) != normalize_role(other.role):
            break
        if message.role == "assistant":
            rank += 1
            if recorded.assistant_ends[rank] > 0:
                found = (index, rank)
    return found


def _any_of(texts: list[str]) -> str:
    """A pattern of what begins with one of these texts. Of a thousand, it looks at each character once."""
    if len(texts) == 1:
        return re.escape(texts[0])
    by_first: dict[str, list[str]] = {}
    for text in texts:
        by_first.setdefault(text[:1], []).append(text[1:])
    if "" in by_first:
        return ""
    return "|".join(f"{re.escape(first)}(?:{_any_of(rests)})" for first, rests in by_first.items())


class _Spellings(NamedTuple):
    """How some tokens are spelled.

    Attributes:
        begin: matches the first character of every spelling, including overlapping ones.
        longest: characters of the longest one.
        normalized: a tokenizer that finds what its normalizer makes one of them; None if there is no
            normalizer.
    """

    begin: re.Pattern[str]
    longest: int
    normalized: Any

    @classmethod
    def of(cls, tokens: list[Any], normalizer: Any) -> _Spellings | None:
        spellings = [token.content for token in tokens if len(token.content) > 1]
        if not spellings:
            return None
        rests: dict[str, list[str]] = {}
        for text in spellings:
            rests.setdefault(text[0], []).append(text[1:])
        begin = "|".join(f"{re.escape(first)}(?={_any_of(its)})" for first, its in rests.items())
        finder = normalizer and _finder(spellings, normalizer)
        return cls(re.compile(begin), max(map(len, spellings)), finder)

    def interrupted(self, text: str, marker: str) -> str:
        """The text with a marker after the first character of each spelling.

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
        """The text in pieces that are no spelling when they are normalized."""
        finder = self.normalized
        # Offsets take several times as long, and hardly any text has spellings.
        if not any(finder.encode_batch_fast([text])[0].ids):
            return [text]
        found = finder.encode_batch([text])[0]
        ends = [first + 1 for token_id, (first, _) in zip(found.ids, found.offsets, strict=True) if token_id]
        cuts = [end for end in ends if end < len(text)]  # a single character cannot be cut
        pieces = [text[begin:end] for begin, end in pairwise([0, *cuts, len(text)])]
        return [part for piece in pieces for part in self._cut(piece)] if cuts else pieces


def _finder(spellings: list[str], normalizer: Any) -> Any:
    """A tokenizer whose only tokens but 0 are these, normalized."""
    from tokenizers import AddedToken, Tokenizer, models

    finder = Tokenizer(models.WordLevel({"": 0}, unk_token=""))
    finder.normalizer = normalizer
    kept = [text for text in spellings if len(normalizer.normalize_str(text)) > 1]
    finder.add_tokens([AddedToken(text, normalized=True) for text in kept])
    return finder


def _unused(messages: Sequence[Message], character: str) -> str:
    """A string of Unicode noncharacters that none of the messages contains."""
    texts = [message["content"] for message in messages]
    texts += [json.dumps(message, ensure_ascii=False) for message in messages if len(message) > 2]
    candidate = character * 2
    while any(candidate in text for text in texts):
        candidate += character
    return candidate


def _check_unicode(text: str, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{param} has a lone surrogate at character {error.start}; it must be valid Unicode", param=param
        ) from None


def _steps(component: Any) -> list[Any]:
    """The parts of a component of `tokenizer.json`: a sequence's own, or itself."""
    if component is None:
        return []
    if component["type"] != "Sequence":
        return [component]
    names = ("normalizers", "pretokenizers", "decoders")
    return [step for name in names for part in component.get(name, ()) for step in _steps(part)]


def _has_decoder(decoder: Any, kind: str) -> bool:
    """Whether a decoder, or a part of it, is of a kind."""
    return any(step["type"] == kind for step in _steps(decoder))


def _longest_token(data: Any, vocabulary: Mapping[str, int]) -> int | None:
    """How many characters of a normalized text one token stands for at most.

    Args: data: `tokenizer.json`.

    Returns: None where one can stand for any number (unknown words, blanks beside a mark), where characters
        may get none, and with steps before the model of which that is not known.
    """
    model, before = data["model"], [*_steps(data["normalizer"]), *_steps(data["pre_tokenizer"])]
    kinds = {step["type"] for step in before}
    byte_tokens = {f"<0x{byte:02X}>" for byte in range(256)} if model.get("byte_fallback") else set()
    if "ByteLevel" in kinds:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        byte_tokens = set(bytes_to_unicode().values())  # type: ignore[no-untyped-call]
    knows_all = bool(byte_tokens) and byte_tokens <= vocabulary.keys()
    affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    strips = any(token["lstrip"] or token["rstrip"] for token in data["added_tokens"])
    if model["type"] != "BPE" or not knows_all or affixes or strips or not all(map(_keeps_all, before)):
        return None
    return max(map(len, vocabulary))


def _keeps_all(step: Any) -> bool:
    """Whether a normalizer or pre-tokenizer leaves no character out, but for what Unicode composes."""
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String", "")
        return 0 < len(pattern) <= len(step["content"])
    if step["type"] in ("Split", "Punctuation"):
        return bool(step["behavior"] != "Removed")
    return step["type"] in _KEEP_ALL


def _composes(data: Any) -> bool:
    return any(step["type"] in ("NFC", "NFKC") for step in _steps(data["normalizer"]))


def _rewritten(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The conversation as other templates take it, changed step by step: calls' arguments as objects, one
    system message at the beginning and later ones as a user's, roles that alternate, and no system message.
    """
    for rewrite in (_with_objects, _with_one_system, _alternating, _without_system):
        changed = rewrite(messages)
        if changed != messages:
            yield changed
            messages = changed


def _with_objects(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """An object for arguments that are no JSON, as some model wrote them."""
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
    begin = next((i for i, its in enumerate(messages) if its["role"] != "system"), len(messages))
    later = [{**its, "role": "user"} if its["role"] == "system" else its for its in messages[begin:]]
    return [*_joined(messages[:begin]), *later]


def _alternating(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    runs = ((role, list(run)) for role, run in groupby(messages, key=lambda message: message["role"]))
    return [its for role, run in runs for its in (_joined(run) if role == "user" else run)]


def _without_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if [its["role"] for its in messages[:2]] != ["system", "user"]:
        return messages
    return [{**messages[1], **_joined([{**messages[0], "role": "user"}, messages[1]])[0]}, *messages[2:]]


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as one, or none."""
    content = "\n\n".join(its["content"] for its in messages)
    return [{**messages[0], "content": content}] if messages else []
