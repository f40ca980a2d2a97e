"""The compression plan: what a method is, as data, and what it comes to for one prompt.

A plan is scorer x layer allocation x representation x decode attention, with a budget. Named presets
live in `presets.py`; `resolve.py` turns a plan and a prompt length into a `ResolvedPlan` of exact sizes,
which router, prefill and decode each compute for themselves and which the manifest repeats. Knows neither
wire nor services.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from kvferry.shared.errors import InvalidRequest

ParamValue = int | float | bool | str
MEASURED_ALLOCATIONS = ("attention_variance",)
"""Allocations whose rows follow from every layer's attention (`compress.py`)."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How much to keep: exactly one of the fields is set, or none for methods without a budget.

    Attributes:
        tokens: rows per KV head (RocketKV: t, the rows' worth of traffic of one decode step).
        retention: fraction of the prompt kept, in (0, 1].
    """

    tokens: int | None = None
    retention: float | None = None

    def __post_init__(self) -> None:
        if self.tokens is not None and self.retention is not None:
            raise InvalidRequest("token_budget and retention exclude one another", param="kv_compression")
        if self.tokens is not None and self.tokens < 1:
            raise InvalidRequest(
                f"token_budget is {self.tokens}; it must be an integer of at least 1",
                param="kv_compression.token_budget",
            )
        if self.retention is not None and not 0.0 < self.retention <= 1.0:
            raise InvalidRequest(
                f"retention is {self.retention}; it must be in (0, 1]", param="kv_compression.retention"
            )


@dataclass(frozen=True, kw_only=True)
class Part:
    """One named part of a plan with its parameters, looked up in that part's registry."""

    name: str
    params: dict[str, ParamValue] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CompressionPlan:
    """A method as data.

    Attributes:
        method: preset name, the label in metrics and responses.
        scorer: gives each (KV head, token) a score; higher is kept. None keeps everything.
        attention: how decode attends, a name of `attention.ATTENTIONS`.
        budget: as requested; None fields fall back to the preset's.
        skip_layers: layers left uncompressed and attended densely.
        layer_allocation: how kept rows are shared between layers, a name of `allocation.ALLOCATIONS`.
        representation: how a layer's K and V travel and lie in decode's memory, a name of
            `representation.REPRESENTATIONS`.
    """

    method: str
    scorer: Part | None = None
    attention: Part = field(default_factory=lambda: Part(name="dense"))
    budget: Budget = field(default_factory=Budget)
    skip_layers: tuple[int, ...] = ()
    layer_allocation: Part = field(default_factory=lambda: Part(name="uniform"))
    representation: Part = field(default_factory=lambda: Part(name="rows", params={"wire_bits": 16}))

    @property
    def takes_budget(self) -> bool:
        """Whether a budget decides what is dropped, coarsened, or left unread by decode."""
        return self.scorer is not None or self.attention.name != "dense" or self.representation.name == "rdkv"


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """One layer of a resolved plan.

    Attributes:
        rows: prompt rows kept per KV head; of a packed layer, at most.
        attention: the kind of decode attention and its sizes; `attention.make_attention` makes it.
        representation: "rows", with `wire_bits` where the wire quantises them; or another's name and its
            parameters or sizes.
    """

    rows: int
    attention: Part = field(default_factory=lambda: Part(name="dense"))
    representation: Part = field(default_factory=lambda: Part(name="rows"))


@dataclass(frozen=True, kw_only=True)
class ResolvedPlan:
    """A plan made exact for one prompt.

    Attributes:
        method: the method in effect: "full" where the budget covers the prompt.
        num_prompt_tokens: T, history included.
        max_new_tokens: N, rows that decode may append.
        layers: one entry a layer.
    """

    plan: CompressionPlan
    method: str
    num_prompt_tokens: int
    max_new_tokens: int
    layers: tuple[LayerPlan, ...]


def is_measured(resolved: ResolvedPlan) -> bool:
    """Whether the plan needs statistics of every layer before the first can be compressed."""
    return resolved.plan.layer_allocation.name in MEASURED_ALLOCATIONS and any(
        resolved.layers[layer].rows < resolved.num_prompt_tokens for layer in sharing_layers(resolved)
    )


def sharing_layers(resolved: ResolvedPlan) -> tuple[int, ...]:
    """The layers that share rows: all but those that the plan skips."""
    return tuple(layer for layer in range(len(resolved.layers)) if layer not in resolved.plan.skip_layers)


def plan_digest(resolved: ResolvedPlan) -> str:
    """A hex digest of every size in a resolved plan: workers that hold different ones refuse each other's
    KV."""
    return hashlib.blake2b(json.dumps(asdict(resolved), sort_keys=True).encode(), digest_size=16).hexdigest()


def check_params(name: str, params: Mapping[str, ParamValue], expected: Mapping[str, type]) -> None:
    """Raises InvalidRequest unless `params` has exactly the names of `expected`, each of its type.

    Types are exact: a bool is no int, an int is no float.
    """
    if set(params) == set(expected) and all(type(params[k]) is t for k, t in expected.items()):
        return
    takes = ", ".join(f"{k} ({t.__name__})" for k, t in expected.items()) or "no parameters"
    raise InvalidRequest(f"{name} was given {dict(params)}; it takes {takes}", param="kv_compression")
