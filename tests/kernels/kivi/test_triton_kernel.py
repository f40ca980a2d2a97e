"""The Triton kernel in the interpreter against the reference: widths, odd sizes, ragged batches, poison."""

from __future__ import annotations

import pytest
import torch
from kvtest.reference.dense import dense_decode as reference
from kvtest.reference.scores import rounded
from torch import Tensor

from kvferry.kernels.decode_batch import BatchShape, NewTokens
from kvferry.kernels.kivi import kivi_decode, triton_kernel
from kvferry.kernels.kivi.batch import KiviBatch, QuantisedRows
from kvferry.kernels.kivi.rows import KiviRows, kivi_quantise

# 16 bits round K and V after they are dequantised, probabilities and the output; the interpreter cuts
# bfloat16 off instead of rounding it
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
HEADS, GROUP, DIM, CAPACITY = 2, 3, 64, 40


def relative_error(result: Tensor, expected: Tensor) -> float:
    return float((result.float() - expected).norm() / expected.norm())


def random_rows(num_rows: int, dim: int, dtype: torch.dtype, seed: int, heads: int = HEADS) -> Tensor:
    """K and V `[2, H_kv, n, D]`, K with channels of one sign."""
    rows = torch.randn(2, heads, num_rows, dim, generator=torch.Generator().manual_seed(seed))
    rows[0] += torch.linspace(-2, 2, dim)
    return rows.to(dtype)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("dtype", "bits", "group_size", "num_rows", "num_new", "head_dim"),
    [
        (torch.float32, 2, 4, 301, 3, 64),
        (torch.float32, 4, 1, 97, 1, 96),
        (torch.float32, 2, 3, 160, 2, 96),
        (torch.float32, 8, 3, 64, 130, 8),
        (torch.float32, 4, 2, 33, 1, 8),
        (torch.float16, 4, 16, 129, 40, 128),
        (torch.float16, 2, 5, 31, 1, 16),
        (torch.float16, 8, 2, 0, 1, 64),
        (torch.bfloat16, 8, 7, 1, 2, 64),
        (torch.bfloat16, 4, 3, 70, 5, 256),
        (torch.float32, 2, 1, 32, 1, 256),
    ],
)
def test_attention_equals_the_reference(
    dtype: torch.dtype, bits: int, group_size: int, num_rows: int, num_new: int, head_dim: int
) -> None:
    keys, values = random_rows(num_rows, head_dim, dtype, seed=num_rows)
    queries = torch.randn(HEADS, group_size, head_dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    # a slice of a longer cache, whose unused rows are poison
    cache = torch.full((2, HEADS, num_new + 2, head_dim), torch.nan, dtype=dtype)
    cache[:, :, :num_new] = random_rows(num_new, head_dim, dtype, seed=2)
    new_keys, new_values = cache[:, :, :num_new]
    rows = kivi_quantise(keys, values, bits)
    result = kivi_decode(queries, rows, new_keys, new_values, scaling=head_dim**-0.5)
    assert result.dtype == dtype
    whole = [
        torch.cat([old.float(), new.float()], 1)
        for old, new in zip(rounded(keys, values, bits), (new_keys, new_values), strict=True)
    ]
    expected = reference(queries, *whole, scaling=head_dim**-0.5)
    assert relative_error(result, expected) < TOLERANCE[dtype]


class Arena:
    """A poisoned arena, from which regions are taken one after another."""

    def __init__(self, size_bytes: int) -> None:
        self.bytes = torch.full((size_bytes,), 0xFF, dtype=torch.uint8)
        self._used = 0

    def take(self, tensor: Tensor) -> Tensor:
        """A copy in the arena, at a multiple of 64 bytes."""
        source = tensor.contiguous().flatten().view(torch.uint8)
        start, self._used = self._used, self._used + -(-len(source) // 64) * 64
        place = self.bytes[start : start + len(source)]
        place.copy_(source)
        return place.view(tensor.dtype).view(tensor.shape)


def in_arena(arena: Arena, num_rows: int, bits: int, seed: int) -> QuantisedRows:
    keys, values = random_rows(num_rows, DIM, torch.float32, seed)
    made = kivi_quantise(keys, values, bits)
    new = torch.full((2, HEADS, CAPACITY, DIM), torch.nan)
    codes, scales, left_keys, left_values, new_keys, new_values = map(
        arena.take, (made.codes, made.scales, made.keys, made.values, *new)
    )
    quantised = KiviRows(bits=bits, codes=codes, scales=scales, keys=left_keys, values=left_values)
    return QuantisedRows(keys=new_keys, values=new_values, length=0, quantised=quantised)


@pytest.mark.usefixtures("interpreter")
def test_a_batch_of_all_widths_and_lengths_goes_on_as_sequences_join_pause_and_leave() -> None:
    shape = BatchShape(
        num_layers=1,
        num_slots=6,
        num_kv_heads=HEADS,
        group_size=GROUP,
        head_dim=DIM,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    arena = Arena(1 << 20)
    batch = KiviBatch(shape, arena.bytes.view(torch.float32), arena.bytes)
    prompts = {0: (301, 4), 1: (0, 2), 2: (1, 8), 4: (64, 2), 5: (33, 4)}
    whole: dict[int, list[Tensor]] = {}
    for slot, (num_rows, bits) in prompts.items():
        batch.place(slot, {0: in_arena(arena, num_rows, bits, seed=slot)})
        whole[slot] = [
            rows.float() for rows in rounded(*random_rows(num_rows, DIM, torch.float32, slot), bits)
        ]
    assert batch.size() == (2, 4, 8)
    scratch, generator = batch.scratch(6), torch.Generator().manual_seed(9)
    active = torch.ones(6, dtype=torch.int64)
    for number in range(4):
        queries = torch.randn(6, HEADS, GROUP, DIM, generator=generator)
        keys, values = torch.randn(2, 6, HEADS, DIM, generator=generator)
        output = batch.attend_launched(0, NewTokens(queries, keys, values, 0.125), scratch)
        for slot in range(6):
            if slot not in whole or not active[slot]:
                assert not output[slot].any()
                continue
            whole[slot] = [
                torch.cat([rows, new[slot][:, None]], 1)
                for rows, new in zip(whole[slot], (keys, values), strict=True)
            ]
            expected = reference(queries[slot], *whole[slot], scaling=0.125)
            assert relative_error(output[slot], expected) < TOLERANCE[torch.float32]
        if number == 0:
            active[1] = 0  # it ends in mid-step
        if number == 1:
            batch.remove(1)
            del whole[1]
            batch.remove(2)
            del whole[2]
            assert batch.size() == (2, 4)
            scratch = batch.scratch(6)
        batch.advance(active)
    assert not scratch.splits.counters.any()


def test_tiles_have_two_groups_where_one_gives_threads_narrow_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "interpreting", lambda: False)
    sizes = {
        (bits, dim): triton_kernel.block_groups(bits, dim) for bits in (2, 4, 8) for dim in (64, 128, 256)
    }
    assert {size for size, groups in sizes.items() if groups == 2} == {(2, 64), (4, 64), (2, 128), (2, 256)}


@pytest.mark.usefixtures("interpreter")
def test_what_the_kernel_has_not_is_named() -> None:
    from kvferry.kernels.dispatch import KernelUnavailable

    keys, values = random_rows(40, 24, torch.float32, seed=0)
    queries, new = torch.zeros(HEADS, 1, 24), torch.zeros(HEADS, 1, 24)
    with pytest.raises(KernelUnavailable, match="have 48 bits; they must be a multiple of 32"):
        kivi_decode(queries, kivi_quantise(keys, values, 2), new, new, scaling=1.0)
    with pytest.raises(KernelUnavailable, match="no new row"):
        kivi_decode(queries, kivi_quantise(keys, values, 4), new[:, :0], new[:, :0], scaling=1.0)
