"""Text to token ids and back, and prompts of conversations by the chat template, in router and decode.

Prompts of ordinary text have exactly the ids of `apply_chat_template`. There is one exception: if a message's
content spells a special token (`<|end|>`), the rendered text is split inside that spelling and the pieces are
tokenized separately, so that it stays text and cannot fake a message's end. The same holds for other added
tokens that the template writes (`<|User|>` of some models), except in answers, which may have thoughts. Text
that the tokenizer's normalizer turns into such a spelling (NFKC turns U+FF1C into `<`) counts as one, too.
Markers that a template writes as plain text (`[INST]`) cannot be told from content; they are not protected.

Tokenizing a generated text does not always give the token ids that were generated. The prompt of a session's
next turn therefore has recorded token ids as far as possible, and only the rest is rendered. A prompt that
starts with the recorded ids finds all of their KV in the history, whether the client sends only new messages
or the whole conversation. The router stores the records.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from kvferry.shared.errors import ConfigurationError, ContextLengthExceeded, KvferryError, UnsupportedModel
from kvferry.shared.model.chat_template import (
    NO_INPUTS,
    ChatMessage,
    ChatTemplate,
    Message,
    Spellings,
    TemplateInputs,
    check_unicode,
    normalize_role,
    unused,
)
from kvferry.shared.model.checkpoint import quiet_libraries, read_eos_token_ids, resolve_model_path
from kvferry.shared.model.tokenizer_file import composes, has_decoder, longest_token

_DECODED_AT_ONCE = 1000
"""This many ids become text in less than 0.1 ms; for that long a call may hold Python's lock."""
_MOST_COMPOSED = 4
"""The most characters that Unicode's composition turns into one."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class ChatTokenizer:
    """A model's tokenizer and chat template. Immutable; safe to share between threads.

    Attributes:
        decode_one: `decode` of a single id.
        partial_bytes: a token's bytes where it begins or ends within a character; None where its text is
            complete.

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
        self.eos_token_ids = eos_token_ids
        self.template = ChatTemplate(
            tokenizer, [self._backend.id_to_token(token_id) for token_id in eos_token_ids]
        )
        added = self._backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        data = json.loads(self._backend.to_str())
        self._longest, self._shrinks = longest_token(data, self._backend.get_vocab()), composes(data)
        decoder = data["decoder"]
        self._has_byte_fallback = has_decoder(decoder, "ByteFallback")
        self._is_byte_level = has_decoder(decoder, "ByteLevel")
        self.partial_bytes = cache(self._find_partial_bytes)
        self.decode_one = cache(self._decode_one)
        written = {i for text in self.template.examples() for i in self._ids(text, add_special_tokens=False)}
        markers = {i: t for i, t in added.items() if t.special or (i in written and t.content.strip())}
        normalizer = self._backend.normalizer
        self._spelled_special = Spellings.of([t for t in markers.values() if t.special], normalizer)
        self._spelled_marker = Spellings.of([*markers.values()], normalizer)
        """Includes added tokens that the template writes: in some models those of roles are not special."""

    @classmethod
    def load(cls, path: str | Path) -> ChatTokenizer:
        """Load a model's tokenizer; `path` is as `resolve_model_path` takes it. No weights are read.

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

    def for_grammars(self) -> str:
        """Return the contents of `tokenizer.json`, with names for `marks` that no text spells. A grammar's
        text is then never one of the marks, which it could not allow."""
        data = json.loads(self._backend.to_str())
        names = {text: f"<\ufdd1{i}>" for text, i in self.marks.items()}
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
        """The spellings of the added tokens that are not text in grammars: special ones, and those in angle
        brackets."""
        added = self._backend.get_added_tokens_decoder().items()
        return {t.content: i for i, t in added if t.special or re.fullmatch("<.*>", t.content, re.DOTALL)}

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
        """Tokenize a plain prompt (/v1/completions): the tokenizer parses special tokens and adds its own.

        Raises:
            InvalidRequest: the text is not valid Unicode.
            ContextLengthExceeded: it is too long for `max_model_len`, by `least_tokens`.
        """
        check_unicode(text, "prompt")
        self._check_length([text], max_model_len, "prompt")
        return self._ids(text, add_special_tokens=add_special)

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of the text's tokens, by its length alone; 0 where that tells nothing."""
        if self._longest is None:
            return 0
        most = self._longest if not self._shrinks or text.isascii() else self._longest * _MOST_COMPOSED
        return -(-len(text) // most)

    def _check_length(self, pieces: Sequence[str], max_model_len: int | None, param: str) -> None:
        """Check lengths. Raises: ContextLengthExceeded: a context of `max_model_len` cannot hold them plus
        one."""
        if max_model_len is None or self._longest is None:
            return
        if (least := sum(map(self.least_tokens, pieces))) >= max_model_len:
            raise ContextLengthExceeded(
                f"The prompt has {least} tokens or more; the context of {max_model_len} tokens must hold it "
                "and at least one more",
                param=param,
            )

    def spelling(self, token_id: int) -> str:
        """Return the id's entry in the vocabulary; empty for padding ids."""
        return self._backend.id_to_token(token_id) or ""

    def decode(self, token_ids: Sequence[int], *, shows_special: bool = False) -> str:
        """Return the text of ids, by default without special tokens; spaces are not cleaned up."""
        skips = not shows_special
        if len(token_ids) > _DECODED_AT_ONCE:  # see `_ids`
            return str(self._backend.decode_batch([list(token_ids)], skip_special_tokens=skips)[0])
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skips))

    def _decode_one(self, token_id: int, *, shows_special: bool = False) -> str:
        return self.decode((token_id,), shows_special=shows_special)

    def token_id(self, text: str) -> int | None:
        """Return the id of the added token with this spelling; None if there is none."""
        found = self._backend.token_to_id(text)
        return found if found in self._backend.get_added_tokens_decoder() else None

    def special_parts(self, text: str) -> list[str | int]:
        """Split a text into pieces: the ids of the `marks` that it spells, and the texts between them."""
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
        """Return the ids of a conversation up to the beginning of the next assistant message.

        Args: continues: up to the end of the last message, an answer that goes on.

        Raises:
            InvalidRequest: the template refuses it or cannot show it.
            ContextLengthExceeded: the rendered text is too long for `max_model_len`.
        """
        text, marker = self.render_text(messages, inputs, continues)
        return self.encode_rendered(text, marker, max_model_len)

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
        """Return the ids of what the template writes after the content of one message.

        Args:
            last_token_id: the token before. If it is an end-of-sequence id that the template would write
                next, it is not repeated.

        Returns: None if the template does not contain that content exactly once.

        Raises: as `render`.
        """
        sentinel = unused(messages, "\ufdd2")
        replaced = [dict(message) for message in messages]
        # Generated text includes tool calls and thoughts; only what the template writes after it is wanted.
        replaced[index] = {"role": messages[index]["role"], "content": sentinel}
        text, marker = self.render_text(replaced, inputs, continues)
        if text.count(sentinel) != 1:
            return None
        rest = text.split(sentinel)[1]
        if last_token_id in self.eos_token_ids:
            stripped = rest.lstrip()
            if stripped.startswith(self._backend.id_to_token(last_token_id)):
                ids = self.encode_rendered(stripped, marker, max_model_len)
                if ids[0] == last_token_id:
                    return ids[1:]
        return self.encode_rendered(rest, marker, max_model_len)

    def is_silent(self, token_id: int, *, shows_special: bool = False) -> bool:
        """Return whether the id adds no text: special tokens, and ids of a padded vocabulary.

        Args: shows_special: only those special tokens that end a completion.
        """
        silent = self.eos_token_ids if shows_special else self._special_ids
        return token_id in silent or self._backend.id_to_token(token_id) is None

    def is_byte_fallback(self, token_id: int) -> bool:
        """Return whether the token is one byte of a sequence that can only be decoded as a whole."""
        if not self._has_byte_fallback:
            return False
        token = self._backend.id_to_token(token_id)
        return token is not None and _BYTE_TOKEN.fullmatch(token) is not None

    def render_text(
        self, messages: Sequence[Message], inputs: TemplateInputs, continues: bool
    ) -> tuple[str, str]:
        """Return the template's text, and the marker at which it must be split before tokenizing."""
        self.template.check(messages)
        marker = unused(
            [*messages, *({"content": "", "tool": tool, "": ""} for tool in inputs.tools)], "\ufdd0"
        )
        prepared = [
            {name: self._mark(value, marker, spelled) for name, value in message.items()}
            | {"role": normalize_role(message["role"])}
            for message in messages
            # A model's own answer may have such tokens, for example those of a thought.
            for spelled in [self._spelled_special if message["role"] == "assistant" else self._spelled_marker]
        ]
        if any(inputs):
            parts = [list(inputs.tools), dict(inputs.arguments)]
            inputs = TemplateInputs(*self._mark(parts, marker, self._spelled_marker))
        return self.template.text(prepared, inputs, continues), marker

    def _mark(self, value: Any, marker: str, spelled: Spellings | None) -> Any:
        """Return the value with every spelling of these tokens in its texts interrupted."""
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

    def encode_rendered(self, text: str, marker: str, max_model_len: int | None = None) -> list[int]:
        """Tokenize text of `render_text`. Args: marker: at which it is split; max_model_len: as of
        `render`."""
        pieces = text.split(marker)
        self._check_length(pieces, max_model_len, "messages")
        return [i for piece in pieces for i in self._ids(piece, add_special_tokens=False)]

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # Only the backend's calls for batches let other threads run; megabytes take seconds.
        return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)


@dataclass(frozen=True, kw_only=True)
class RecordedConversation:
    """A conversation as text and as the token ids that were really used, or a prompt that is to be.

    Attributes:
        messages: including the last completion.
        token_ids: prompt and completion of the last turn; of a prompt, up to the beginning of the next
            assistant message.
        assistant_ends: for each assistant message of `messages`, in order: the number of `token_ids` up to
            the end of its content; 0 if its ids are not known, because a client wrote it. The record that
            follows a prompt has its own and, for the new message, the length of prompt plus completion.
    """

    messages: tuple[ChatMessage, ...]
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
) -> RecordedConversation:
    """Render the prompt of a whole conversation, reusing recorded ids up to the last recorded answer in it.

    Args:
        messages: the whole conversation, including recorded messages.
        continues: an answer that follows them and goes on.
        recorded: the session's record, if there is one that had the same inputs.

    Raises: as `ChatTokenizer.render`.
    """
    shown = [message.for_template() for message in (*messages, *([] if continues is None else [continues]))]
    goes_on = continues is not None
    token_ids: tuple[int, ...] | None = None
    ends: tuple[int, ...] = ()
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
            token_ids, ends = (*reused, *rest), recorded.assistant_ends[: rank + 1]
    if token_ids is None:
        token_ids = tuple(
            tokenizer.render(shown, inputs=inputs, continues=goes_on, max_model_len=max_model_len)
        )
    num_unknown = [message.role for message in messages].count("assistant") - len(ends)
    return RecordedConversation(
        messages=tuple(messages), token_ids=token_ids, assistant_ends=ends + (0,) * num_unknown
    )


def _last_match(messages: Sequence[ChatMessage], recorded: RecordedConversation) -> tuple[int, int] | None:
    """Return the index, among all messages and among assistant ones, of the last whose ids can be reused."""
    found, rank = None, -1
    for index, (message, other) in enumerate(zip(messages, recorded.messages, strict=False)):
        if message[1:] != other[1:] or normalize_role(message.role) != normalize_role(other.role):
            break
        if message.role == "assistant":
            rank += 1
            if recorded.assistant_ends[rank] > 0:
                found = (index, rank)
    return found
