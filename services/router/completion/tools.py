"""Tools in requests: their definitions, which may be called, and the calls of earlier answers.

Chat templates expect calls as `transformers` documents it: arguments as objects, not as JSON texts.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import StringConstraints
from pydantic_core import from_json

from kvferry.services.router.http.body import Ignored, StrictModel, Unsupported

ToolName = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class Function(StrictModel):
    """A function's description. `parameters` is a JSON schema; calls that the request demands follow it."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Ignored = None
    defer_loading: Annotated[Any, Unsupported(False)] = None


class Tool(StrictModel):
    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        shown = self.function.model_dump(include={"name", "description", "parameters"}, exclude_none=True)
        return {"type": "function", "function": {"description": "", "parameters": {}, **shown}}


class NamedFunction(StrictModel):
    name: ToolName


class NamedTool(StrictModel):
    """The function that the answer must call."""

    type: Literal["function"] = "function"
    function: NamedFunction


class CalledFunction(StrictModel):
    name: ToolName
    arguments: str | dict[str, Any] | None = None


def read_arguments(arguments: str | dict[str, Any]) -> Any:
    """The arguments' value; their text, as the model wrote it, where that is no JSON."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return from_json(arguments, allow_inf_nan=False)
    except ValueError:
        return arguments


class ToolCall(StrictModel):
    """A call in an earlier answer. `arguments` are JSON."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Ignored = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: with the arguments as an object, where they are one."""
        function = {"name": self.function.name, "arguments": read_arguments(self.function.arguments or {})}
        return {**({"id": self.id} if self.id is not None else {}), "type": "function", "function": function}
