"""Attention to quantised rows (KIVI), which has no row in the table of targets."""

from __future__ import annotations

import torch
from case import Case, Device, Model, tolerance_of
from torch import Tensor

from kvferry.kernels.descriptors import choose_num_programs, split_workspace
from kvferry.kernels.kivi import torch_path
from kvferry.kernels.kivi import triton_kernel as kivi
from kvferry.kernels.kivi.batch import QuantisedRows, kivi_fields
from kvferry.kernels.kivi.rows import kivi_quantise

KIVI_ROW = 9
"""Beside the rows of the table of targets."""


def kivi_case(
    model: Model, *, bits: int, batch_size: int, length: int, new: int, device: Device, seed: int
) -> Case:
    """Quantised prompts of ragged sequences, and the rows of new tokens."""
    generator = torch.Generator(device).manual_seed(seed)
    heads, head_dim = model.num_kv_heads, model.head_dim

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(model.dtype)

    sequences = []
    for i in range(batch_size):
        keys, values = random(2, heads, max(length - 7 * i, 1), head_dim)
        new_keys, new_values = random(2, heads, new, head_dim)
        quantised = kivi_quantise(keys, values, bits)
        sequences.append((new_keys, new_values, quantised))
    parts = [
        tensor.contiguous().view(torch.uint8).flatten()
        for new_keys, new_values, rows in sequences
        for tensor in (new_keys, new_values, rows.codes, rows.scales, rows.keys, rows.values)
    ]
    # each part starts at a multiple of 16 bytes, as in the arena
    sizes = [-(-len(part) // 16) * 16 for part in parts]
    arena = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    for start, part in zip(starts, parts, strict=True):
        arena[start : start + len(part)] = part
    base = arena.view(model.dtype)
    table = []
    for i, (new_keys, new_values, quantised) in enumerate(sequences):
        where = starts[6 * i : 6 * i + 6]
        rows = QuantisedRows(keys=new_keys, values=new_values, length=new - 1, quantised=quantised)
        first, step = kivi_fields(new_keys.flatten(), rows)
        for column, start in zip((0, 1, 6, 7, 3, 4), where, strict=True):
            first[column] = start // {6: 4, 7: 2}.get(column, model.dtype.itemsize)
        table += [[at + h * by for at, by in zip(first, step, strict=True)] for h in range(heads)]
    queries = random(batch_size, heads, model.group_size, head_dim)
    output = torch.full_like(queries, torch.nan)
    workspace = split_workspace(output, choose_num_programs(batch_size * heads, device))
    buffers, descriptors = kivi.Buffers.of_arena(base, arena), torch.tensor(table, device=device)

    def launch() -> Tensor:
        kivi.kivi_decode_batch(
            queries,
            buffers,
            descriptors,
            bits=bits,
            row_stride=head_dim,
            scaling=head_dim**-0.5,
            workspace=workspace,
            output=output,
        )
        return output

    def expected() -> Tensor:
        return torch.stack(
            [
                torch_path.attend(queries[b].float(), quantised, new_keys, new_values, scaling=head_dim**-0.5)
                for b, (new_keys, new_values, quantised) in enumerate(sequences)
            ]
        )

    return Case(
        row=KIVI_ROW,
        kernel=f"kivi_{bits}",
        special=f"{bits} bits",
        model=model.name,
        shape=f"B={batch_size} n={length} new={new}",
        num_bytes=sum(map(len, parts)),
        launch=launch,
        expected=expected,
        tolerance=tolerance_of(model.dtype),
        kernels=(kivi._kivi_decode_kernel,),
    )
