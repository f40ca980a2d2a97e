"""Hints of agents about what they do next: how long a prompt's KV is worth keeping, how urgent a request is,
and that a conversation is over. vLLM's proposed `agent_hint` and Dynamo's `nvext`.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from kvferry.services.router.http.body import ClientModel, Range

_MAX_KEEP_S = 30 * 86400
_MAX_PRIORITY = 1000
_DURATION = re.compile(r"(\d{1,9})([smhd])", re.ASCII)
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _in_seconds(value: float | str) -> float:
    if isinstance(value, str):
        if (match := _DURATION.fullmatch(value)) is None:
            raise PydanticCustomError("rule", "must be seconds, or a text such as 300s, 5m or 1h")
        value = float(int(match.group(1)) * _UNITS_S[match.group(2)])
    return min(value, _MAX_KEEP_S)


class CacheControl(ClientModel):
    type: str | None = None
    ttl: Annotated[Annotated[float, Range(0)] | str, AfterValidator(_in_seconds)] | None = None


class ContextEdit(ClientModel):
    type: str


class ContextEdits(ClientModel):
    edits: list[ContextEdit] | None = None


class AgentHint(ClientModel):
    cache_control: CacheControl | None = None
    context_management: ContextEdits | None = None


class AgentHints(ClientModel):
    """Dynamo's; the highest priority comes first."""

    priority: Annotated[int, Range(-(2**31), 2**31 - 1)] | None = None


class Nvext(ClientModel):
    agent_hints: AgentHints | None = None
    cache_control: CacheControl | None = None


class HintFields(ClientModel):
    """The fields of requests that have hints."""

    agent_hint: AgentHint | None = None
    nvext: Nvext | None = None

    @property
    def keep_s(self) -> float | None:
        """How long the prompt's KV is to be kept for one that continues it, in seconds."""
        controls = [hint.cache_control for hint in (self.agent_hint, self.nvext) if hint is not None]
        times = [float(its.ttl) for its in controls if its is not None and its.ttl is not None]
        return max(times, default=None)

    @property
    def releases(self) -> bool:
        """Whether the conversation's KV may be dropped after this turn."""
        if self.agent_hint is None or self.agent_hint.context_management is None:
            return False
        return any(edit.type == "evict" for edit in self.agent_hint.context_management.edits or ())

    @property
    def hinted_priority(self) -> int:
        """As `priority` is here, where the smallest comes first."""
        hints = self.nvext.agent_hints if self.nvext is not None else None
        given = hints.priority if hints is not None else None
        return max(-_MAX_PRIORITY, min(_MAX_PRIORITY, -(given or 0)))
