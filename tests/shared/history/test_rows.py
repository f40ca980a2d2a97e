"""Rows in 16, 8 and 4 bits: bytes by the formula, errors within half a step, the same in every tier."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import HistoryMiss
from kvferry.shared.history.rows import GROUP_TOKENS, RowPrecision
from kvferry.shared.history.stored_format import (
    RecordBody,
    SegmentEntry,
    StoredShape,
    pack_token_ids,
    read_chunk,
    read_record,
    write_chunk,
    write_record,
)
from kvferry.shared.model.spec import Heads

SEGMENT = bytes(range(16))
BITS: tuple[Literal["16", "8", "4"], ...] = ("16", "8", "4")


def random_kv(heads: int, num_tokens: int, dim: int, dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(heads * 1000 + num_tokens)
    keys = torch.randn(heads, num_tokens, dim, generator=generator) * 5
    # a channel far from zero, as RoPE's low frequencies have them
    keys[..., 0] += 40
    return keys.to(dtype), torch.randn(heads, num_tokens, dim, generator=generator).to(dtype)


@pytest.mark.parametrize("dim", [1, 7, 8, 64])
@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("bits", BITS)
def test_bytes_are_the_formulas(bits: Any, num_tokens: int, dim: int) -> None:
    chunk = RowPrecision(bits=bits, dtype=torch.float32).encode(*random_kv(3, num_tokens, dim))
    if bits == "16":
        assert chunk.size_bytes == 2 * 3 * num_tokens * dim * 2
    else:
        codes = 2 * 3 * num_tokens * -(-dim // (8 // int(bits)))
        groups = -(-num_tokens // GROUP_TOKENS)
        assert chunk.size_bytes == codes + 4 * 3 * dim * groups + 4 * 3 * num_tokens


@pytest.mark.parametrize("bits", ["model", *BITS])
def test_latent_rows_are_stored_once_as_keys_are(bits: Any) -> None:
    keys, values = random_kv(1, 130, 20)
    both = RowPrecision(bits=bits, dtype=torch.float32).encode(keys, values)
    latent = RowPrecision(bits=bits, dtype=torch.float32, latent_dim=16).encode(keys, keys[..., :16])
    got_keys, got_values = latent.rows()
    assert torch.equal(got_keys, both.rows()[0])
    assert torch.equal(got_values, got_keys[..., :16])
    assert got_values.data_ptr() == got_keys.data_ptr()
    of_values = 0 if bits in ("model", "16") else 4 * 130
    codes = {"model": 4 * 20, "16": 2 * 20, "8": 20, "4": 10}[bits]
    assert both.size_bytes - latent.size_bytes == 130 * codes + of_values


@pytest.mark.parametrize("bits", ["8", "4"])
def test_keys_are_rounded_per_channel_and_group_and_values_per_token(bits: Any) -> None:
    keys, values = random_kv(2, 150, 5)
    got_keys, got_values = RowPrecision(bits=bits, dtype=torch.float32).encode(keys, values).rows()

    def half_step(rows: torch.Tensor, dim: int) -> torch.Tensor:
        """Minima are up to 3 / 2048 lower in float16, and scales as much higher."""
        low = rows.amin(dim=dim)
        span = (rows.amax(dim=dim) - low + low.abs() * 3 / 2048) * (1 + 3 / 2048)
        return span / (2 ** int(bits) - 1) / 2 + 1e-5

    for begin in range(0, 150, GROUP_TOKENS):
        group = keys[:, begin : begin + GROUP_TOKENS]
        error = (got_keys[:, begin : begin + GROUP_TOKENS] - group).abs().amax(dim=1)
        assert bool((error <= half_step(group, 1)).all())
    assert bool(((got_values - values).abs().amax(dim=2) <= half_step(values, 2)).all())


def test_sixteen_bits_keep_a_16_bit_models_rows_and_bound_large_ones() -> None:
    keys, values = random_kv(2, 9, 4, torch.bfloat16)
    same = RowPrecision(bits="16", dtype=torch.bfloat16).encode(keys, values).rows()
    assert torch.equal(same[0], keys)
    assert torch.equal(same[1], values)
    rounded, _ = (
        RowPrecision(bits="16", dtype=torch.float32)
        .encode(torch.tensor([[[1e9, -1e9, 0.1]]]), torch.zeros(1, 1, 3))
        .rows()
    )
    assert rounded.tolist() == [[[65504.0, -65504.0, float(torch.tensor(0.1).half())]]]


@pytest.mark.parametrize("bits", ["8", "4"])
def test_quantised_rows_beyond_float16_are_bound(bits: Any) -> None:
    keys, values = torch.tensor([[[1e9, -1e9, 0.1, 3.0]]]).expand(2, 3, 4), torch.full((2, 3, 4), -1e9)
    got_keys, got_values = RowPrecision(bits=bits, dtype=torch.bfloat16).encode(keys, values).rows()
    torch.testing.assert_close(got_keys, keys.clamp(-65504, 65504), rtol=2e-3, atol=1e-3)
    torch.testing.assert_close(got_values, torch.full((2, 3, 4), -65504.0), rtol=2e-3, atol=0)


@pytest.mark.parametrize("bits", ["8", "4"])
def test_history_with_the_scales_of_an_earlier_release_is_not_read(bits: Any) -> None:
    assert RowPrecision(bits=bits, dtype=torch.float32).code not in (int(bits), 16, 17, 32)


@given(
    bits=st.sampled_from(["model", "16", "8", "4"]),
    num_tokens=st.integers(1, 150),
    dim=st.integers(1, 9),
    is_latent=st.booleans(),
    data=st.data(),
)
def test_a_part_has_the_wholes_values_also_after_redis(
    bits: Any, num_tokens: int, dim: int, is_latent: bool, data: st.DataObject
) -> None:
    latent_dim = data.draw(st.integers(1, dim)) if is_latent else 0
    precision = RowPrecision(bits=bits, dtype=torch.float32, latent_dim=latent_dim)
    keys, values = random_kv(2, num_tokens, dim)
    chunk = precision.encode(keys, keys[..., :latent_dim] if is_latent else values)
    whole = chunk.rows()
    for _ in range(2):  # a part of a part as well
        start = data.draw(st.integers(0, chunk.num_tokens - 1))
        stop = data.draw(st.integers(start + 1, chunk.num_tokens))
        chunk, whole = chunk.part(start, stop), (whole[0][:, start:stop], whole[1][:, start:stop])
        shape = StoredShape(
            fingerprint="m",
            heads=(Heads(num_kv_heads=2, group_size=1, head_dim=dim),) * 1,
            precision=precision,
        )
        where = {"shape": shape, "segment_id": SEGMENT, "layer": 0, "first_token": 5}
        value = write_chunk(chunk, **where)  # type: ignore[arg-type]
        read = read_chunk(value, num_tokens=chunk.num_tokens, **where)  # type: ignore[arg-type]
        for candidate in (chunk, chunk.copy(), read):
            keys, values = candidate.rows()
            assert torch.equal(keys, whole[0])
            assert torch.equal(values, whole[1])


@given(data=st.data())
def test_any_other_bytes_are_a_miss(data: st.DataObject) -> None:
    precision = RowPrecision(bits="8", dtype=torch.float32)
    shape = StoredShape(
        fingerprint="m", heads=(Heads(num_kv_heads=2, group_size=1, head_dim=3),) * 1, precision=precision
    )
    chunk = precision.encode(*random_kv(2, 5, 3))
    assert chunk.bits == 8
    value = write_chunk(chunk, shape=shape, segment_id=SEGMENT, layer=0, first_token=0)
    session = SessionKey(owner="o", session_id="s")
    entry = SegmentEntry(segment_id=SEGMENT, length=2, value_tokens=(1, 1), size_bytes=9)
    body = RecordBody("o", "s", "f", 8, "full", 1, pack_token_ids((1, 2)), (entry,))
    record = write_record(SEGMENT, body)
    assert read_record(record, session).body == body
    for original, read in (
        (
            value,
            lambda b: read_chunk(b, shape=shape, segment_id=SEGMENT, layer=0, first_token=0, num_tokens=5),
        ),
        (record, lambda b: read_record(b, session)),
    ):
        changed = bytearray(original)
        if data.draw(st.booleans()):
            position = data.draw(st.integers(0, len(original) - 1))
            changed[position] ^= data.draw(st.integers(1, 255))
        else:
            changed = bytearray(data.draw(st.binary(max_size=120)))
        with pytest.raises(HistoryMiss) as raised:
            read(bytes(changed))
        assert raised.value.reason == "corrupt"


def test_a_record_of_another_session_or_of_impossible_segments_is_a_miss() -> None:
    session = SessionKey(owner="o", session_id="s")
    good = SegmentEntry(segment_id=SEGMENT, length=2, value_tokens=(2,), size_bytes=9)
    for owner, entries in (
        ("p", (good,)),
        ("o", ()),
        ("o", (SegmentEntry(segment_id=b"short", length=2, value_tokens=(2,), size_bytes=9),)),
        ("o", (SegmentEntry(segment_id=SEGMENT, length=2, value_tokens=(1,), size_bytes=9),)),
        ("o", (SegmentEntry(segment_id=SEGMENT, length=2, value_tokens=(2,), size_bytes=-1),)),
        ("o", (SegmentEntry(segment_id=SEGMENT, length=2, value_tokens=(3, -1), size_bytes=9),)),
        ("o", (good, good)),
    ):
        body = RecordBody(owner, "s", "f", 32, "full", 1, pack_token_ids((1, 2)), entries)
        with pytest.raises(HistoryMiss):
            read_record(write_record(SEGMENT, body), session)


@pytest.mark.parametrize("bits", ["16", "8", "4"])
def test_memory_and_redis_round_a_row_alike(make_worker: Any, bits: Any) -> None:
    options = {"bits": bits, "num_layers": 1, "heads": 2, "dim": 6}
    first, second = make_worker(**options), make_worker(**options)
    session = SessionKey(owner="key-a", session_id="s")
    keys, values = random_kv(2, 100, 6)
    prompt = tuple(range(1, 101))
    turn = first.begin(session, prompt)
    for begin, end in ((0, 70), (70, 100)):
        turn.append(0, keys[:, begin:end], values[:, begin:end])
    turn.commit(prompt)
    # a branch, so that what is read begins in the middle of a group
    branch = (*prompt[:81], 7, 8)
    from_memory, from_redis = first.begin(session, branch).load(0), second.begin(session, branch).load(0)
    assert torch.equal(from_memory[0], from_redis[0])
    assert torch.equal(from_memory[1], from_redis[1])
    assert not torch.equal(from_memory[0], keys[:, :81])
    # and what went through a second worker's memory
    again = second.begin(session, branch)
    again.load(0)
    again.append(0, keys[:, 81:83], values[:, 81:83])
    again.commit(branch)
    adopted = second.begin(session, (*branch, 9)).load(0)
    assert torch.equal(adopted[0][:, :81], from_memory[0])
    assert second.store.info(session).num_tokens == 83


def test_precision_of_another_setting_is_not_read(make_worker: Any) -> None:
    session = SessionKey(owner="key-a", session_id="s")
    make_worker(bits="model").turn(session, (1, 2, 3))
    other = make_worker(bits="8")
    assert other.begin(session, (1, 2, 3, 4)).reused_tokens == 0
