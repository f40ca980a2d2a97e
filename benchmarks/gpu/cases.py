"""The kernels at the shapes of real models: what to launch, what it must equal, and what it reads.

One `Case` is one kernel at one shape. `__main__` runs it on a GPU, checks it in the interpreter at tiny
shapes, or compiles it for a GPU that is not there, all from the same call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvferry.kernels import attention_mass, dispatch
from kvferry.kernels.chunk_scores import triton_kernel as chunk_scores
from kvferry.kernels.chunk_scores.torch_path import chunk_scores_torch
from kvferry.kernels.dense_decode import triton_kernel as dense_decode
from kvferry.kernels.hsa import triton_kernel as hsa
from kvferry.kernels.hsa.descriptors import hsa_scratch
from kvferry.kernels.packed import PackedLayer, pack_layer, unpack_layer, view_packed_layer
from kvferry.kernels.packed import triton_kernel as pack
from kvferry.kernels.split_workspace import choose_num_splits, split_workspace
from kvferry.kernels.trizone import triton_kernel as trizone
from kvferry.kernels.trizone.work_list import balanced_item_bytes, work_list
from kvferry.kernels.window_scores.torch_path import window_scores_torch

Device = torch.device


@dataclass(frozen=True, kw_only=True)
class Model:
    """Attention shape of a model."""

    name: str
    num_kv_heads: int
    group_size: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16


MODELS = (
    Model(name="Llama-3.1-8B", num_kv_heads=8, group_size=4, head_dim=128),
    Model(name="Qwen3-8B", num_kv_heads=8, group_size=4, head_dim=128),
    Model(name="Mistral-7B", num_kv_heads=8, group_size=4, head_dim=128),
)
TINY = (
    Model(name="tiny-16", num_kv_heads=2, group_size=3, head_dim=64, dtype=torch.float16),
    Model(name="tiny-32", num_kv_heads=1, group_size=4, head_dim=96, dtype=torch.float32),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel at one shape.

    Attributes:
        row: its row in the table of targets.
        target: fraction of the copy bandwidth that is aimed at, None where the aim is a time.
        target_us: microseconds aimed at, None where the aim is a fraction.
        num_bytes: what one run must read and write at least.
        flops: multiplications and additions of one run, for a row whose aim is arithmetic.
        launch: runs it once and returns its output.
        expected: the reference of that output, float32.
        tolerance: allowed norm of the difference, relative to the reference's norm.
        kernels: the Triton kernels that `launch` launches.
        captured: whether a CUDA graph can hold it; else its time has the host's in it.
    """

    row: int
    kernel: str
    model: str
    shape: str
    num_bytes: int
    launch: Callable[[], Tensor]
    expected: Callable[[], Tensor]
    tolerance: float
    kernels: tuple[Any, ...]
    target: float | None = None
    target_us: float | None = None
    flops: int = 0
    captured: bool = True


def tolerance_of(dtype: torch.dtype) -> float:
    """float32 rounds in its sums only; 16 bits round probabilities and outputs."""
    return {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]


def attend_all(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Plain softmax attention in float32. Args: `[H, G, D]`, `[H, n, D]`, `[H, n, D]`."""
    return torch.softmax(scaling * (queries.float() @ keys.float().mT), dim=-1) @ values.float()


def dense_case(
    model: Model, *, batch_size: int, length: int, device: Device, seed: int, target: float | None,
    target_us: float | None = None,
) -> Case:  # fmt: skip
    """Row 1: dense decode over ragged sequences of about `length` rows in one arena."""
    generator = torch.Generator(device).manual_seed(seed)
    heads, group, head_dim = model.num_kv_heads, model.group_size, model.head_dim
    lengths = [max(length - 7 * i, 1) for i in range(batch_size)]
    arena = torch.randn(batch_size, heads, 2, length, head_dim, generator=generator, device=device)
    arena = arena.to(model.dtype)
    queries = torch.randn(batch_size, heads, group, head_dim, generator=generator, device=device)
    queries = queries.to(model.dtype)
    step = length * head_dim
    table = torch.tensor(
        [(2 * i * step, (2 * i + 1) * step, lengths[i // heads]) for i in range(batch_size * heads)],
        device=device,
    )
    splits = choose_num_splits(batch_size * heads, device)
    workspace = split_workspace(
        num_heads=batch_size * heads,
        num_slots=batch_size * heads * splits,
        group_size=group,
        head_dim=head_dim,
        device=device,
    )
    output = torch.full_like(queries, torch.nan)
    flat = arena.view(-1)

    def launch() -> Tensor:
        dense_decode.dense_decode_batch(
            queries,
            flat,
            flat,
            table,
            row_stride=head_dim,
            scaling=head_dim**-0.5,
            workspace=workspace,
            num_splits=splits,
            output=output,
        )
        return output

    def expected() -> Tensor:
        return torch.stack(
            [
                attend_all(queries[b], arena[b, :, 0, :n], arena[b, :, 1, :n], head_dim**-0.5)
                for b, n in enumerate(lengths)
            ]
        )

    return Case(
        row=1,
        kernel="dense_decode",
        model=model.name,
        shape=f"B={batch_size} n={length}",
        num_bytes=2 * heads * head_dim * sum(lengths) * arena.element_size(),
        launch=launch,
        expected=expected,
        tolerance=tolerance_of(model.dtype),
        kernels=(dense_decode._dense_decode_kernel,),
        target=target,
        target_us=target_us,
    )


def hsa_case(
    model: Model, *, batch_size: int, length: int, page_size: int, num_channels: int, num_tokens: int,
    device: Device, seed: int, target: float | None, target_us: float | None = None,
) -> Case:  # fmt: skip
    """Rows 2 to 4: append, score pages, select, attend. Selection is checked by what is attended to.

    The scores of pages are far apart (each page has a level of its own), so that rounding chooses no other
    page than the reference does.
    """
    generator = torch.Generator(device).manual_seed(seed)
    group, head_dim, num_heads = model.group_size, model.head_dim, batch_size * model.num_kv_heads
    num_pages = -(-length // page_size)
    padded = -(-num_pages // 8) * 8
    step = length * head_dim
    size = 2 * step + 2 * head_dim * padded
    arena = torch.zeros(num_heads, size, device=device, dtype=model.dtype)
    queries = torch.randn(num_heads, group, head_dim, generator=generator, device=device).to(model.dtype)
    rows = torch.randn(num_heads, 2, length, head_dim, generator=generator, device=device).to(model.dtype)
    direction = queries.float().mean(1, keepdim=True)
    levels = torch.rand(num_heads, num_pages, 1, generator=generator, device=device).sort(dim=1).values
    levels = levels.gather(1, torch.rand(levels.shape, generator=generator, device=device).argsort(1))
    rows[:, 0] = (
        rows[:, 0].float() * 0.05 + (6 * levels * direction).repeat_interleave(page_size, 1)[:, :length]
    ).to(model.dtype)
    arena[:, : 2 * step] = rows.flatten(1)
    filled = torch.full((num_heads, padded * page_size, head_dim), -torch.inf, device=device)
    filled[:, :length] = rows[:, 0].float()
    highest = filled.view(num_heads, padded, page_size, head_dim).amax(2)
    filled[:, length:] = torch.inf
    lowest = filled.view(num_heads, padded, page_size, head_dim).amin(2)
    arena[:, 2 * step : 2 * step + head_dim * padded] = highest.mT.flatten(1).to(model.dtype)
    arena[:, 2 * step + head_dim * padded :] = lowest.mT.flatten(1).to(model.dtype)
    table = torch.tensor(
        [
            (
                h * size, h * size + step, length,
                h * size + 2 * step, h * size + 2 * step + head_dim * padded, padded,
                page_size, num_channels, num_tokens,
            )
            for h in range(num_heads)
        ],
        device=device,
    )  # fmt: skip
    splits = choose_num_splits(num_heads, device)
    scratch = hsa_scratch(
        num_heads=num_heads,
        group_size=group,
        head_dim=head_dim,
        max_pages=padded,
        max_tokens=min(num_tokens, length),
        num_splits=splits,
        device=device,
    )
    shape = (batch_size, model.num_kv_heads)
    output = torch.full((*shape, group, head_dim), torch.nan, device=device, dtype=model.dtype)
    new_keys, new_values = (rows[:, i, -1].reshape(*shape, head_dim).contiguous() for i in range(2))

    def launch() -> Tensor:
        hsa.append_and_attend_batch(
            queries.view(*shape, group, head_dim),
            arena.view(-1),
            table,
            max_channels=num_channels,
            page_stride=1,
            scaling=head_dim**-0.5,
            scratch=scratch,
            num_splits=splits,
            output=output,
            new_keys=new_keys,
            new_values=new_values,
        )
        return output.flatten(0, 1)

    def expected() -> Tensor:
        # exact attention to the rows that the kernel chose; the choice itself is compared below
        chosen = scratch.tokens.long()
        at = torch.arange(num_heads, device=device)[:, None]
        reference = hsa_reference_pages(queries, highest, lowest, num_pages, num_channels)
        check_selection(reference, chosen, length=length, page_size=page_size)
        return attend_all(queries, rows[at, 0, chosen], rows[at, 1, chosen], head_dim**-0.5)

    element = arena.element_size()
    return Case(
        row=4,
        kernel="hsa",
        model=model.name,
        shape=f"B={batch_size} n={length} P={page_size} k1={num_channels} k2={num_tokens}",
        num_bytes=num_heads * element * (num_pages * num_channels + 2 * min(num_tokens, length) * head_dim),
        launch=launch,
        expected=expected,
        tolerance=tolerance_of(model.dtype),
        kernels=(hsa._score_pages_kernel, hsa._select_tokens_kernel, hsa._gather_attend_kernel),
        target=target,
        target_us=target_us,
    )


def hsa_reference_pages(
    queries: Tensor, highest: Tensor, lowest: Tensor, num_pages: int, num_channels: int
) -> Tensor:
    """Softmax over pages, mean over the group, float32 `[H, num_pages]`; see RocketKV's Algorithm 1."""
    q = queries.float()
    head_dim = q.shape[2]
    channels = q.abs().sum(1).sort(dim=-1, descending=True, stable=True).indices[:, :num_channels]
    kept = torch.zeros_like(q[:, 0]).scatter_(1, channels, 1.0)[:, None]
    estimate = torch.where(q.sum(1, keepdim=True) >= 0, highest[:, :num_pages], lowest[:, :num_pages])
    temperature = (head_dim * (q * kept).abs().sum(-1) / q.abs().sum(-1)).sqrt()[..., None]
    return (((q * kept) @ estimate.mT) / temperature).softmax(-1).mean(1)


def check_selection(scores: Tensor, chosen: Tensor, *, length: int, page_size: int) -> None:
    """Raises AssertionError where a page left out scores clearly higher than one taken."""
    pages = chosen[:, :-1] // page_size
    inside = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, pages, True)
    lowest_in = torch.where(inside, scores, torch.inf).amin(1)
    highest_out = torch.where(inside, -torch.inf, scores).amax(1)
    assert bool((chosen[:, -1] == length - 1).all()), "the newest token is not the last one chosen"
    assert bool((highest_out <= lowest_in * (1 + 2e-2) + 1e-7).all()), "a better page was left out"


def trizone_case(
    model: Model, *, batch_size: int, kept: int, new: int, device: Device, seed: int, target: float | None,
    target_us: float | None = None,
) -> Case:  # fmt: skip
    """Row 7: zones A, B and C of ragged heads, K and V at 2 and 4 bits with some at 8 and 16."""
    generator = torch.Generator(device).manual_seed(seed)
    heads, group, head_dim = model.num_kv_heads, model.group_size, model.head_dim
    widths = torch.tensor([0, 2, 2, 2, 4, 4, 8, 16], dtype=torch.uint8, device=device)
    one = packed_layer(generator, widths, heads, kept, head_dim, device)
    # every sequence has bytes of its own; packing one is slow enough
    size = one.layout.size_bytes
    codes = one.buffer.repeat(batch_size)
    layers = [[view_packed_layer(one.layout, codes[b * size : (b + 1) * size])] for b in range(batch_size)]
    rows = torch.randn(batch_size, heads, 2, new, head_dim, generator=generator, device=device)
    rows = rows.to(model.dtype)
    table = torch.tensor(
        [(2 * i * new * head_dim, (2 * i + 1) * new * head_dim, new) for i in range(batch_size * heads)],
        device=device,
    )
    programs = 4 * choose_num_splits(1, device) if device.type == "cuda" else 8
    work = work_list(layers, codes, row_splits=1, item_bytes=balanced_item_bytes(layers, programs))
    queries = torch.randn(batch_size, heads, group, head_dim, generator=generator, device=device)
    queries = queries.to(model.dtype)
    num_entries, block_d = work.entries.shape[0], 1 << (head_dim - 1).bit_length()
    scaled = torch.empty(num_entries, 16, block_d, dtype=torch.float16, device=device)
    statistics = torch.empty(num_entries, 16, trizone.STATISTICS, device=device)
    workspace = split_workspace(
        num_heads=batch_size * heads,
        num_slots=work.items.shape[0],
        group_size=group,
        head_dim=head_dim,
        device=device,
    )
    output = torch.full_like(queries, torch.nan)

    def launch() -> Tensor:
        trizone.trizone_decode_batch(
            queries,
            rows.view(-1),
            rows.view(-1),
            table,
            codes,
            work,
            row_stride=head_dim,
            scaling=head_dim**-0.5,
            scaled=scaled,
            statistics=statistics,
            workspace=workspace,
            output=output,
        )
        return output

    def expected() -> Tensor:
        inflated = unpack_layer(one)
        return torch.stack(
            [
                torch.cat(
                    [
                        attend_all(
                            queries[b, h][None],
                            torch.cat([keys, rows[b, h, 0].float()])[None],
                            torch.cat([values, rows[b, h, 1].float()])[None],
                            head_dim**-0.5,
                        )
                        for h, (keys, values, _) in enumerate(inflated)
                    ]
                )
                for b in range(batch_size)
            ]
        )

    return Case(
        row=7,
        kernel="trizone",
        model=model.name,
        shape=f"B={batch_size} kept={kept} new={new}",
        num_bytes=batch_size * size + rows.numel() * rows.element_size(),
        launch=launch,
        expected=expected,
        tolerance=max(2e-3, tolerance_of(model.dtype)),
        kernels=(trizone._prologue_kernel, trizone._trizone_kernel),
        target=target,
        target_us=target_us,
    )


def packed_layer(
    generator: torch.Generator, widths: Tensor, heads: int, kept: int, head_dim: int, device: Device
) -> PackedLayer:
    """Random K and V at random widths."""
    keys, values = torch.randn(2, heads, kept, head_dim, generator=generator, device=device)
    bits = [
        widths[torch.randint(len(widths), (heads, count), generator=generator, device=device)]
        for count in (head_dim, kept)
    ]
    return pack_layer(keys, values, *bits)


def window_case(
    model: Model, *, window: int, length: int, device: Device, seed: int, target: float | None
) -> Case:
    """Row 5: window scores of one prompt."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (model.num_kv_heads, model.group_size, window, model.head_dim)
    queries = torch.randn(shape, generator=generator, device=device).to(model.dtype)
    keys = torch.randn(model.num_kv_heads, length, model.head_dim, generator=generator, device=device)
    keys = keys.to(model.dtype)
    scaling = model.head_dim**-0.5
    return Case(
        row=5,
        kernel="window_scores",
        model=model.name,
        shape=f"T={length} W={window}",
        num_bytes=2 * keys.numel() * keys.element_size() + model.num_kv_heads * length * 4,
        launch=lambda: attention_mass.attention_mass(queries, keys, scaling=scaling, per_query_head=False),
        expected=lambda: window_scores_torch(queries, keys, scaling),
        tolerance=1e-3,
        kernels=(attention_mass._row_lse_kernel, attention_mass._column_sums_kernel),
        target=target,
    )


def pack_case(model: Model, *, length: int, device: Device, seed: int, target: float | None) -> Case:
    """Row 6: ranges, codes and packing of one prompt's layer, byte by byte as the torch path's."""
    generator = torch.Generator(device).manual_seed(seed)
    widths = torch.tensor([0, 2, 2, 2, 4, 4, 8, 16], dtype=torch.uint8, device=device)
    shape = (model.num_kv_heads, length, model.head_dim)
    keys, values = torch.randn(2, *shape, generator=generator, device=device).to(model.dtype)
    bits = [
        widths[torch.randint(len(widths), (model.num_kv_heads, count), generator=generator, device=device)]
        for count in (model.head_dim, length)
    ]
    dispatch.configure("torch", device)
    packed = pack_layer(keys, values, *bits)
    dispatch.configure("auto", device)
    expected = packed.buffer.float()
    # the index stays, all else is written anew
    start, _ = packed.layout.kinds["index"]
    packed.buffer[:start] = 0

    def launch() -> Tensor:
        pack.fill(packed, keys, values)
        return packed.buffer

    return Case(
        row=6,
        kernel="pack",
        model=model.name,
        shape=f"T={length}",
        # K is read for its ranges and again for its codes
        num_bytes=3 * keys.numel() * keys.element_size() + packed.layout.size_bytes,
        launch=launch,
        expected=lambda: expected,
        tolerance=1e-3,
        kernels=(pack._key_ranges_kernel, pack._pack_keys_kernel, pack._pack_values_kernel),
        target=target,
        captured=False,
    )


def chunk_case(model: Model, *, chunk: int, length: int, device: Device, seed: int) -> Case:
    """Row 8: Compactor's column sums, bound by arithmetic: four products of Q and K."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (model.num_kv_heads, model.group_size, length, model.head_dim)
    queries = torch.randn(shape, generator=generator, device=device).to(model.dtype)
    keys = torch.randn(shape[0], length, model.head_dim, generator=generator, device=device).to(model.dtype)
    scaling = model.head_dim**-0.5
    return Case(
        row=8,
        kernel="chunk_scores",
        model=model.name,
        shape=f"T={length} chunk={chunk}",
        num_bytes=(queries.numel() + keys.numel()) * keys.element_size(),
        flops=4 * queries.numel() * chunk,
        launch=lambda: chunk_scores.chunk_scores(
            queries, keys, chunk_tokens=chunk, scaling=scaling, shared=False
        ),
        expected=lambda: chunk_scores_torch(queries, keys, chunk, scaling),
        tolerance=1e-3,
        kernels=(chunk_scores._chunk_scores_kernel,),
        target=0.40,
    )


def tiny_cases(device: Device, seed: int) -> list[Case]:
    """Every kernel at shapes that the interpreter gets through."""
    small, other = TINY
    return [
        dense_case(small, batch_size=2, length=70, device=device, seed=seed, target=None),
        hsa_case(
            other,
            batch_size=1,
            length=50,
            page_size=3,
            num_channels=20,
            num_tokens=13,
            device=device,
            seed=seed,
            target=None,
        ),
        trizone_case(small, batch_size=1, kept=150, new=3, device=device, seed=seed, target=None),
        window_case(other, window=5, length=40, device=device, seed=seed, target=None),
        pack_case(small, length=20, device=device, seed=seed, target=None),
        chunk_case(small, chunk=20, length=33, device=device, seed=seed),
    ]


def gpu_cases(device: Device, seed: int, model: Model) -> list[Callable[[], Case]]:
    """The rows of the table of targets at one model's shapes, made one at a time: some take gigabytes."""

    def dense(batch_size: int, length: int, target: float | None, us: float | None = None) -> Case:
        return dense_case(
            model, batch_size=batch_size, length=length, device=device, seed=seed, target=target, target_us=us
        )

    def sparse(batch_size: int, length: int, target: float | None, us: float | None = None) -> Case:
        return hsa_case(
            model, batch_size=batch_size, length=length, page_size=4, num_channels=model.head_dim // 2,
            num_tokens=length // 8, device=device, seed=seed, target=target, target_us=us,
        )  # fmt: skip

    def packed(batch_size: int, target: float | None, us: float | None = None) -> Case:
        return trizone_case(
            model, batch_size=batch_size, kept=4096, new=64, device=device, seed=seed, target=target,
            target_us=us,
        )  # fmt: skip

    return [
        lambda: dense(32, 4096, 0.85),
        lambda: dense(1, 131072, 0.80),
        lambda: dense(1, 4096, None, 10.0),
        lambda: sparse(64, 8192, 0.65),
        lambda: sparse(1, 8192, None, 12.0),
        lambda: packed(64, 0.60),
        lambda: packed(8, None, 16.0),
        lambda: packed(1, None, 10.0),
        lambda: window_case(model, window=32, length=131072, device=device, seed=seed, target=0.50),
        lambda: pack_case(model, length=32768, device=device, seed=seed, target=0.60),
        lambda: chunk_case(model, chunk=512, length=32768, device=device, seed=seed),
    ]
