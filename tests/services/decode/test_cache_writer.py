"""Blocks land where they belong however they are cut, and nothing invalid becomes a cache."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels.hsa.reference import page_extremes
from kvferry.services.decode.arena_copier import ArenaCopier
from kvferry.services.decode.cache_writer import CacheWriter
from kvferry.shared.cache.layout import sequence_layout
from kvferry.shared.compression.plan import CompressionPlan, LayerPlan, Part, ResolvedPlan
from kvferry.shared.errors import TransferFailed
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.wire.messages import BlockHeader, Section, TransferKey

HEADS, DIM, PROMPT = 2, 3, 9
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
HSA = Part(name="hsa", params={"page_size": 2, "num_channels": 1, "num_tokens": 2})
LAYERS = (
    LayerPlan(rows=PROMPT),
    LayerPlan(rows=5, attention=HSA),
)


class Transfer:
    """One writer, and the sections to write."""

    def __init__(self):
        resolved = ResolvedPlan(
            plan=CompressionPlan(method="m"),
            method="m",
            num_prompt_tokens=PROMPT,
            max_new_tokens=4,
            layers=LAYERS,
        )
        layout = sequence_layout(SPEC, resolved)
        self.buffer = torch.full((layout.size_bytes,), 0xFF, dtype=torch.uint8)  # NaN in every dtype
        copier = ArenaCopier(1 << 12, self.buffer.device)
        self.writer = CacheWriter(SPEC, layout, self.buffer, copier, resolved=resolved)
        generator = torch.Generator().manual_seed(3)
        self.sections = {}
        for layer, plan in enumerate(LAYERS):
            for section in (Section.KEYS, Section.VALUES):
                self.sections[layer, section] = torch.randn(HEADS, plan.rows, DIM, generator=generator)
        self.index = torch.tensor([[0, 2, 3, 7, 8], [1, 2, 3, 4, 5]], dtype=torch.int32)

    def send(self, layer, section, tensor, cuts=()):
        data = tensor.numpy().tobytes()
        edges = sorted({0, len(data), *(c % len(data) for c in cuts)})
        for start, end in itertools.pairwise(edges):
            header = BlockHeader(
                key=TransferKey(transfer_id=1, generation=1),
                sequence=0,
                layer=layer,
                section=section,
                section_bytes=len(data),
                offset=start,
            )
            self.writer.write(header, memoryview(data[start:end]))

    def send_all(self, cuts=()):
        self.send(1, Section.INDEX, self.index, cuts)
        for (layer, section), tensor in self.sections.items():
            self.send(layer, section, tensor, cuts)


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(0, 10_000), max_size=12))
def test_rows_and_page_extremes_are_the_same_however_sections_are_cut(cuts):
    transfer = Transfer()
    transfer.send_all(cuts)
    caches = transfer.writer.finish()
    for layer, cache in enumerate(caches):
        rows = LAYERS[layer].rows
        assert torch.equal(cache.keys[:, :rows], transfer.sections[layer, Section.KEYS])
        assert torch.equal(cache.values[:, :rows], transfer.sections[layer, Section.VALUES])
        assert cache.keys[:, rows:].isnan().all()
        assert cache.values[:, rows:].isnan().all()
    expected_max, expected_min = page_extremes(transfer.sections[1, Section.KEYS], page_size=2)
    cache = caches[1]
    page_max, page_min = cache.layout.attention.extremes(cache.keys, cache.auxiliary)
    assert torch.equal(page_max[:, :3], expected_max)
    assert torch.equal(page_min[:, :3], expected_min)
    assert page_max[:, 3:].isnan().all()


@pytest.mark.parametrize(
    "index",
    [
        [[0, 2, 3, 7, 9], [1, 2, 3, 4, 5]],
        [[-1, 2, 3, 7, 8], [1, 2, 3, 4, 5]],
        [[0, 2, 3, 7, 8], [1, 2, 2, 4, 5]],
        [[0, 3, 2, 7, 8], [1, 2, 3, 4, 5]],
    ],
    ids=["beyond the prompt", "negative", "twice", "not ascending"],
)
def test_an_invalid_index_fails_the_transfer(index):
    transfer = Transfer()
    with pytest.raises(TransferFailed, match="kept positions must ascend within 0 to 8") as caught:
        transfer.send(1, Section.INDEX, torch.tensor(index, dtype=torch.int32), cuts=(7,))
    assert caught.value.reason == "index"


def test_positions_may_fall_from_one_head_to_the_next():
    transfer = Transfer()
    transfer.send(1, Section.INDEX, torch.tensor([[4, 5, 6, 7, 8], [0, 1, 2, 3, 4]], dtype=torch.int32))


def test_missing_rows_are_found_at_the_end():
    transfer = Transfer()
    transfer.send_all()
    del transfer.sections[1, Section.VALUES]
    other = Transfer()
    other.sections = transfer.sections
    other.send_all()
    with pytest.raises(TransferFailed, match=f"{HEADS * 5 * DIM * 4} bytes of rows"):
        other.writer.finish()


@pytest.mark.parametrize("sent_bytes", [0, 8])
def test_a_missing_or_partial_index_is_found_at_the_end(sent_bytes):
    transfer = Transfer()
    for (layer, section), tensor in transfer.sections.items():
        transfer.send(layer, section, tensor)
    if sent_bytes:
        transfer.send(1, Section.INDEX, transfer.index[0, : sent_bytes // 4])
    with pytest.raises(TransferFailed, match="layer 1 keeps 5 of 9 tokens; its index is missing"):
        transfer.writer.finish()


def test_a_block_beyond_its_section_is_refused():
    transfer = Transfer()
    before = transfer.buffer.clone()
    with pytest.raises(TransferFailed, match="the section has 120"):
        transfer.send(1, Section.KEYS, torch.zeros(HEADS, 6, DIM))
    assert torch.equal(transfer.buffer, before)
