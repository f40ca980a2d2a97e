"""Row 1: dense decode."""

from __future__ import annotations

import torch
from case import Case, Device, Model, attend_all, special_softmax, tolerance_of
from torch import Tensor

from kvferry.kernels import split_attention as append
from kvferry.kernels.dense_decode import triton_kernel as dense_decode
from kvferry.kernels.descriptors import choose_num_programs, split_workspace


def dense_case(
    model: Model, *, batch_size: int, length: int, device: Device, seed: int, target: float | None,
    target_us: float | None = None, window: int = 0, capped: bool = False, sinks: bool = False,
) -> Case:  # fmt: skip
    """Row 1: dense decode over ragged sequences of about `length` rows in one arena.

    Args: window: of the layer, which slides, 0 for none; capped, sinks: see `special_softmax`.
    """
    generator = torch.Generator(device).manual_seed(seed)
    heads, group, head_dim = model.num_kv_heads, model.group_size, model.head_dim
    lengths = [max(length - 7 * i, 1) for i in range(batch_size)]
    arena = torch.randn(batch_size, heads, 2, length, head_dim, generator=generator, device=device)
    arena = arena.to(model.dtype)
    queries = torch.randn(batch_size, heads, group, head_dim, generator=generator, device=device)
    queries = queries.to(model.dtype)
    step = length * head_dim
    table = torch.tensor(
        [
            (2 * i * step, (2 * i + 1) * step, lengths[i // heads], *([window, -1] if window else []))
            for i in range(batch_size * heads)
        ],
        device=device,
    )
    output = torch.full_like(queries, torch.nan)
    workspace = split_workspace(output, choose_num_programs(batch_size * heads, device))
    flat = arena.view(-1)
    scaling = special_softmax(model, device, capped=capped, sinks=sinks)
    shown = {"window": window > 0, "cap": capped, "sinks": sinks}
    special = ", ".join(name for name, there in shown.items() if there)

    def launch() -> Tensor:
        dense_decode.dense_decode_batch(
            queries,
            flat,
            flat,
            table,
            row_stride=head_dim,
            scaling=scaling,
            workspace=workspace,
            output=output,
        )
        return output

    def expected() -> Tensor:
        return torch.stack(
            [
                attend_all(queries[b], *arena[b, :, :, max(n - (window or n), 0) : n].unbind(1), scaling)
                for b, n in enumerate(lengths)
            ]
        )

    return Case(
        row=1,
        kernel="dense_decode",
        model=model.name,
        shape=f"B={batch_size} n={length}" + (f" W={window}" if window else ""),
        special=special,
        num_bytes=2 * heads * head_dim * sum(min(n, window or n) for n in lengths) * arena.element_size(),
        launch=launch,
        expected=expected,
        tolerance=tolerance_of(model.dtype),
        kernels=(dense_decode._dense_decode_kernel,),
        target=target,
        target_us=target_us,
    )


def append_case(model: Model, *, batch_size: int, device: Device, seed: int) -> Case:
    """A building block of rows 1 and 7: one new row for every head."""
    generator = torch.Generator(device).manual_seed(seed)
    heads, head_dim, capacity = batch_size * model.num_kv_heads, model.head_dim, 8
    new = torch.randn(2, batch_size, model.num_kv_heads, head_dim, generator=generator, device=device)
    keys, values = new.to(model.dtype)
    cache = torch.zeros(heads, 2, capacity, head_dim, device=device, dtype=model.dtype)
    size = capacity * head_dim
    table = torch.tensor(
        [(2 * h * size, (2 * h + 1) * size, h % capacity + 1) for h in range(heads)], device=device
    )

    def launch() -> Tensor:
        append.append_rows(cache.view(-1), table, keys, values)
        return cache

    def written() -> Tensor:
        at = torch.arange(heads, device=device)
        return launch()[at, :, at % capacity]

    return Case(
        row=1,
        kernel="append_rows",
        model=model.name,
        shape=f"B={batch_size}",
        num_bytes=4 * keys.numel() * keys.element_size(),
        launch=launch,
        expected=lambda: torch.stack([keys.flatten(0, 1), values.flatten(0, 1)], 1).float(),
        checked=written,
        tolerance=0.0,
        kernels=(append._append_rows_kernel,),
    )
