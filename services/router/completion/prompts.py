"""Builds a turn's prompt: the token ids, from a request and its session's record.

Decides whether the request's messages continue the session or restate it (`session_mode`), and what the
answer may be. Tokenizing runs in a thread, because a long prompt must not delay other requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvferry.services.router.completion.requests import ChatRequest, Message
from kvferry.services.router.completion.structured import JSON_OBJECT, calls_grammar, grammar_of
from kvferry.services.router.completion.texts import TextRequest
from kvferry.services.router.completion.tools import NamedTool, Tool
from kvferry.services.router.http.large_work import BodyWork
from kvferry.services.router.sessions.record import SessionRecord
from kvferry.shared.errors import ContextLengthExceeded, InvalidRequest
from kvferry.shared.history.records import common_prefix
from kvferry.shared.model.chat_template import ChatMessage, TemplateInputs
from kvferry.shared.model.question import Question, find_question
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.model.tokenizer import ChatTokenizer, RecordedConversation, render_conversation
from kvferry.shared.sampling.grammar import GrammarCompiler
from kvferry.shared.sampling.params import Grammar, ThinkingBudget

if TYPE_CHECKING:
    from kvferry.shared.model.answer import AnswerParser

_PREFIX_TOKENS = 64
"""Of a prompt's end, for a parser of its answer."""
_EFFORT_VARIABLES = ("reasoning_effort", "enable_thinking", "thinking")
"""What chat templates have for `reasoning_effort`."""

Messages = tuple[ChatMessage, ...]


@dataclass(frozen=True, kw_only=True)
class Preamble:
    """Documents that a conversation begins with: one system message, or the beginning of the client's.

    Attributes:
        text: their texts with blank lines between; empty without documents.
    """

    document_ids: tuple[str, ...] = ()
    text: str = ""

    def before(self, messages: Messages) -> Messages:
        """Return the messages that the model gets."""
        if not self.text:
            return messages
        if messages and messages[0].role == "system":
            return (ChatMessage("system", f"{self.text}\n\n{messages[0].content}"), *messages[1:])
        return (ChatMessage("system", self.text), *messages)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """The model's input.

    Attributes:
        begun: the record of a session that ends with the prompt.
        keeps_thoughts: whether the chat template decides which thoughts of earlier answers the model sees.
        continues: an answer of the client's, with which a chat's prompt ends and the answer begins.
        question: where a chat's prompt has it; None if that is not known.
    """

    begun: SessionRecord
    keeps_thoughts: bool = False
    continues: ChatMessage | None = None
    question: Question | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.begun.token_ids

    def record(self, model: ModelSpec, completion: tuple[int, ...], answer: ChatMessage) -> SessionRecord:
        """Return the session after a turn that answered this prompt."""
        begun, token_ids = self.begun, self.begun.token_ids + completion
        if begun.kind == "chat":
            # The template leaves out most thoughts later: ids with them do not begin later prompts.
            ends = (*begun.assistant_ends, 0 if "reasoning_content" in answer.fields else len(token_ids))
            if not self.keeps_thoughts:
                answer = answer.without("reasoning_content")
            if self.continues is not None:
                answer = self.continues.continued(answer)
            messages = (*begun.messages, answer)
            return replace(begun, token_ids=token_ids, messages=messages, assistant_ends=ends)
        # A text continues where it ended, so the token that ended it is left out.
        while token_ids and token_ids[-1] in model.eos_token_ids:
            token_ids = token_ids[:-1]
        return replace(begun, token_ids=token_ids, text=begun.text + answer.content)


class PromptBuilder:
    """Builds prompts with one tokenizer, and decides what their answers may be."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.tokenizer = tokenizer
        self._added_ids = tokenizer.encode("")
        self._grammars: dict[tuple[int, tuple[int, ...]], GrammarCompiler] = {}

    async def grammar(
        self, request: ChatRequest | TextRequest, model: ModelSpec, owner: str
    ) -> Grammar | None:
        """Return the grammar that the answer must follow; None if there is none.

        Raises: InvalidRequest naming the field that asks for something impossible; CapacityExceeded: too
            many grammars of the owner are being tried.
        """
        asked = grammar_of(request)
        tools = request.called_tools if isinstance(request, ChatRequest) else []
        if asked is not None and tools:
            raise InvalidRequest(f"{asked[0]} is given; with tool_choice it must not be", param=asked[0])
        name, grammar = asked or ("tools", None)
        compiler = self._compiler(model)
        try:
            if isinstance(request, ChatRequest) and tools:
                grammar = await asyncio.to_thread(self._calls, request, tools)
            if grammar is None:
                return None
            await compiler.check(grammar, owner)
        except InvalidRequest as error:
            raise InvalidRequest(f"{name} cannot be used: {error.message}", param=name) from None
        if isinstance(request, ChatRequest) and grammar.kind == "json_schema" and request.may_call:
            with contextlib.suppress(InvalidRequest):  # of tools that no grammar can call
                either = await asyncio.to_thread(self._calls, request, request.shown_tools, grammar)
                await compiler.check(either, owner)
                grammar = either
        for other in ("ignore_eos", "min_tokens"):
            if getattr(request, other):
                raise InvalidRequest(f"{other} is given; with {name} it must not be", param=other)
        return grammar

    def _calls(self, request: ChatRequest, tools: list[Tool], or_text: Grammar | None = None) -> Grammar:
        """Return the grammar of calls, or of what else the request allows. Raises: InvalidRequest."""
        parallel = not isinstance(request.tool_choice, NamedTool) and request.parallel_tool_calls is not False
        return calls_grammar(self.tokenizer, tools, parallel=parallel, or_text=or_text)

    async def capabilities(self, model: ModelSpec) -> dict[str, bool]:
        """Return what clients can ask of the model, by its tokenizer and chat template."""
        tokenizer = self.tokenizer
        template = await asyncio.to_thread(lambda: tokenizer.template.response_template) or {"fields": {}}
        try:
            await self._compiler(model).check(JSON_OBJECT)
            has_grammars = True
        except InvalidRequest:
            has_grammars = False
        has_tools = tokenizer.template.knows("tools")
        return {
            "chat": tokenizer.template.exists,
            "tools": has_tools,
            "required_tools": has_tools and has_grammars and tokenizer.template.tool_format is not None,
            "thinking": bool({"reasoning_content", "thinking"} & set(template["fields"])),
            "structured_outputs": has_grammars,
        }

    async def close(self) -> None:
        """End the processes in which grammars are tried. Idempotent."""
        for compiler in self._grammars.values():
            await compiler.close()

    def _compiler(self, model: ModelSpec) -> GrammarCompiler:
        key = model.vocab_size, model.eos_token_ids
        return self._grammars.setdefault(key, GrammarCompiler(lambda: self.tokenizer, *key))

    def answer_parser(self, request: ChatRequest | TextRequest, prompt: Prompt) -> AnswerParser | None:
        """Return the parser that finds thoughts and tool calls in an answer; None if it can have none."""
        template = self.tokenizer.template.response_template
        if template is None or not isinstance(request, ChatRequest):
            return None
        from kvferry.shared.model.answer import THOUGHTS, AnswerParser

        fields = dict(template["fields"])
        if not request.shown_tools or request.tool_choice == "none":
            fields.pop("tool_calls", None)
        if request.separate_reasoning is False:
            fields = {name: field for name, field in fields.items() if name not in THOUGHTS}
        if set(fields) <= {"content"}:
            return None
        tools = [tool.for_template() for tool in request.shown_tools]
        return AnswerParser({**template, "fields": fields}, prefix=self._end_of(prompt), tools=tools)

    def _end_of(self, prompt: Prompt) -> str:
        return self.tokenizer.decode(prompt.token_ids[-_PREFIX_TOKENS:], shows_special=True)

    def thinking_budget(self, request: ChatRequest | TextRequest, prompt: Prompt) -> ThinkingBudget | None:
        """Return how long the answer may think; None if that is not bounded, or thoughts have no marks.

        Raises: InvalidRequest if a mark is not one token.
        """
        tags, template = self.tokenizer.template.thought_tags, self.tokenizer.template.response_template
        if not isinstance(request, ChatRequest) or (limit := request.thinking_limit) is None:
            return None
        if tags is None or template is None:
            return None
        from kvferry.shared.model.answer import AnswerParser

        open_id, end_id = map(self.tokenizer.token_id, tags)
        if open_id is None or end_id is None:
            tag = tags[0] if open_id is None else tags[1]
            param = "thinking_token_budget"
            raise InvalidRequest(
                f"{param} is {limit}; it must not be given, because {tag} is not one token of the model",
                param=param,
            )
        is_open = AnswerParser(template, prefix=self._end_of(prompt)).begins_with_thought
        return ThinkingBudget(max_tokens=limit, open_id=open_id, end_id=end_id, is_open=is_open)

    async def build(
        self,
        request: ChatRequest | TextRequest,
        record: SessionRecord | None,
        model: ModelSpec,
        work: BodyWork,
        preamble: Preamble | None = None,
        *,
        is_counted: bool = False,
    ) -> Prompt:
        """Build the prompt of a request.

        Args:
            record: the session's, None where it has no turns yet or there is no session.
            preamble: the documents that the request names; None leaves the session's.
            is_counted: a chat's tokens are only counted, so they may be too many for the context.

        Raises: InvalidRequest with `param`; ContextLengthExceeded where the text alone says that it cannot
            fit. `sampling_params` looks at the tokens.
        """
        mode, kind = request.session_mode or "auto", "chat" if isinstance(request, ChatRequest) else "text"
        if record is not None and record.kind != kind:
            if mode != "replace":
                other = "text completions" if kind == "chat" else "chat completions"
                raise InvalidRequest(
                    f"The session has {other}; this endpoint may only replace it (session_mode 'replace')",
                    param="session_mode",
                )
            record = None
        if isinstance(request, ChatRequest):
            most = None if is_counted else model.max_model_len
            return await work(partial(self._chat, request, record, mode, model, most, preamble))
        return await work(partial(self._text, request, record, mode, model))

    async def document_tokens(self, text: str, model: ModelSpec, work: BodyWork) -> tuple[int, ...]:
        """Return the tokens that every conversation with this document begins with.

        Raises: InvalidRequest where the model's template has no system messages; ContextLengthExceeded as
            `build`.
        """

        def render(question: str) -> tuple[int, ...]:
            messages = Preamble(text=text).before((ChatMessage("user", question),))
            shown = [message.for_template() for message in messages]
            return tuple(self.tokenizer.render(shown, max_model_len=model.max_model_len))

        def common() -> tuple[int, ...]:
            one, other = render("a"), render("0 b")
            return one[: common_prefix(one, other)]

        try:
            return await work(common)
        except ContextLengthExceeded as error:
            raise ContextLengthExceeded(error.message, param="text") from None
        except InvalidRequest as error:
            raise InvalidRequest(f"documents need system messages: {error.message}", param="text") from None

    def _chat(
        self,
        request: ChatRequest,
        record: SessionRecord | None,
        mode: str,
        model: ModelSpec,
        max_model_len: int | None,
        preamble: Preamble | None,
    ) -> Prompt:
        given = tuple([self._recorded(message, index) for index, message in enumerate(request.messages)])
        before: Messages = ()
        recorded = None
        earlier = Preamble()
        if record is not None:
            earlier = Preamble(document_ids=record.document_ids, text=record.preamble)
            recorded = RecordedConversation(
                messages=earlier.before(record.messages),
                token_ids=record.token_ids,
                assistant_ends=record.assistant_ends,
            )
            restates = any(role == "assistant" for role, *_ in given) or given[0] == record.messages[0]
            if mode == "append" or (mode == "auto" and not restates):
                before = record.messages
        if preamble is None or preamble.document_ids == earlier.document_ids:
            preamble = earlier
        elif before:
            raise InvalidRequest(
                "document_ids differ from those that the session began with; a session keeps its documents "
                "(session_mode 'replace' starts again)",
                param="document_ids",
            )
        continues = given[-1] if request.continue_final_message else None
        messages = before + (given if continues is None else given[:-1])
        inputs = self._template_inputs(request)
        recorded_inputs = json.dumps(inputs) if any(inputs) else ""
        if record is not None and record.template_inputs != recorded_inputs:
            recorded = None  # the prompt begins with other tools, for example
        shown = preamble.before(messages)
        try:
            rendered = render_conversation(
                self.tokenizer,
                shown,
                continues=continues,
                recorded=recorded,
                inputs=inputs,
                max_model_len=max_model_len,
            )
        except InvalidRequest as error:
            raise _as_sent(error, len(before) + len(shown) - len(messages)) from None
        begun = SessionRecord(
            kind="chat",
            model_fingerprint=model.fingerprint,
            token_ids=rendered.token_ids,
            messages=messages,
            assistant_ends=rendered.assistant_ends,
            document_ids=preamble.document_ids,
            preamble=preamble.text,
            template_inputs=recorded_inputs,
        )
        question = None
        if continues is None:
            asked = [message.for_template() for message in shown]
            question = find_question(self.tokenizer, asked, rendered.token_ids, inputs)
        keeps_thoughts = "reasoning_content" in self.tokenizer.template.fields
        return Prompt(begun=begun, keeps_thoughts=keeps_thoughts, continues=continues, question=question)

    def _template_inputs(self, request: ChatRequest) -> TemplateInputs:
        """Return the template's inputs. Raises: InvalidRequest if it cannot show the request's tools."""
        template, arguments = self.tokenizer.template, dict[str, Any]()
        tools = [tool.for_template() for tool in request.shown_tools]
        if tools and not template.knows("tools"):
            raise InvalidRequest("tools are given; the model's chat template has none", param="tools")
        if (effort := request.reasoning_effort) is not None:
            values = (effort, effort != "none", effort != "none")
            efforts = zip(_EFFORT_VARIABLES, values, strict=True)
            arguments = {name: value for name, value in efforts if template.knows(name)}
        given = (request.chat_template_kwargs or {}).items()
        return TemplateInputs(
            tools, arguments | {name: value for name, value in given if template.takes(name)}
        )

    def ignored_fields(self, request: ChatRequest | TextRequest) -> list[str]:
        """Return the fields that the client gave and that change nothing with this model's template."""
        if isinstance(request, TextRequest):
            return []
        template, arguments = self.tokenizer.template, request.chat_template_kwargs or ()
        ignored = [f"chat_template_kwargs.{name}" for name in arguments if not template.takes(name)]
        if request.reasoning_effort is not None and not any(map(template.knows, _EFFORT_VARIABLES)):
            ignored.append("reasoning_effort")
        if request.thinking_token_budget is not None and (
            request.thinking_limit is None or template.thought_tags is None
        ):
            ignored.append("thinking_token_budget")
        return ignored + [
            f"messages.{name}"
            for name in ("name", "reasoning_content")
            if name not in template.fields and any(getattr(message, name) for message in request.messages)
        ]

    def _recorded(self, message: Message, index: int) -> ChatMessage:
        """Return the message as recorded. Raises: InvalidRequest if its tool calls would not be shown."""
        fields = self.tokenizer.template.fields
        if message.tool_calls and "tool_calls" not in fields:
            param = f"messages[{index}].tool_calls"
            raise InvalidRequest(
                f"{param} is given; the model's chat template has no tool calls", param=param
            )
        return message.recorded(fields)

    def _text(
        self, request: TextRequest, record: SessionRecord | None, mode: str, model: ModelSpec
    ) -> Prompt:
        (prompt,) = request.prompts
        if is_text := isinstance(prompt, str):
            token_ids = tuple(self.tokenizer.encode(prompt, max_model_len=model.max_model_len))
            text = prompt
        else:
            token_ids = tuple(prompt)
            wrong = next((token_id for token_id in token_ids if token_id >= model.vocab_size), None)
            if wrong is not None:
                raise InvalidRequest(
                    f"prompt has token {wrong}; the vocabulary has ids 0 to {model.vocab_size - 1}",
                    param="prompt",
                )
            text = self.tokenizer.decode(token_ids)
        if record is not None:
            known = record.token_ids or tuple(self.tokenizer.encode(record.text))  # of another model's record
            begins = text.startswith(record.text) if is_text else token_ids[: len(known)] == known
            appends = mode == "append" or (mode == "auto" and not begins)
            if appends or (begins and is_text):
                rest = text if appends else text[len(record.text) :]
                token_ids = known + (self._encode_rest(rest) if is_text else token_ids)
                text = record.text + rest
        if not token_ids:
            raise InvalidRequest("prompt has no tokens; it must have at least one", param="prompt")
        fingerprint = model.fingerprint
        return Prompt(
            begun=SessionRecord(kind="text", model_fingerprint=fingerprint, token_ids=token_ids, text=text)
        )

    def _encode_rest(self, text: str) -> tuple[int, ...]:
        """Encode text that continues another: without the ids that begin each text."""
        ids = self.tokenizer.encode(text) if text else []
        num_added = len(self._added_ids)
        return tuple(ids[num_added:] if ids[:num_added] == self._added_ids else ids)


def _as_sent(error: InvalidRequest, num_before: int) -> InvalidRequest:
    """Return the error with message numbers as the client counts them, without the recorded ones before."""
    if num_before == 0 or error.param is None:
        return error

    def as_sent(match: re.Match[str]) -> str:
        return f"messages[{max(0, int(match.group(1)) - num_before)}]"

    numbered = re.compile(r"messages\[(\d+)\]")
    return type(error)(numbered.sub(as_sent, error.message), param=numbered.sub(as_sent, error.param))
