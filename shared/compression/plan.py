"""The compression plan: a method as data, and its exact sizes for one prompt.

A plan is scorer x layer allocation x format x decode attention, with a budget. Named presets are in
`presets.py`. `resolve.py` turns a plan and a prompt length into a `ResolvedPlan` of exact sizes. Decode
resolves each plan once; the ticket carries the result to prefill, and the manifest its digest. This module
does not depend on the wire or on services.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from kvferry.shared.errors import OTHER_RELEASE, InvalidRequest

ParamValue = int | float | bool | str
_Entry = TypeVar("_Entry")
METHOD_GROUP = "kvferry.methods"
"""The entry points of installed packages' methods."""
WINDOW_FORMAT = "window"
"""The format of the layers in which the model attends to a window of tokens, whatever the method."""
STATE_FORMAT = "state"
"""The format of the layers in which the model has a state, whatever the method."""
MODEL_FORMATS = (WINDOW_FORMAT, STATE_FORMAT)
"""Formats that the model decides, and no method."""
MEASURED_ALLOCATIONS = ("attention_variance",)
"""Allocations that need measurements of every layer's attention (`compress.py`)."""

REBUDGET_TOKENS = "rebudget_tokens"
"""A plan's parameter: how many generated tokens make a segment that is compacted when it is full."""

DRAFT_TOKENS = "draft_tokens"
"""A parameter of format 'rdkv': how many tokens prefill generates from the full KV before it compresses."""

MOST_DRAFT_TOKENS = 64
"""The tokens of a draft at most. All have room in memory from the first one on."""

DRAFT_KERNEL_SIZE = "draft_kernel_size"
"""A parameter of format 'rdkv': the pooling kernel of what those tokens attend to."""

RECONSTRUCTION = "reconstruction"
"""A scorer for which prefill runs the prompt once more before it compresses it (`reconstruct.py`)."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a plan may retain; neither tokens nor retention for methods without a budget.

    With both, the larger holds: long prompts retain the share, and short ones, of which the share would be a
    handful of tokens, retain `tokens`.

    Attributes:
        tokens: rows per KV head (RocketKV: t, the traffic of one decode step as a number of rows).
        retention: fraction of the prompt retained, in (0, 1].
        floor_tokens: the least `tokens` with which a worker may serve the request when it is short of memory;
            None: no less than `tokens`.
    """

    tokens: int | None = None
    retention: float | None = None
    floor_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tokens < 1:
            raise InvalidRequest(
                f"token_budget is {self.tokens}; it must be an integer of at least 1",
                param="kv_compression.token_budget",
            )
        if self.retention is not None and not 0.0 < self.retention <= 1.0:
            raise InvalidRequest(
                f"retention is {self.retention}; it must be in (0, 1]", param="kv_compression.retention"
            )
        if self.floor_tokens is not None and not 1 <= self.floor_tokens <= (self.tokens or 0):
            raise InvalidRequest(
                f"min_token_budget is {self.floor_tokens}; it must be 1 to the token_budget, which is "
                f"{self.tokens or 'not given'}",
                param="kv_compression.min_token_budget",
            )

    def smaller(self) -> tuple[Budget, ...]:
        """Return the budgets to try when this one needs too much memory: halved down to the floor."""
        if self.tokens is None or self.floor_tokens is None:
            return ()
        tokens, found = self.tokens, []
        while tokens > self.floor_tokens:
            tokens = max(tokens // 2, self.floor_tokens)
            found.append(Budget(tokens=tokens, floor_tokens=self.floor_tokens))
        return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a plan: a name in that part's registry, and parameters."""

    name: str
    params: dict[str, ParamValue] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CompressionPlan:
    """A method as data.

    Attributes:
        method: the preset's name, which labels metrics and responses.
        scorer: gives each (KV head, token) a score; the highest are selected. None: every token is selected.
        attention: decode's attention, a name of `attention.ATTENTIONS` or `attention.EVICTIONS`.
        budget: as requested; fields that are None take the preset's value.
        skip_layers: layers that are not compressed and are attended densely.
        layer_allocation: how rows are divided among layers, a name of `resolve.ALLOCATIONS`.
        representation: the format, a name of `formats.FORMATS` or of an installed method's format.
        generated: the scorer of generated tokens, with `rebudget_tokens` among its parameters
            (`formats/compacting.py`); None: all of them stay.
    """

    method: str
    scorer: Part | None = None
    attention: Part = field(default_factory=lambda: Part(name="dense"))
    budget: Budget = field(default_factory=Budget)
    skip_layers: tuple[int, ...] = ()
    layer_allocation: Part = field(default_factory=lambda: Part(name="uniform"))
    representation: Part = field(default_factory=lambda: Part(name="rows", params={"wire_bits": 16}))
    generated: Part | None = None

    @property
    def takes_budget(self) -> bool:
        """Say whether a budget decides what is dropped, quantised, or not read by decode."""
        return self.scorer is not None or self.attention.name != "dense" or self.representation.name == "rdkv"

    @property
    def repeats_prompt(self) -> bool:
        """Say whether its scorer needs the prompt's repetition, if it scores anything."""
        return self.scorer is not None and self.scorer.name == RECONSTRUCTION

    @property
    def is_exact(self) -> bool:
        """Say whether decode computes the KV of its tokens as prefill would: from every row, as it was."""
        return not self.takes_budget and self.representation == CompressionPlan(method="full").representation


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """One layer of a resolved plan.

    Attributes:
        rows: prompt rows retained per KV head; of a packed layer, the most.
        attention: the kind of decode attention and its sizes; `attention.make_attention` makes it.
        representation: the format: "rows", with `wire_bits` if they are quantised for the wire; or another
            name with its parameters or sizes.
        generated: sizes of the segments in which generated tokens are compacted; None: all of them stay.
    """

    rows: int
    attention: Part = field(default_factory=lambda: Part(name="dense"))
    representation: Part = field(default_factory=lambda: Part(name="rows"))
    generated: Part | None = None


@dataclass(frozen=True, kw_only=True)
class ResolvedPlan:
    """A plan made exact for one prompt.

    Attributes:
        method: the method in effect: "full" if no layer is compressed.
        num_prompt_tokens: T, history included.
        max_new_tokens: N, the most tokens that decode generates.
        layers: one entry per layer.
    """

    plan: CompressionPlan
    method: str
    num_prompt_tokens: int
    max_new_tokens: int
    layers: tuple[LayerPlan, ...]


def num_draft_tokens(resolved: ResolvedPlan) -> int:
    """Return how many tokens prefill drafts before it compresses a layer (`draft.py`); 0: none."""
    drafting = any(layer.representation.name == "rdkv" for layer in resolved.layers)
    return int(resolved.plan.representation.params.get(DRAFT_TOKENS, 0)) if drafting else 0


def repeats_prompt(resolved: ResolvedPlan) -> bool:
    """Say whether prefill repeats the prompt before it compresses a layer (`reconstruct.py`)."""
    return resolved.plan.repeats_prompt and resolved.method != "full"


def is_measured(resolved: ResolvedPlan) -> bool:
    """Say whether every layer must be measured before the first can be compressed."""
    return resolved.plan.layer_allocation.name in MEASURED_ALLOCATIONS and any(
        resolved.layers[layer].rows < resolved.num_prompt_tokens for layer in sharing_layers(resolved)
    )


def sharing_layers(resolved: ResolvedPlan) -> tuple[int, ...]:
    """Return the layers that share rows: those without a window or a state that the plan does not skip."""
    return tuple(
        layer
        for layer, layer_plan in enumerate(resolved.layers)
        if layer not in resolved.plan.skip_layers and layer_plan.representation.name not in MODEL_FORMATS
    )


def plan_digest(resolved: ResolvedPlan) -> str:
    """Compute a hex digest of the whole resolved plan; a worker refuses KV whose plan has another digest."""
    return hashlib.blake2b(json.dumps(asdict(resolved), sort_keys=True).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Between:
    """The numbers that a parameter may have: `low` to `high`, both included; integers if `low` is one."""

    low: float
    high: float
    odd: bool = False

    def __str__(self) -> str:
        return f"{'odd, ' if self.odd else ''}{self.low} to {self.high}"


Allowed = Mapping[str, Between | tuple[str, ...] | tuple[int, ...] | type]
"""What each parameter of a part may be: a range, one of some choices, or any value of a type."""


def read_params(name: str, params: Mapping[str, ParamValue], allowed: Allowed) -> dict[str, Any]:
    """Check that a part has exactly the parameters `allowed`, and return them in its order.

    Types are exact: a bool is not an int, an int is not a float.

    Raises: InvalidRequest: another name (OTHER_RELEASE) or type, or a value that is not allowed.
    """
    types: dict[str, type] = {}
    for key, rule in allowed.items():
        types[key] = (
            rule if isinstance(rule, type) else type(rule.low if isinstance(rule, Between) else rule[0])
        )
    if dict(zip(params, map(type, params.values()), strict=True)) != types:
        takes = ", ".join(f"{key} ({kind.__name__})" for key, kind in types.items()) or "no parameters"
        said, reason = f"was given {dict(params)}", ""
        if params.keys() != types.keys():  # clients name no others than the preset's
            differ = {"does not know": params.keys() - types.keys(), "needs": types.keys() - params.keys()}
            said = " and ".join(f"{verb} {', '.join(sorted(keys))}" for verb, keys in differ.items() if keys)
            reason = OTHER_RELEASE
        raise InvalidRequest(f"{name} {said}; it takes {takes}", param="kv_compression", reason=reason)
    for key, rule in allowed.items():
        value: Any = params[key]
        if isinstance(rule, type):
            continue
        if not isinstance(rule, Between):
            is_allowed = value in rule
        else:
            is_allowed = rule.low <= value <= rule.high and (not rule.odd or value % 2 == 1)
        if not is_allowed:
            choices = rule if isinstance(rule, Between) else f"one of {', '.join(map(str, rule))}"
            raise InvalidRequest(
                f"{key} is {params[key]!r}; for {name} it must be {choices}", param=f"kv_compression.{key}"
            )
    return dict(zip(allowed, map(params.__getitem__, allowed), strict=True))


def look_up(what: str, name: str, known: Mapping[str, _Entry]) -> _Entry:
    """Return a registry's entry. Raises: InvalidRequest: `name`, a plan's `what`, is not in it."""
    if name not in known:
        raise InvalidRequest(
            f"the plan's {what} is {name!r}; it must be one of {', '.join(known)}", param="kv_compression"
        )
    return known[name]
