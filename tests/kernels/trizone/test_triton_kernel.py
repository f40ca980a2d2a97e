"""The Triton kernels in the interpreter against the reference: all widths, ragged heads, several layers."""

from __future__ import annotations

import itertools

import pytest
import torch
from kvtest.packed import GROUP_BOUNDARIES, poison_padding, trizone_decode, unpack_layer
from kvtest.reference import dense as reference
from torch import Tensor

from kvferry.kernels.packed.layer import PackedLayer, view_packed_layer
from kvferry.kernels.packed.packing import pack_layer
from kvferry.kernels.trizone import (
    torch_path,
    triton_kernel,
    trizone_decode_segments,
)
from kvferry.kernels.trizone.work_list import (
    ITEM_FIELDS,
    KIND_ROWS,
    work_list,
)

TOLERANCE = 1.5e-3
"""Queries and probabilities are rounded to float16, whatever the model's dtype."""


def packed_of(
    generator: torch.Generator, *, num_kv_heads: int, num_tokens: int, head_dim: int, widths: tuple[int, ...]
) -> PackedLayer:
    """A layer of channels of unequal ranges and offsets, with random widths a channel and a token."""
    spread = torch.linspace(0.1, 4, head_dim)
    keys = torch.randn(num_kv_heads, num_tokens, head_dim, generator=generator) * spread
    keys += torch.randn(head_dim, generator=generator)
    values = torch.randn(num_kv_heads, num_tokens, head_dim, generator=generator)
    choices = torch.tensor(widths, dtype=torch.uint8)

    def bits(size: int) -> Tensor:
        return choices[torch.randint(len(widths), (num_kv_heads, size), generator=generator)]

    return pack_layer(keys, values, bits(head_dim), bits(num_tokens))


def relative_error(result: Tensor, expected: Tensor) -> float:
    return float((result.float() - expected).norm() / expected.norm())


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("dtype", "num_kv_heads", "group_size", "num_tokens", "head_dim", "num_new", "widths"),
    [
        (torch.float32, 2, 4, 300, 64, 5, (0, 2, 4)),
        (torch.float16, 1, 3, 130, 96, 0, (8, 16)),
        (torch.bfloat16, 1, 16, 523, 128, 3, (0, 2, 4, 8, 16)),
        (torch.float32, 2, 1, 9, 64, 1, (0,)),
        (torch.float32, 1, 2, 1, 64, 1, (4,)),
        (torch.float16, 1, 2, 64, 256, 2, (2, 8)),
        (torch.float16, 1, 16, 261, 256, 1, (0, 2, 4, 8, 16)),
        (torch.bfloat16, 1, 1, 135, 96, 40, (2, 4)),
    ],
)
def test_attention_equals_the_reference(
    dtype: torch.dtype,
    num_kv_heads: int,
    group_size: int,
    num_tokens: int,
    head_dim: int,
    num_new: int,
    widths: tuple[int, ...],
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    packed = packed_of(
        generator, num_kv_heads=num_kv_heads, num_tokens=num_tokens, head_dim=head_dim, widths=widths
    )
    queries = torch.randn(num_kv_heads, group_size, head_dim, generator=generator).to(dtype)
    new_keys, new_values = torch.randn(2, num_kv_heads, num_new, head_dim, generator=generator).to(dtype)
    result = trizone_decode(queries, packed, new_keys, new_values, scaling=head_dim**-0.5)
    expected = reference.trizone_decode(
        queries.float(), packed, new_keys.float(), new_values.float(), scaling=head_dim**-0.5
    )
    assert result.dtype == dtype
    assert relative_error(result, expected) < (8e-3 if dtype == torch.bfloat16 else TOLERANCE)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("num_tokens", GROUP_BOUNDARIES)
def test_groups_of_any_length_have_scales_of_their_own(num_tokens: int) -> None:
    """Each group's keys are of another size, around another value; NaN is in all bytes that are nobody's."""
    generator = torch.Generator().manual_seed(num_tokens)
    size = 2.0 ** (torch.arange(num_tokens) // 32 - 6)[:, None]
    keys = (torch.randn(1, num_tokens, 48, generator=generator) - 1) * size
    values = torch.randn(1, num_tokens, 48, generator=generator)
    key_bits = torch.tensor([[0, 2, 4, 8, 16, 4]], dtype=torch.uint8).repeat(1, 8)
    value_bits = torch.tensor([[2, 4, 8]], dtype=torch.uint8).repeat(1, num_tokens)[:, :num_tokens]
    packed = poison_padding(pack_layer(keys, values, key_bits, value_bits))
    queries, new = torch.randn(1, 3, 48, generator=generator), torch.zeros(1, 0, 48)
    result = trizone_decode(queries, packed, new, new, scaling=0.1)
    expected = reference.trizone_decode(queries, packed, new, new, scaling=0.1)
    assert relative_error(result, expected) < TOLERANCE


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("exponent", "spread"), [(0, 0), (-12, 0), (11, 0), (0, 10), (-4, 8)], ids=lambda value: str(value)
)
def test_scales_of_any_size_lose_no_more_than_float16_does(exponent: int, spread: int) -> None:
    """Keys times a power of two, and queries divided by it; and so for each channel, by another one."""
    generator = torch.Generator().manual_seed(exponent + spread)
    by_channel = 2.0 ** (exponent + torch.linspace(-spread, spread, 64))
    keys, values = torch.randn(2, 1, 200, 64, generator=generator)
    # one group's keys are all but equal
    keys[:, 64:128] = keys[:, 64:65] + 1e-3 * keys[:, 64:128]
    key_bits = torch.full((1, 64), 8, dtype=torch.uint8)
    packed = pack_layer(keys * by_channel, values, key_bits, torch.full((1, 200), 4, dtype=torch.uint8))
    queries, new = torch.randn(1, 2, 64, generator=generator) / by_channel, torch.zeros(1, 0, 64)
    result = trizone_decode(queries, packed, new, new, scaling=0.2)
    expected = reference.trizone_decode(queries, packed, new, new, scaling=0.2)
    assert relative_error(result, expected) < TOLERANCE


def test_a_batch_with_several_packed_layers_a_head_is_one_launch() -> None:
    """Two sequences, one of them in two packed pieces; poison between the pieces and beyond the new rows."""
    generator = torch.Generator().manual_seed(6)
    head_dim, group_size, new_lengths = 64, 2, (3, 0)
    pieces = [
        [
            packed_of(generator, num_kv_heads=1, num_tokens=n, head_dim=head_dim, widths=(2, 4))
            for n in lengths
        ]
        for lengths in ((140, 20), (33,))
    ]
    arena = torch.full((1 << 16,), 255, dtype=torch.uint8)
    placed, offset = [], 0
    for sequence in pieces:
        views = []
        for piece in sequence:
            size = piece.layout.size_bytes
            arena[offset : offset + size] = piece.buffer
            views.append(view_packed_layer(piece.layout, arena[offset : offset + size]))
            offset += size + 64
        placed.append(views)
    rows = torch.full((4, 8, head_dim), torch.nan)
    for sequence, length in enumerate(new_lengths):
        rows[2 * sequence : 2 * sequence + 2, :length] = torch.randn(2, length, head_dim, generator=generator)
    heads = [(2 * s * 8 * head_dim, (2 * s + 1) * 8 * head_dim, n) for s, n in enumerate(new_lengths)]
    work = work_list(placed, arena, row_splits=2, item_bytes=4096)
    queries = torch.randn(2, 1, group_size, head_dim, generator=generator)
    output = torch.full_like(queries, torch.nan)
    scratch = triton_kernel.TriZoneScratch.of(output, work.entries.shape[0], len(work.items))
    scratch.splits.partial.fill_(torch.nan)
    scratch.splits.lse.fill_(torch.nan)
    triton_kernel.trizone_decode_batch(
        queries,
        rows.view(-1),
        rows.view(-1),
        torch.tensor(heads),
        arena,
        work,
        row_stride=head_dim,
        scaling=0.125,
        scratch=scratch,
        output=output,
    )
    assert not scratch.splits.counters.any()
    for sequence, (own, length) in enumerate(zip(pieces, new_lengths, strict=True)):
        keys, values = rows[2 * sequence, :length], rows[2 * sequence + 1, :length]
        for piece in own:
            ((piece_keys, piece_values, _),) = unpack_layer(piece)
            keys, values = torch.cat([keys, piece_keys]), torch.cat([values, piece_values])
        expected = torch.softmax(0.125 * (queries[sequence, 0] @ keys.T), dim=-1) @ values
        assert relative_error(output[sequence, 0], expected) < TOLERANCE


@pytest.mark.usefixtures("interpreter")
def test_segments_are_attended_together() -> None:
    generator = torch.Generator().manual_seed(9)
    segments = [
        packed_of(generator, num_kv_heads=1, num_tokens=n, head_dim=32, widths=(0, 4, 8)) for n in (40, 5)
    ]
    queries, new_keys = torch.randn(2, 1, 2, 32, generator=generator)
    result = trizone_decode_segments(queries, segments, new_keys, new_keys, scaling=0.2)
    expected = torch_path.trizone_decode_segments(queries, segments, new_keys, new_keys, scaling=0.2)
    assert relative_error(result, expected) < TOLERANCE


def tile_of(token: int, num_tokens: int) -> int:
    """The half of a token block, by its fields, that a token is in."""
    block, at = divmod(token, 128)
    rest = num_tokens - block * 128
    lanes = 16 if rest >= 128 else -(-rest // 8)
    return 2 * block + at // lanes // 4


@pytest.mark.parametrize("num_tokens", [1408, 1411, 1500])
def test_items_cover_every_zone_once_in_shares_of_bytes(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(7)
    packed = packed_of(generator, num_kv_heads=3, num_tokens=num_tokens, head_dim=64, widths=(2, 4, 8, 16))
    item_bytes = 8192
    work = work_list([[packed]], packed.buffer, row_splits=1, item_bytes=item_bytes)
    items = work.items.tolist()
    assert work.items.shape[1] == ITEM_FIELDS
    for h, head in enumerate(packed.heads):
        start = 0
        for kind, count in enumerate(head.counts.tokens):
            runs = [(item[2], item[3]) for item in items if item[0] == kind and item[1] == h]
            # neighbours meet, and the ends are the zone's tiles
            assert runs[0][0] == tile_of(start, num_tokens)
            assert runs[-1][1] == tile_of(start + count - 1, num_tokens) + 1
            assert all(a[1] == b[0] for a, b in itertools.pairwise(runs))
            start += count
        own = [i for i, item in enumerate(items) if item[4] == h]
        assert own == list(range(own[0], own[0] + len(own)))
        assert all(items[i][5:] == [own[0], len(own)] for i in own)
        assert items[own[0]][0] == KIND_ROWS
    assert work_list([[packed]], packed.buffer, row_splits=1, num_programs=4).items.shape[0] < len(items)


def test_a_head_with_more_items_than_can_be_combined_is_refused() -> None:
    generator = torch.Generator().manual_seed(8)
    packed = packed_of(generator, num_kv_heads=1, num_tokens=9000, head_dim=16, widths=(16,))
    with pytest.raises(ValueError, match="item_bytes is 1; it makes 143 items"):
        work_list([[packed]], packed.buffer, row_splits=1, item_bytes=1)
