"""What a turn runs on: the prompt's token ids, from a request and its session's record, and the plan of its
compression.

Decides whether the request's messages continue the session or restate it (`session_mode`). Tokenizing runs in
a thread, because a long prompt must not delay other requests. The plan is the server's default, or the
request's own choice within what is allowed; a requested quality becomes a retention here, by the model's
calibrated curve and the prompt's tokens, before decode reserves anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvferry.models import SHIPPED_CALIBRATION
from kvferry.services.router.completion.engine_fields import KvCompression
from kvferry.services.router.completion.requests import ChatRequest, Message
from kvferry.services.router.completion.structured import JSON_OBJECT, calls_grammar, grammar_of
from kvferry.services.router.completion.texts import TextRequest
from kvferry.services.router.completion.tools import NamedTool, Tool
from kvferry.services.router.config import RouterConfig, split_list
from kvferry.services.router.http.errors import describe
from kvferry.services.router.http.large_work import BodyWork
from kvferry.services.router.sessions.record import SessionRecord
from kvferry.shared.compression.applicable import applicable_methods
from kvferry.shared.compression.curves import CurveBook, QualityCurve
from kvferry.shared.compression.plan import Budget, CompressionPlan
from kvferry.shared.compression.presets import method_names, plan_for, preset
from kvferry.shared.errors import ConfigurationError, ContextLengthExceeded, InvalidRequest
from kvferry.shared.history.records import common_prefix
from kvferry.shared.model.chat_template import ChatMessage, TemplateInputs
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.model.text import TextAssembler
from kvferry.shared.model.tokenizer import ChatTokenizer, RecordedConversation, render_conversation
from kvferry.shared.sampling.grammar import GrammarCompiler
from kvferry.shared.sampling.params import Grammar, ThinkingBudget

if TYPE_CHECKING:
    from kvferry.shared.model.answer import AnswerParser

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
        """The messages that the model gets."""
        if not self.text:
            return messages
        if messages and messages[0].role == "system":
            return (ChatMessage("system", f"{self.text}\n\n{messages[0].content}"), *messages[1:])
        return (ChatMessage("system", self.text), *messages)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """The model's input, and what the session's record needs of it.

    Attributes:
        messages, assistant_ends: for chats, see `SessionRecord`.
        text: for text completions.
        preamble: the documents that a chat begins with.
        template_inputs: see `SessionRecord`.
        keeps_thoughts: whether the chat template decides which thoughts of earlier answers the model sees.
        continues: an answer of the client's, with which a chat's prompt ends and the answer begins.
    """

    kind: Literal["chat", "text"]
    token_ids: tuple[int, ...]
    messages: Messages = ()
    assistant_ends: tuple[int, ...] = ()
    text: str = ""
    preamble: Preamble = Preamble()
    template_inputs: str = ""
    keeps_thoughts: bool = False
    continues: ChatMessage | None = None

    def record(self, model: ModelSpec, completion: tuple[int, ...], answer: ChatMessage) -> SessionRecord:
        """The session after a turn that answered this prompt."""
        token_ids = self.token_ids + completion
        if self.kind == "chat":
            # The template leaves out most thoughts later: ids with them do not begin later prompts.
            end = 0 if "reasoning_content" in answer.fields else len(token_ids)
            if not self.keeps_thoughts:
                answer = answer.without("reasoning_content")
            if self.continues is not None:
                answer = self.continues.continued(answer)
            return SessionRecord(
                kind="chat",
                model_fingerprint=model.fingerprint,
                token_ids=token_ids,
                messages=(*self.messages, answer),
                assistant_ends=(*self.assistant_ends, end),
                document_ids=self.preamble.document_ids,
                preamble=self.preamble.text,
                template_inputs=self.template_inputs,
            )
        # A text continues where it ended, so the token that ended it is left out.
        while token_ids and token_ids[-1] in model.eos_token_ids:
            token_ids = token_ids[:-1]
        return SessionRecord(
            kind="text",
            model_fingerprint=model.fingerprint,
            token_ids=token_ids,
            text=self.text + answer.content,
        )


class PromptBuilder:
    """Builds prompts with one tokenizer."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._added_ids = tokenizer.encode("")
        self._grammars: dict[tuple[int, tuple[int, ...]], GrammarCompiler] = {}

    def assembler(
        self, request: ChatRequest | TextRequest | None = None, *, shows_special: bool = False
    ) -> TextAssembler:
        """Makes text of one choice's tokens, or of a prompt's."""
        if request is None:
            return TextAssembler(self._tokenizer)
        return TextAssembler(
            self._tokenizer,
            request.stop_strings,
            min_tokens=request.min_tokens or 0,
            includes_stop=bool(request.include_stop_str_in_output or request.no_stop_trim),
            shows_special=shows_special,
        )

    async def grammar(
        self, request: ChatRequest | TextRequest, model: ModelSpec, owner: str
    ) -> Grammar | None:
        """What the answer must be.

        Raises: InvalidRequest naming the field that asks for what cannot be had; CapacityExceeded: too many
            grammars of the owner are being tried.
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
        """The grammar of calls, or of what else the request allows. Raises: InvalidRequest."""
        parallel = not isinstance(request.tool_choice, NamedTool) and request.parallel_tool_calls is not False
        return calls_grammar(self._tokenizer, tools, parallel=parallel, or_text=or_text)

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """The ids of a text. Raises: InvalidRequest where it is not valid Unicode."""
        return self._tokenizer.encode(text, add_special=add_special)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, with special tokens."""
        return await asyncio.to_thread(self._tokenizer.decode, token_ids, shows_special=True)

    def spellings(self, token_ids: Sequence[int]) -> list[str]:
        """The entries of the vocabulary."""
        return list(map(self._tokenizer.spelling, token_ids))

    async def capabilities(self, model: ModelSpec) -> dict[str, bool]:
        """What clients can ask of the model, by its tokenizer and chat template."""
        tokenizer = self._tokenizer
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
        return self._grammars.setdefault(key, GrammarCompiler(lambda: self._tokenizer, *key))

    def answer_parser(self, request: ChatRequest | TextRequest, prompt: Prompt) -> AnswerParser | None:
        """Finds thoughts and tool calls in an answer; None where there are none."""
        template = self._tokenizer.template.response_template
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
        return self._tokenizer.decode(prompt.token_ids[-_PREFIX_TOKENS:], shows_special=True)

    def thinking_budget(self, request: ChatRequest | TextRequest, prompt: Prompt) -> ThinkingBudget | None:
        """How long the answer may think; None where that is not bounded, or thoughts have no marks.

        Raises: InvalidRequest where a mark is not one token.
        """
        tags, template = self._tokenizer.template.thought_tags, self._tokenizer.template.response_template
        if not isinstance(request, ChatRequest) or (limit := request.thinking_limit) is None:
            return None
        if tags is None or template is None:
            return None
        from kvferry.shared.model.answer import AnswerParser

        open_id, end_id = map(self._tokenizer.token_id, tags)
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
        """The prompt of a request.

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
            return await work(partial(self._chat, request, record, mode, most, preamble))
        return await work(partial(self._text, request, record, mode, model))

    async def document_tokens(self, text: str, model: ModelSpec, work: BodyWork) -> tuple[int, ...]:
        """The tokens that every conversation with this document begins with.

        Raises: InvalidRequest where the model's template has no system messages; ContextLengthExceeded as
            `build`.
        """

        def render(question: str) -> tuple[int, ...]:
            messages = Preamble(text=text).before((ChatMessage("user", question),))
            shown = [message.for_template() for message in messages]
            return tuple(self._tokenizer.render(shown, max_model_len=model.max_model_len))

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
                self._tokenizer,
                shown,
                continues=continues,
                recorded=recorded,
                inputs=inputs,
                max_model_len=max_model_len,
            )
        except InvalidRequest as error:
            raise _as_sent(error, len(before) + len(shown) - len(messages)) from None
        return Prompt(
            kind="chat",
            token_ids=rendered.token_ids,
            messages=messages,
            assistant_ends=rendered.assistant_ends,
            preamble=preamble,
            template_inputs=recorded_inputs,
            keeps_thoughts="reasoning_content" in self._tokenizer.template.fields,
            continues=continues,
        )

    def _template_inputs(self, request: ChatRequest) -> TemplateInputs:
        """Raises: InvalidRequest where the chat template has none of what the request wants shown."""
        knows = self._tokenizer.template.knows
        tools = [tool.for_template() for tool in request.shown_tools]
        if tools and not knows("tools"):
            raise InvalidRequest("tools are given; the model's chat template has none", param="tools")
        takes = self._tokenizer.template.takes
        arguments: dict[str, Any] = {
            name: its for name, its in (request.chat_template_kwargs or {}).items() if takes(name)
        }
        if (effort := request.reasoning_effort) is not None:
            values = (effort, effort != "none", effort != "none")
            efforts = dict(zip(_EFFORT_VARIABLES, values, strict=True))
            arguments = {name: value for name, value in efforts.items() if knows(name)} | arguments
        return TemplateInputs(tools, arguments)

    def ignored_fields(self, request: ChatRequest | TextRequest) -> list[str]:
        """The fields that the client gave and that change nothing with this model's template."""
        ignored: list[str] = []
        if isinstance(request, TextRequest):
            return ignored
        ignored += [
            f"chat_template_kwargs.{name}"
            for name in request.chat_template_kwargs or ()
            if not self._tokenizer.template.takes(name)
        ]
        if request.reasoning_effort is not None and not any(
            map(self._tokenizer.template.knows, _EFFORT_VARIABLES)
        ):
            ignored.append("reasoning_effort")
        if request.thinking_token_budget is not None and (
            request.thinking_limit is None or self._tokenizer.template.thought_tags is None
        ):
            ignored.append("thinking_token_budget")
        for name in ("name", "reasoning_content"):
            if name not in self._tokenizer.template.fields:
                for message in request.messages:
                    if getattr(message, name):
                        ignored.append(f"messages.{name}")
                        break
        return ignored

    def _recorded(self, message: Message, index: int) -> ChatMessage:
        """Raises: InvalidRequest where it has tool calls, and the chat template would not show them."""
        fields = self._tokenizer.template.fields
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
        if isinstance(prompt, str):
            token_ids = tuple(self._tokenizer.encode(prompt, max_model_len=model.max_model_len))
            text = prompt
        else:
            token_ids, text = tuple(prompt), ""
            wrong = [token_id for token_id in token_ids if token_id >= model.vocab_size]
            if wrong:
                raise InvalidRequest(
                    f"prompt has token {wrong[0]}; the vocabulary has ids 0 to {model.vocab_size - 1}",
                    param="prompt",
                )
            text = self._tokenizer.decode(token_ids)
        if record is not None:
            token_ids, text = self._continued(record, mode, prompt, token_ids, text)
        if not token_ids:
            raise InvalidRequest("prompt has no tokens; it must have at least one", param="prompt")
        return Prompt(kind="text", token_ids=token_ids, text=text)

    def _continued(
        self,
        record: SessionRecord,
        mode: str,
        prompt: str | list[int],
        token_ids: tuple[int, ...],
        text: str,
    ) -> tuple[tuple[int, ...], str]:
        """A text prompt of a session with turns."""
        if isinstance(prompt, str):
            restates = text.startswith(record.text)
            if restates and mode != "append":
                return record.token_ids + self._encode_rest(text[len(record.text) :]), text
        else:
            restates = token_ids[: len(record.token_ids)] == record.token_ids
        if mode == "append" or (mode == "auto" and not restates):
            added = self._encode_rest(prompt) if isinstance(prompt, str) else token_ids
            return record.token_ids + added, record.text + text
        return token_ids, text

    def _encode_rest(self, text: str) -> tuple[int, ...]:
        """Ids of text that continues another: without the ids that the tokenizer puts at a text's
        beginning."""
        if not text:
            return ()
        ids = self._tokenizer.encode(text)
        num_added = len(self._added_ids)
        return tuple(ids[num_added:] if ids[:num_added] == self._added_ids else ids)


def _as_sent(error: InvalidRequest, num_before: int) -> InvalidRequest:
    """The error with message numbers as the client counts them, without the recorded ones before."""
    if num_before == 0 or error.param is None:
        return error

    def as_sent(match: re.Match[str]) -> str:
        return f"messages[{max(0, int(match.group(1)) - num_before)}]"

    numbered = re.compile(r"messages\[(\d+)\]")
    return type(error)(numbered.sub(as_sent, error.message), param=numbered.sub(as_sent, error.param))


_PREFIX_TOKENS = 64
"""Of a prompt's end, for a parser of its answer."""
_EFFORT_VARIABLES = ("reasoning_effort", "enable_thinking", "thinking")
"""What chat templates have for `reasoning_effort`."""
_FALLBACKS = ("rocketkv", "full")
"""Methods in place of a default that does not go with the model."""


class PlanChooser:
    """The server's default plan, the methods that requests may name, and their quality curves.

    Raises: ConfigurationError where an option names a method that does not exist or is not allowed, or
        quality curves cannot be read.
    """

    def __init__(self, config: RouterConfig) -> None:
        known = method_names()
        self.allowed = split_list(config.allowed_methods) or known
        unknown = [name for name in (*self.allowed, config.default_method) if name not in known]
        if unknown:
            raise ConfigurationError(f"Unknown method {unknown[0]!r}; there are {', '.join(known)}")
        if config.default_method not in self.allowed:
            raise ConfigurationError(
                f"default_method is {config.default_method!r}; allowed_methods are {', '.join(self.allowed)}"
            )
        self._default_method = config.default_method
        self._default_budget = Budget(tokens=config.default_token_budget or None)
        try:
            plan_for(config.default_method, budget=self._default_budget)
        except InvalidRequest as error:
            raise ConfigurationError(f"default_token_budget: {error.message}") from None

        folders = [SHIPPED_CALIBRATION, *([Path(config.calibration)] if config.calibration else [])]
        self._curves = CurveBook.read(folders)

    def all(self) -> tuple[CompressionPlan, ...]:
        """The plan of each allowed method where a request gives no budget."""
        return tuple(self._plan(KvCompression(), method) for method in self.allowed)

    def default(self, model: ModelSpec) -> CompressionPlan:
        """The plan of a prompt whose request says nothing of compression."""
        return self._plan(KvCompression(), self.default_method(model))

    def default_method(self, model: ModelSpec) -> str:
        """The method of requests that name none: the server's default, if it goes with the model."""
        fitting = applicable_methods(model.layers)
        for method in (self._default_method, *_FALLBACKS, *self.allowed):
            if method in fitting and method in self.allowed:
                return method
        return self._default_method

    async def choose(
        self, wanted: KvCompression | None, prompt_token_ids: Sequence[int], model: ModelSpec
    ) -> CompressionPlan:
        """The plan of one prompt.

        Raises: InvalidRequest naming `kv_compression` or its field.
        """
        wanted = wanted or KvCompression()
        method = self._method(wanted, model)
        if wanted.quality is None:
            return self._plan(wanted, method)
        if wanted.parameters:
            raise InvalidRequest(
                "kv_compression.quality uses curves calibrated with the methods' own parameters; with "
                "kv_compression.parameters give token_budget or retention",
                param="kv_compression.quality",
            )
        curve = self._curve(method, model)
        # In a thread, because it reads the whole prompt.
        retention = await asyncio.to_thread(
            curve.retention, wanted.quality, prompt_token_ids, vocab_size=model.vocab_size
        )
        return plan_for(method, budget=Budget(retention=retention))

    def _plan(self, wanted: KvCompression, method: str) -> CompressionPlan:
        """The plan where no quality is requested.

        Raises: InvalidRequest naming `kv_compression` or its field.
        """
        budget = Budget(
            tokens=wanted.token_budget,
            retention=wanted.retention,
            floor_tokens=wanted.min_token_budget,
        )
        if budget == Budget() and method == self._default_method:
            budget = self._default_budget
        return plan_for(method, budget=budget, overrides=wanted.parameters)

    def _method(self, wanted: KvCompression, model: ModelSpec) -> str:
        method = self.default_method(model) if wanted.method is None else wanted.method
        if method not in self.allowed:
            raise InvalidRequest(
                f"kv_compression.method is {describe(method)}; it must be one of {', '.join(self.allowed)}",
                param="kv_compression.method",
            )
        return method

    def _curve(self, method: str, model: ModelSpec) -> QualityCurve:
        curve = self._curves.find(model.fingerprint, method)
        if curve is not None:
            return curve
        if not preset(method).takes_budget:
            problem = f"was given for method {method!r}, which takes no budget"
        else:
            problem = (
                f"needs a curve of method {method!r} calibrated on this model, and there is none; give "
                "token_budget or retention, or run 'kvferry calibrate quality --model MODEL --methods "
                f"{method} --calibration DIR' and start the router with --calibration DIR"
            )
        calibrated = [name for name in self._curves.methods(model.fingerprint) if name in self.allowed]
        raise InvalidRequest(
            f"kv_compression.quality {problem} (calibrated: {', '.join(calibrated) or 'none'})",
            param="kv_compression.quality",
        )
