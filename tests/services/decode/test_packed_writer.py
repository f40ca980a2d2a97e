"""Packed layers land where they are attended to, however they are cut; what no packer writes is refused."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels.packed import pack_layer, unpack_layer
from kvferry.services.decode.arena_copier import ArenaCopier
from kvferry.services.decode.packed_writer import PackedLayerWriter
from kvferry.shared.errors import TransferFailed
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.wire.messages import BlockHeader, Section, TransferKey
from kvferry.shared.wire.packed_sections import packed_sections

HEADS, DIM, PROMPT = 2, 6, 41
SPEC = ModelSpec(
    name="m",
    fingerprint="f",
    num_layers=1,
    num_heads=4,
    num_kv_heads=HEADS,
    head_dim=DIM,
    vocab_size=9,
    max_model_len=99,
    dtype="float32",
    eos_token_ids=(1,),
)


def make_packed(seed=0):
    """Every width among channels and tokens of each head."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, HEADS, PROMPT, DIM, generator=generator)
    key_bits = torch.tensor([0, 2, 4, 8, 16, 16], dtype=torch.uint8).repeat(HEADS, 1)
    value_bits = torch.tensor([0, 2, 4, 8, 16], dtype=torch.uint8).repeat(HEADS, 9)[:, :PROMPT]
    return pack_layer(keys, values, key_bits, value_bits)


class Transfer:
    """A writer over a zone of 0xFF with some room to spare, and the sections to write."""

    def __init__(self, packed, spare_bytes=32):
        self.zone = torch.full((packed.layout.size_bytes + spare_bytes,), 0xFF, dtype=torch.uint8)
        copier = ArenaCopier(1 << 16, self.zone.device)
        self.writer = PackedLayerWriter(SPEC, 3, self.zone, copier, num_prompt_tokens=PROMPT)
        self.sections = {section: bytearray(t.numpy().tobytes()) for section, t in packed_sections(packed)}

    def send(self, section, cuts=(), *, start=0, section_bytes=None):
        data = self.sections[section]
        edges = sorted({0, len(data), *(c % len(data) for c in cuts)})
        for begin, end in itertools.pairwise(edges):
            header = BlockHeader(
                key=TransferKey(transfer_id=1, generation=1),
                sequence=0,
                layer=3,
                section=section,
                section_bytes=section_bytes or len(data),
                offset=start + begin,
            )
            self.writer.write(header, memoryview(data)[begin:end])

    def send_all(self, cuts=()):
        for section in self.sections:
            self.send(section, cuts)


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(0, 10_000), max_size=8), seed=st.integers(0, 99))
def test_a_layer_is_the_same_however_its_sections_are_cut(cuts, seed):
    packed = make_packed(seed)
    transfer = Transfer(packed)
    transfer.send_all(cuts)
    received = transfer.writer.finish()
    assert received.layout == packed.layout
    assert received.buffer.data_ptr() == transfer.zone.data_ptr()
    for one, other in zip(unpack_layer(received), unpack_layer(packed), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert (transfer.zone[packed.layout.size_bytes :] == 0xFF).all()


@pytest.mark.parametrize("last", [None, Section.LAYOUT, Section.CODES, Section.HALF_ROWS])
def test_missing_bytes_are_found_at_the_end(last):
    transfer = Transfer(make_packed())
    for section in transfer.sections:
        if last is None:
            break
        transfer.send(section)
        if section is last:
            break
    with pytest.raises(TransferFailed, match="layer 3") as caught:
        transfer.writer.finish()
    assert caught.value.reason == "incomplete"


@pytest.mark.parametrize(
    ("name", "entry", "named"),
    [
        ("positions", PROMPT, "positions of head 1"),
        ("positions", -1, "positions of head 1"),
        ("channels", DIM, "channels of head 1"),
        ("key_scales", float("nan"), "scales of head 1"),
        ("value_scales", 0.0, "scales of head 1"),
        ("key_minima", float("inf"), "scales of head 1"),
        ("values_16", float("nan"), "head 1 keeps at 16 bits"),
        ("key_words", 0xFF, "head 1 keeps at 16 bits"),
    ],
)
def test_what_no_packer_writes_is_refused_with_the_layers_last_byte(name, entry, named):
    packed = make_packed()
    getattr(packed.heads[1], name)[-8 if name == "key_words" else -1 :] = entry
    with pytest.raises(TransferFailed, match=named) as caught:
        Transfer(packed).send_all()
    assert caught.value.reason == "packed"


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_garbage_becomes_a_layer_within_bounds_or_a_named_error(data):
    transfer = Transfer(make_packed())
    for _ in range(data.draw(st.integers(1, 4))):
        content = transfer.sections[data.draw(st.sampled_from(list(transfer.sections)))]
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        transfer.send_all()
        received = transfer.writer.finish()
    except TransferFailed:
        return
    for keys, values, positions in unpack_layer(received):
        assert keys.isfinite().all()
        assert values.isfinite().all()
        assert ((positions >= 0) & (positions < PROMPT)).all()


def test_blocks_beyond_their_section_or_before_the_layout_are_refused():
    transfer = Transfer(make_packed())
    with pytest.raises(TransferFailed, match="CODES came where it cannot be"):
        transfer.send(Section.CODES)
    transfer.send(Section.LAYOUT)
    before = transfer.zone.clone()
    for arguments, reason in (
        ({"start": 16, "section_bytes": None}, "size"),
        ({"section_bytes": 1 << 20}, "size"),
    ):
        with pytest.raises(TransferFailed) as caught:
            transfer.send(Section.CODES, **arguments)
        assert caught.value.reason == reason
    with pytest.raises(TransferFailed) as caught:
        transfer.send(Section.SCALES)
    assert caught.value.reason == "order"
    with pytest.raises(TransferFailed, match="LAYOUT"):
        transfer.send(Section.LAYOUT)
    assert torch.equal(transfer.zone, before)


def test_a_layer_larger_than_its_zone_is_refused_before_its_bytes():
    transfer = Transfer(make_packed(), spare_bytes=-16)
    with pytest.raises(TransferFailed) as caught:
        transfer.send(Section.LAYOUT)
    assert caught.value.reason == "layout"
