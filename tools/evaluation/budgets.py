"""Budgets that mean the same bytes for every method, and the sizes that they are measured by.

A method's own budget (rows, or RocketKV's traffic per step) is solved for, so that the resulting bytes are
the most that do not exceed the target. Where a prompt's bytes are known only once it is packed, these are
bounds, and `compressor.py` goes on from them to the bytes held. Counts what a decode worker holds and reads;
allocates nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.formats.interface import LayerFormat
from kvferry.shared.compression.plan import Budget, CompressionPlan, ResolvedPlan
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.errors import ConfigurationError
from kvferry.shared.model.spec import ModelSpec

Match = Literal["kept", "read", "given"]

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_FORMS = "a share of the full KV (10% or 0.1), tokens (256t), bytes (65536B, 64KiB, 1MiB) or own"
_OWN = "own"
_REFINE = 16
"""How far around the bisection's answer, and past every budget found, others are tried: sizes are not quite
monotone, since page sizes jump and rows go from one zone to another."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """One column of a comparison.

    Attributes:
        label: as written in tables.
        kind: what the value counts: a share in (0, 1], tokens, or bytes; "own" is the method's own budget.
    """

    label: str
    kind: Literal["retention", "tokens", "bytes", "own"]
    value: Fraction

    def size_bytes(self, spec: ModelSpec, num_tokens: int) -> int:
        """Return the target for a prompt of num_tokens tokens, rounded down."""
        if self.kind == "bytes":
            return int(self.value)
        if self.kind == "tokens":
            return spec.full_bytes(int(self.value))
        return int(self.value * spec.full_bytes(num_tokens))

    def given_to(self, plan: CompressionPlan) -> CompressionPlan:
        """Return the plan with this as its budget, for comparisons that match nothing."""
        if self.kind == "own":
            return plan
        if self.kind == "retention":
            return replace(plan, budget=Budget(retention=float(self.value)))
        return replace(plan, budget=Budget(tokens=int(self.value)))


def parse_target(text: str) -> Target:
    """Read one budget. Raises ConfigurationError if it has none of the forms."""
    if text == _OWN:
        return Target(label=_OWN, kind="own", value=Fraction(0))
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(%|t|B|KiB|MiB|GiB|)", text)
    if match is None:
        raise ConfigurationError(f"--budgets has {text!r}; it takes {_FORMS}")
    number, unit = Fraction(match[1]), match[2]
    if unit in ("%", ""):
        share = number / 100 if unit else number
        if not 0 < share <= 1 or (not unit and "." not in text):
            raise ConfigurationError(f"--budgets has {text!r}; a share is 0% to 100%, and it takes {_FORMS}")
        return Target(label=f"{float(100 * share):g}%", kind="retention", value=share)
    value = number * _UNITS.get(unit, 1)
    if value < 1 or value.denominator != 1:
        raise ConfigurationError(f"--budgets has {text!r}; it must come to a whole number of at least 1")
    if unit == "t":
        return Target(label=f"{value}t", kind="tokens", value=value)
    return Target(label=f"{value}B", kind="bytes", value=value)


def kept_bytes(spec: ModelSpec, resolved: ResolvedPlan, prompt_bytes: Sequence[int | None] = ()) -> int:
    """Count the bytes kept of a prompt, kept positions included.

    Args: prompt_bytes: the bytes of each layer whose size depends on its content, None for others; empty
        counts the most that they may have.
    """
    return sum(fmt.kept_bytes(came_to) for fmt, came_to in _layers(spec, resolved, prompt_bytes))


def read_bytes(spec: ModelSpec, resolved: ResolvedPlan, prompt_bytes: Sequence[int | None] = ()) -> int:
    """Count the bytes that a decode step reads: all of the prompt, or estimates and the rows they choose."""
    return sum(fmt.read_bytes(came_to) for fmt, came_to in _layers(spec, resolved, prompt_bytes))


def _layers(
    spec: ModelSpec, resolved: ResolvedPlan, prompt_bytes: Sequence[int | None]
) -> Iterator[tuple[LayerFormat, int | None]]:
    formats = make_formats(spec, resolved)
    return zip(formats, prompt_bytes or (None,) * len(formats), strict=True)


SIZES: Mapping[Match, Callable[..., int]] = {"kept": kept_bytes, "read": read_bytes}


@lru_cache(maxsize=4096)
def _matched_tokens(
    key: _PlanKey, spec: ModelSpec, match: Match, num_tokens: int, max_new_tokens: int, size_bytes: int
) -> int | None:
    def size(tokens: int) -> int:
        plan = replace(key.plan, budget=Budget(tokens=tokens))
        resolved = resolve_plan(
            plan,
            num_prompt_tokens=num_tokens,
            max_new_tokens=max_new_tokens,
            num_layers=spec.num_layers,
            head_dim=spec.head_dim,
            layers=spec.layers,
        )
        return SIZES[match](spec, resolved)

    low, high = 0, num_tokens
    while low < high:
        middle = (low + high + 1) // 2
        if size(middle) <= size_bytes:
            low = middle
        else:
            high = middle - 1
    near = range(max(low - _REFINE, 1), num_tokens + 1)
    best = None
    for tokens in near:
        if size(tokens) <= size_bytes:
            best = tokens
        elif tokens >= (best or low) + _REFINE:
            break
    return best


@dataclass(frozen=True)
class _PlanKey:
    """A plan that hashes: parts hold dictionaries, their text decides."""

    plan: CompressionPlan

    def __hash__(self) -> int:
        return hash(repr(self.plan))


def plan_for_target(
    plan: CompressionPlan,
    target: Target,
    *,
    match: Match,
    spec: ModelSpec,
    num_tokens: int,
    max_new_tokens: int,
) -> CompressionPlan | None:
    """Find the plan with the largest budget within the target; None if even one token exceeds it.

    Args: num_tokens, max_new_tokens: of the prompt that is compressed, as for `resolve_plan`.
    """
    if match == "given":
        return target.given_to(plan)
    size_bytes = target.size_bytes(spec, num_tokens)
    tokens = _matched_tokens(_PlanKey(plan), spec, match, num_tokens, max_new_tokens, size_bytes)
    return None if tokens is None else replace(plan, budget=Budget(tokens=tokens))
