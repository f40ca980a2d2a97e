"""Every method's layers through a format's whole life: compressed, received into the arena, opened, attended
step by step as the naive code attends; and what a sender may announce."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kvtest.compression import NOT_WRITTEN, Placed, compress_layer, formats_for, make_inputs
from kvtest.methods import PRESETS
from torch import Tensor

from kvferry.baselines.think import Think
from kvferry.shared.cache.arena import header_of
from kvferry.shared.compression.applicable import applicable_methods
from kvferry.shared.compression.formats import FORMATS
from kvferry.shared.compression.formats.evicting import Evicting
from kvferry.shared.compression.formats.interface import InvalidTensors, LayerFormat
from kvferry.shared.compression.formats.rdkv import PackedSegments, Rdkv
from kvferry.shared.compression.formats.rows import Rows, WireRows
from kvferry.shared.compression.formats.state import State
from kvferry.shared.compression.formats.stored import StoredCache
from kvferry.shared.compression.formats.window import Window
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.model.spec import LayerSpec
from kvferry.tools.oracle_decode import naive_layer

BUDGET, NEW_TOKENS = 41, 45
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in PRESETS},
    "rdkv, segments": ("rdkv", {"rebudget_tokens": 20, "window": 7}),
    "compactor-rdkv, segments": ("compactor-rdkv", {"rebudget_tokens": 20, "window": 7}),
    **{
        f"{method}, segments": (method, {"rebudget_tokens": 20, **overrides})
        for method, overrides in (
            *((name, {"window": 7}) for name in ("snapkv", "rocketkv", "pyramidkv", "adakv")),
            *((name, {"window": 25}) for name in ("rocketkv-kivi", "snapkv-think", "snapkv-kivi")),
            *((name, {}) for name in ("compactor", "compactor-hsa", "compactor-kivi", "streamingllm")),
        )
    },
    "kivi, 2 bits": ("kivi", {"bits": 2}),
    "compactor-kivi, K4V2": ("compactor-kivi", {"v_bits": 2}),
    "snapkv, wire": ("snapkv", {"wire_bits": 4}),
    "full, wire": ("full", {"wire_bits": 8}),
    "sliding window": ("snapkv", {}),
    "chunks": ("full", {}),
}
LATENT_DIM = 23
LAYERS = {
    "sliding window": LayerSpec(window=29),
    "chunks": LayerSpec(window=29, is_chunked=True),
    "latent window": LayerSpec(window=29, latent_dim=LATENT_DIM),
}
"""The layer of a case, if it does not attend to all tokens."""
_LATENT = LayerSpec(latent_dim=LATENT_DIM)
for _name in (
    *applicable_methods((_LATENT,)),
    *(f"{method}, segments" for method in ("snapkv", "rocketkv", "adakv", "snapkv-kivi", "compactor")),
    *("kivi, 2 bits", "snapkv, wire", "full, wire"),
):
    CASES[f"latent {_name}"] = CASES[_name]
    LAYERS[f"latent {_name}"] = _LATENT
CASES["latent window"] = ("snapkv", {})
STORED = tuple(
    f"{prefix}{name}"
    for prefix in ("", "latent ")
    for name in (
        "adakv",
        "think",
        "snapkv-think",
        "kivi",
        "kivi, 2 bits",
        "snapkv-kivi",
        "snapkv, wire",
        "full, wire",
    )
    if f"{prefix}{name}" in CASES
)


def compressed(
    case: str,
    num_tokens: int,
    *,
    group_size: int = 2,
    head_dim: int = 31,
    dtype: torch.dtype = torch.float32,
) -> tuple[LayerFormat, dict[str, Tensor], LayerInputs]:
    """A layer of its method, in a prompt of an odd size."""
    method, overrides = CASES[case]
    budget = Budget(tokens=BUDGET) if PRESETS[method].takes_budget else None
    resolved = resolve_plan(
        plan_for(method, budget=budget, overrides=overrides),
        num_prompt_tokens=num_tokens,
        max_new_tokens=NEW_TOKENS,
        num_layers=1,
        head_dim=head_dim,
        layers=(LAYERS.get(case, LayerSpec()),),
    )
    inputs = make_inputs(
        num_tokens,
        group_size=group_size,
        head_dim=head_dim,
        latent_dim=LAYERS.get(case, LayerSpec()).latent_dim,
        dtype=dtype,
        seed=num_tokens + group_size,
    )
    (fmt,) = formats_for(resolved, inputs, returns_generated=True)
    return fmt, dict(compress_layer(resolved, inputs)), inputs


def random_row(fmt: LayerFormat) -> tuple[Tensor, Tensor]:
    """A token's key and value."""
    key, value = torch.randn(2, fmt.shape.num_kv_heads, fmt.shape.head_dim)
    return key, (key if fmt.shape.latent_dim else value)[:, : fmt.shape.value_dim]


def assert_attends_as_naive(fmt: LayerFormat, tensors: dict[str, Tensor], *, steps: int) -> None:
    """Every step of the layer in the arena equals the naive one, and what was generated comes back whole."""
    shape, placed = fmt.shape, Placed.of(fmt)
    cache, naive = placed.open(tensors), naive_layer(fmt, tensors)
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(2, shape.num_kv_heads, steps, shape.head_dim, generator=generator).to(shape.dtype)
    keys, values = rows[0], (rows[0] if shape.latent_dim else rows[1])[..., : shape.value_dim]
    tolerance = 1e-5 if shape.dtype is torch.float32 else 2e-2
    for step in range(steps):
        queries = torch.randn(shape.num_kv_heads, shape.group_size, shape.head_dim, generator=generator)
        queries = queries.to(shape.dtype)
        key, value = keys[:, step], values[:, step]
        assert cache.used_bytes(step) <= placed.layout_bytes
        output = cache.append_and_attend(queries, key, value, num_appended=step, scaling=0.2)
        expected = naive.attend(queries, key, value, scaling=0.2)
        assert output.shape == (shape.num_kv_heads, shape.group_size, shape.value_dim)
        torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)
    assert cache.used_bytes(steps) <= placed.layout_bytes
    for generated, expected in zip(cache.generated_rows(steps), (keys, values), strict=True):
        assert torch.equal(generated, expected)
    assert (placed.buffer[placed.layout_bytes :] == NOT_WRITTEN).all()


@pytest.mark.covering(2)
@pytest.mark.parametrize("group_size", [1, 3])
@pytest.mark.parametrize("num_tokens", [97, 203])
@pytest.mark.parametrize("case", CASES)
def test_a_layer_in_the_arena_attends_as_the_naive_one(case: str, num_tokens: int, group_size: int) -> None:
    fmt, tensors, _ = compressed(case, num_tokens, group_size=group_size)
    if case == "rdkv, segments":
        assert isinstance(fmt.segments, PackedSegments)
        assert fmt.segments.max_segments == 2
    assert_attends_as_naive(fmt, tensors, steps=NEW_TOKENS - 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        *("full", "rdkv", "kivi", "compactor-kivi", "rocketkv-kivi", "think", "adakv", "snapkv, wire"),
        *("latent full", "latent d2o", "latent kivi", "latent snapkv, wire", "latent sparq"),
    ],
)
def test_half_precision_attends_as_the_naive_one(case: str, dtype: torch.dtype) -> None:
    fmt, tensors, _ = compressed(case, 97, head_dim=32, dtype=dtype)
    assert_attends_as_naive(fmt, tensors, steps=5)


@pytest.mark.parametrize("num_tokens", [1, 2, 40])
@pytest.mark.parametrize("case", CASES)
def test_a_prompt_within_the_budget_attends_as_the_naive_one(case: str, num_tokens: int) -> None:
    fmt, tensors, _ = compressed(case, num_tokens)
    assert_attends_as_naive(fmt, tensors, steps=3)


@pytest.mark.parametrize("case", CASES)
def test_a_fork_attends_as_what_it_was_forked_from_and_grows_by_itself(case: str) -> None:
    fmt, tensors, _ = compressed(case, 97)
    first = naive_layer(fmt, tensors)
    queries, (key, value) = torch.randn(2, 2, 31), random_row(fmt)
    first.attend(queries, key, value, scaling=0.2)
    second, third = first.fork(), first.fork()
    second.attend(queries, -key, 3 * value, scaling=0.2)
    row = random_row(fmt)
    expected = third.attend(queries, *row, scaling=0.2)
    assert torch.equal(first.attend(queries, *row, scaling=0.2), expected)


@pytest.mark.parametrize("case", CASES)
def test_a_token_without_room_is_refused(case: str) -> None:
    fmt, tensors, _ = compressed(case, 97)
    cache = Placed.of(fmt).open(tensors)
    with pytest.raises((IndexError, ValueError)):
        cache.append_and_attend(
            torch.randn(2, 2, 31),
            *random_row(fmt),
            num_appended=NEW_TOKENS - 1,
            scaling=0.2,
        )


@pytest.mark.parametrize("case", CASES)
def test_tensors_are_those_that_the_format_names_in_their_order(case: str) -> None:
    fmt, tensors, _ = compressed(case, 97)
    assert set(tensors) <= set(fmt.kinds)
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    header = header_of(tensors)
    if isinstance(fmt, Rdkv):  # the packed parts follow from the prompt
        header = {"layout": header["layout"]}
    assert list(fmt.tensors().items()) == list(header.items())
    places = fmt.receive(header_of(tensors), Placed.of(fmt).regions)
    assert list(header_of(places).items()) == list(header_of(tensors).items())


@pytest.mark.parametrize("case", STORED)
def test_a_stored_layer_lies_in_the_arena_bit_for_bit(case: str) -> None:
    fmt, tensors, _ = compressed(case, 97)
    placed = Placed.of(fmt)
    cache = placed.open(tensors)
    new_rows = [placed.regions[name][:, placed.num_prompt_rows :] for name in fmt.shape.row_names]
    assert len(new_rows) == (1 if fmt.shape.latent_dim else 2)
    assert all(rows.shape[1] == NEW_TOKENS - 1 for rows in new_rows)
    assert all(rows.isnan().all() for rows in new_rows)
    if isinstance(cache, StoredCache):
        received = cache.prompt
        assert list(received) == list(tensors)
        assert all(torch.equal(received[name], tensor) for name, tensor in tensors.items())
        assert all(placed.holds(tensor) for tensor in received.values())


@pytest.mark.parametrize("case", STORED)
@pytest.mark.parametrize("name", ["head_rows", "index", "channels", "scales"])
def test_what_prefill_never_makes_is_refused(case: str, name: str) -> None:
    """Counts, positions, channels and scales of all ones: negative or NaN."""
    fmt, tensors, _ = compressed(case, 97)
    if name not in tensors:
        assert name not in fmt.tensors()
        return
    tensors[name] = torch.full_like(tensors[name].view(torch.uint8), 0xFF).view(tensors[name].dtype)
    with pytest.raises(InvalidTensors) as caught:
        Placed.of(fmt).open(tensors)
    assert caught.value.reason == "packed"


def wrong_headers(header: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Headers that no such layer has."""
    name = next(iter(header))
    spec = header[name]
    wrong = {
        "missing": {n: s for n, s in header.items() if n != name},
        "one more": {**header, "more": spec},
        "another name": {("other" if n == name else n): s for n, s in header.items()},
        "another order": dict(reversed(header.items())),
        "larger": {**header, name: replace(spec, shape=(*spec.shape[:-1], spec.shape[-1] + 1))},
        "another rank": {**header, name: replace(spec, shape=(*spec.shape, 1))},
        "no shape": {**header, name: replace(spec, shape=())},
        "another dtype": {**header, name: replace(spec, dtype=torch.float64)},
        "none": {},
    }
    if len(header) == 1:
        del wrong["another order"]
    return wrong


@pytest.mark.parametrize("case", CASES)
def test_other_tensors_than_the_layers_are_refused_before_their_bytes(case: str) -> None:
    fmt, tensors, _ = compressed(case, 97)
    placed = Placed.of(fmt)
    for what, header in wrong_headers(header_of(tensors)).items():
        with pytest.raises(InvalidTensors, match="expected") as caught:
            fmt.receive(header, placed.regions)
        assert caught.value.reason == "layer_header", what
    assert (placed.buffer == NOT_WRITTEN).all()


def test_every_format_and_every_eviction_is_among_the_cases() -> None:
    """All but a state, which has no rows: `tests/services/test_states.py`."""
    made = [compressed(case, 97)[0] for case in CASES]
    assert {type(fmt) for fmt in made} == {*FORMATS.values(), Evicting, Think, WireRows} - {State}
    compacted = {type(fmt) for fmt in made if fmt.segments is not None}
    assert compacted == {fmt for fmt in (*FORMATS.values(), Think) if fmt.compacts} | {Rdkv}
    assert {fmt.attention for fmt in made if isinstance(fmt, Evicting)} == {"evict", "merge"}
    plain = [type(fmt) in (Rows, Window) and fmt.segments is None for fmt in made]
    assert [fmt.is_plain for fmt in made] == plain
