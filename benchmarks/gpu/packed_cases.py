"""Rows 6 and 7: packing, and attention to what is packed."""

from __future__ import annotations

import torch
from case import Case, Device, Model, tolerance_of
from torch import Tensor

from kvferry.kernels import dispatch
from kvferry.kernels.descriptors import programs_at_once
from kvferry.kernels.knapsack import take_increments_torch
from kvferry.kernels.knapsack import triton_kernel as knapsack
from kvferry.kernels.packed import check_kernel
from kvferry.kernels.packed import triton_kernel as pack
from kvferry.kernels.packed.check import BAD_POSITIONS
from kvferry.kernels.packed.layer import PackedLayer, view_packed_layer
from kvferry.kernels.packed.layout import Bound
from kvferry.kernels.packed.packing import pack_layer
from kvferry.kernels.packed.packing_kernels import (
    _pack_keys_kernel,
    _pack_values_kernel,
    _refuse_kernel,
)
from kvferry.kernels.packed.placing_kernels import _count_widths_kernel, _index_kernel, _place_kernel
from kvferry.kernels.trizone import torch_path
from kvferry.kernels.trizone import triton_kernel as trizone
from kvferry.kernels.trizone.batch import FEW_SLOTS, MANY_SLOTS
from kvferry.kernels.trizone.scaled_queries import _prologue_kernel
from kvferry.kernels.trizone.work_list import work_list


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
    # as `TriZoneBatch` has it
    slots = FEW_SLOTS if batch_size <= FEW_SLOTS else MANY_SLOTS
    programs = max(programs_at_once(device) // slots - heads, heads)
    work = work_list(layers, codes, row_splits=1, num_programs=programs).to(codes.device)
    queries = torch.randn(batch_size, heads, group, head_dim, generator=generator, device=device)
    queries = queries.to(model.dtype)
    output = torch.full_like(queries, torch.nan)
    scratch = trizone.TriZoneScratch.of(output, work.entries.shape[0], work.items.shape[0])

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
            scratch=scratch,
            output=output,
        )
        return output

    def expected() -> Tensor:
        return torch.stack(
            [
                torch_path.trizone_decode_segments(
                    queries[b], (one,), rows[b, :, 0], rows[b, :, 1], scaling=head_dim**-0.5
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
        kernels=(_prologue_kernel, trizone._trizone_kernel),
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
    mode = dispatch.mode()
    dispatch.configure("torch", device)
    try:
        packed = pack_layer(keys, values, *bits)
    finally:
        dispatch.configure(mode, device)
    expected = packed.buffer.float()
    bound = Bound(tokens=length, size_bytes=packed.layout.size_bytes)

    def launch() -> Tensor:
        return pack.pack(keys, values, *bits, None, bound)[1]

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
        kernels=(
            _count_widths_kernel,
            _place_kernel,
            _index_kernel,
            _pack_keys_kernel,
            _pack_values_kernel,
            _refuse_kernel,
        ),
        target=target,
        captured=False,
    )


def check_case(model: Model, *, length: int, device: Device, seed: int) -> Case:
    """Row 6: what the receiver checks of a prompt's layer."""
    generator = torch.Generator(device).manual_seed(seed)
    widths = torch.tensor([0, 2, 2, 2, 4, 4, 8, 16], dtype=torch.uint8, device=device)
    packed = packed_layer(generator, widths, model.num_kv_heads, length, model.head_dim, device)
    if packed.heads[0].counts.num_tokens > 1:
        packed.heads[0].positions[-1] = packed.heads[0].positions[0]

    def expected() -> Tensor:
        faults = torch.zeros(model.num_kv_heads)
        faults[0] = BAD_POSITIONS if packed.heads[0].counts.num_tokens > 1 else 0
        return faults

    return Case(
        row=6,
        kernel="packed_check",
        model=model.name,
        shape=f"T={length}",
        num_bytes=packed.layout.size_bytes,
        launch=lambda: check_kernel.faults(check_kernel.begin(packed, length).cpu()).float(),
        expected=expected,
        tolerance=0.0,
        kernels=(check_kernel._check_kernel,),
        captured=False,
    )


def knapsack_case(model: Model, *, length: int, device: Device, seed: int) -> Case:
    """Row 6: the bits of a prompt's tokens."""
    generator = torch.Generator(device).manual_seed(seed)
    size = (model.num_kv_heads, 4 * length)
    gained = torch.rand(*size, dtype=torch.float64, generator=generator, device=device)
    gained, order = gained.sort(dim=1, descending=True, stable=True)
    # a unit's increments in their order, whatever they gain
    order = (order % length).sort(dim=1, stable=True).indices.argsort(dim=1)
    order = order % 4 * length + order // 4
    budgets = torch.full((model.num_kv_heads,), 2 * length, device=device)
    arguments = (order, gained, (2, 2, 4, 8), budgets, length)
    return Case(
        row=6,
        kernel="knapsack",
        model=model.name,
        shape=f"T={length}",
        num_bytes=16 * order.numel() // 4,
        launch=lambda: knapsack.take_increments(*arguments).float(),
        expected=lambda: take_increments_torch(*arguments).float(),
        tolerance=0.0,
        kernels=(knapsack._take_increments_kernel,),
        captured=False,
    )
