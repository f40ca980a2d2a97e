"""Tools in requests: their definitions, which may be called, and the calls of earlier answers.

Chat templates expect calls as `transformers` documents it: arguments as objects, not as JSON texts.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag, model_validator
from pydantic_core import from_json

from kvferry.services.router.http.body import ClientModel, type_of

MAX_TOOLS = 512
ToolName = Annotated[str, StringConstraints(min_length=1, max_length=256)]
CallId = Annotated[str, StringConstraints(max_length=256)]


class Function(ClientModel):
    """A function's description. `parameters` is a JSON schema; calls that the request demands follow it."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(ClientModel):
    type: Literal["function"] = "function"
    function: Function

    def for_template(self) -> dict[str, Any]:
        shown = self.function.model_dump(include={"name", "description", "parameters"}, exclude_none=True)
        return {"type": "function", "function": {"description": "", "parameters": {}, **shown}}


class LeftOut(ClientModel):
    """What the model does not get to know: a tool that the client does not run, or that takes no JSON; what
    another server did with a tool of its own, or wrote for itself."""

    type: str

    @property
    def left_out(self) -> str:
        return self.type


Tools = Annotated[
    list[
        Annotated[
            Annotated[Tool, Tag("function")] | Annotated[LeftOut, Tag("other")],
            Discriminator(lambda tool: "function" if type_of(tool) in ("function", None) else "other"),
        ]
    ],
    Field(max_length=MAX_TOOLS),
]


class NamedFunction(ClientModel):
    name: ToolName


class NamedTool(ClientModel):
    """The function that the answer must call."""

    type: Literal["function"] = "function"
    function: NamedFunction


class ToolSubset(ClientModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool | LeftOut], Field(max_length=MAX_TOOLS)]


class AllowedTools(ClientModel):
    """The tools that the answer may call, or of which it must call one; the model gets to know no others."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolSubset

    @property
    def names(self) -> set[str]:
        return {tool.function.name for tool in self.allowed_tools.tools if isinstance(tool, NamedTool)}


class CalledFunction(ClientModel):
    name: ToolName
    arguments: str | dict[str, Any] | None = None


def custom_call(name: Any, text: Any) -> dict[str, Any]:
    """Return a call of a custom tool, which takes a text, as a call of a function."""
    return {"name": name, "arguments": {"input": text}}


def read_arguments(arguments: str | dict[str, Any]) -> Any:
    """Return the arguments' value; their text, as the model wrote it, if that is not JSON."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return from_json(arguments, allow_inf_nan=False)
    except ValueError:
        return arguments


class ToolCall(ClientModel):
    """A call in an earlier answer. `arguments` are JSON; a custom tool's text is their `input`."""

    echoed = frozenset({"index"})

    id: CallId | None = None
    type: Literal["function", "custom"] = "function"
    function: CalledFunction

    @model_validator(mode="before")
    @classmethod
    def _custom(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(custom := value.get("custom"), dict):
            rest = {name: field for name, field in value.items() if name != "custom"}
            return {**rest, "function": custom_call(custom.get("name"), custom.get("input"))}
        return value

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates expect it: with the arguments as an object, if they are one."""
        function = {"name": self.function.name, "arguments": read_arguments(self.function.arguments or {})}
        return {**({"id": self.id} if self.id is not None else {}), "type": "function", "function": function}
