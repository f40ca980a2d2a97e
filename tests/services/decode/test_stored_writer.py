"""Layers of announced sections land where they are attended to, however they are cut; rows that the wire
quantises are restored in the arena; what prefill never makes is refused."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.services.decode.arena_copier import ArenaCopier
from kvferry.services.decode.cache_writer import CacheWriter
from kvferry.shared.cache.layout import sequence_layout
from kvferry.shared.compression.compress import compress_layer
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.errors import TransferFailed
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.wire.messages import BlockHeader, Section, TransferKey
from kvferry.shared.wire.stored_sections import announced_sections, layer_sections

HEADS, DIM, PROMPT = 2, 6, 81
SPEC = ModelSpec(
    name="m",
    fingerprint="f",
    num_layers=2,
    num_heads=4,
    num_kv_heads=HEADS,
    head_dim=DIM,
    vocab_size=9,
    max_model_len=99,
    dtype="float32",
    eos_token_ids=(1,),
)
CASES = {
    "adakv": ({"tokens": 40}, {}),
    "think": ({}, {"channel_retention": 0.5}),
    "snapkv-think": ({"tokens": 40}, {}),
    "kivi": ({}, {"bits": 2}),
    "snapkv-kivi": ({"tokens": 40}, {}),
    "snapkv": ({"tokens": 45}, {"wire_bits": 4}),
    "full": ({}, {"wire_bits": 8}),
}


class Transfer:
    """A compressed prompt of two layers, a writer over poisoned bytes, and the sections to write."""

    def __init__(self, method):
        budget, overrides = CASES[method]
        plan = plan_for(method, budget=Budget(**budget), overrides=overrides)
        self.resolved = resolve_plan(
            plan, num_prompt_tokens=PROMPT, max_new_tokens=4, num_layers=2, head_dim=DIM
        )
        generator = torch.Generator().manual_seed(3)
        self.kept = []
        for layer in range(2):
            queries, keys, values = torch.randn(3, HEADS, PROMPT, DIM, generator=generator)
            inputs = LayerInputs(layer=layer, queries=queries[:, None], keys=keys, values=values, scaling=0.4)
            self.kept.append(compress_layer(self.resolved, inputs))
        layout = sequence_layout(SPEC, self.resolved)
        self.buffer = torch.full((layout.size_bytes,), 0xFF, dtype=torch.uint8)  # NaN in every dtype
        copier = ArenaCopier(1 << 14, self.buffer.device)
        self.writer = CacheWriter(SPEC, layout, self.buffer, copier, resolved=self.resolved)
        self.sections = [
            (layer, section, bytearray(tensor.numpy().tobytes()))
            for layer, kept in enumerate(self.kept)
            for section, tensor in layer_sections(kept)
        ]

    def send(self, layer, section, data, cuts=()):
        edges = sorted({0, len(data), *(c % len(data) for c in cuts)} if data else ())
        for start, end in itertools.pairwise(edges):
            header = BlockHeader(
                key=TransferKey(transfer_id=1, generation=1),
                sequence=0,
                layer=layer,
                section=section,
                section_bytes=len(data),
                offset=start,
            )
            self.writer.write(header, memoryview(data)[start:end])

    def send_all(self, cuts=()):
        for layer, section, data in self.sections:
            self.send(layer, section, data, cuts)


@settings(max_examples=25, deadline=None)
@given(method=st.sampled_from(list(CASES)), cuts=st.lists(st.integers(0, 9999), max_size=6))
def test_layers_are_the_same_however_their_sections_are_cut(method, cuts):
    transfer = Transfer(method)
    transfer.send_all(cuts)
    for cache, kept in zip(transfer.writer.finish(), transfer.kept, strict=True):
        rows = kept.keys.shape[1]
        assert torch.equal(cache.keys[:, :rows], kept.keys)
        assert torch.equal(cache.values[:, :rows], kept.values)
        assert cache.keys.shape[1] == rows + 3
        assert cache.keys[:, rows:].isnan().all()
        assert cache.values[:, rows:].isnan().all()
        if kept.stored is None:
            assert cache.stored is None
            continue
        received, sent = cache.stored.tensors, kept.stored.tensors
        assert list(received) == list(sent)
        assert all(torch.equal(received[name], sent[name]) for name in sent)
        start = transfer.buffer.data_ptr()
        assert all(
            start <= t.data_ptr() < start + len(transfer.buffer) for t in received.values() if t.numel()
        )


@pytest.mark.parametrize("method", CASES)
def test_sections_are_those_that_the_manifest_announces(method):
    transfer = Transfer(method)
    announced = announced_sections(SPEC, transfer.resolved)
    sizes = [
        (layer, its.section, its.size_bytes) for layer, sections in enumerate(announced) for its in sections
    ]
    assert sizes == [(layer, section, len(data)) for layer, section, data in transfer.sections]


def test_plain_rows_announce_nothing():
    resolved = resolve_plan(
        plan_for("snapkv"), num_prompt_tokens=9, max_new_tokens=1, num_layers=2, head_dim=DIM
    )
    assert announced_sections(SPEC, resolved) == ()


@pytest.mark.parametrize("method", CASES)
def test_missing_bytes_are_found_at_the_end(method):
    transfer = Transfer(method)
    for layer, section, data in transfer.sections[:-1]:
        transfer.send(layer, section, data)
    with pytest.raises(TransferFailed) as caught:
        transfer.writer.finish()
    assert caught.value.reason == "incomplete"


@pytest.mark.parametrize("method", CASES)
def test_what_prefill_never_makes_is_refused_with_the_layers_last_byte(method):
    """Counts, positions, channels and scales of all ones: negative or NaN."""
    transfer = Transfer(method)
    for _, section, data in transfer.sections:
        if section in (Section.HEAD_ROWS, Section.INDEX, Section.CHANNELS, Section.SCALES):
            data[:] = b"\xff" * len(data)
    with pytest.raises(TransferFailed, match="layer 0, stored: ") as caught:
        transfer.send_all()
    assert caught.value.reason == "packed"


def test_blocks_out_of_order_or_beyond_their_section_are_refused():
    transfer = Transfer("kivi")
    with pytest.raises(TransferFailed, match="SCALES offset 0 came; CODES offset 0 is expected") as caught:
        transfer.send(0, *transfer.sections[1][1:])
    assert caught.value.reason == "order"
    with pytest.raises(TransferFailed, match="the section has") as caught:
        transfer.send(0, Section.CODES, transfer.sections[0][2] + b"\0")
    assert caught.value.reason == "size"
    transfer.send_all()
    with pytest.raises(TransferFailed, match="nothing more") as caught:
        transfer.send(1, Section.VALUES, b"\0")
    assert caught.value.reason == "order"
