"""Layers land where they are attended to however their tensors are cut; what prefill never makes is refused.

Every test holds for each format. Messages pass the wire's cursor first, as they do in its receiver.
"""

import dataclasses
import functools
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvtest.compression import NOT_WRITTEN, Placed, make_inputs, make_spec
from kvtest.packed import unpack_layer
from kvtest.wire import header_of, to_bytes

from kvferry.baselines.think import Think
from kvferry.kernels.packed.layout import LAYOUT_VERSION
from kvferry.services.decode.cache_writer import CacheWriter
from kvferry.shared.cache.arena import ArenaCopier, sequence_layout
from kvferry.shared.compression.compress import compress_prompt
from kvferry.shared.compression.formats import FORMATS, make_formats
from kvferry.shared.compression.formats.evicting import Evicting
from kvferry.shared.compression.formats.packed import PackedCache
from kvferry.shared.compression.formats.rows import RowsCache, WireRows
from kvferry.shared.compression.formats.state import StateLayer
from kvferry.shared.compression.formats.stored import StoredCache
from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.errors import ProtocolMismatch, TransferFailed
from kvferry.shared.model.spec import TORCH_DTYPES, LayerSpec, StateSpec
from kvferry.shared.wire.frames import TransferCursor
from kvferry.shared.wire.messages import (
    BlockHeader,
    FrameHeader,
    LayerHeader,
    MessageType,
    NamedTensor,
    TensorHeader,
    TransferKey,
)

DIM, PROMPT, NEW_ROWS = 6, 81, 3
SPEC = make_spec(num_layers=2, head_dim=DIM)
KEY = TransferKey(transfer_id=1, generation=1)
SPARE_BYTES = 64
STATE = (
    StateSpec(name="conv_0", shape=(5, 4), dtype="float32"),
    StateSpec(name="recurrent_0", shape=(3, 2, 7), dtype="bfloat16"),
)
CASES = {
    "full": {},
    "snapkv": {"tokens": 40},
    "rocketkv": {"tokens": 16},
    "quest": {"tokens": 16},
    "h2o": {"tokens": 40},
    "d2o": {"tokens": 40},
    "rdkv": {"tokens": 40},
    "adakv": {"tokens": 40},
    "think": {"channel_retention": 0.5},
    "snapkv-think": {"tokens": 40},
    "kivi": {"bits": 2},
    "snapkv-kivi": {"tokens": 40},
    "compactor-kivi": {"tokens": 20},
    "rocketkv-kivi": {"tokens": 20, "v_bits": 2},
    "snapkv, wire": {"tokens": 45, "wire_bits": 4},
    "full, wire": {"wire_bits": 8},
    "rdkv, skip": {"tokens": 40, "skip_layers": (1,)},
    "snapkv-kivi, skip": {"tokens": 40, "skip_layers": (0,)},
    "snapkv, sliding": {"tokens": 40, "layers": (LayerSpec(window=18), LayerSpec())},
    "d2o, chunked": {"tokens": 40, "layers": (LayerSpec(), LayerSpec(window=60, is_chunked=True))},
    "snapkv, state": {"tokens": 40, "layers": (LayerSpec(has_rows=False, state=STATE), LayerSpec())},
}
REASONS = {"index", "packed", "layout", "layout_version", "state", "not_finite"}
"""Why content is refused."""


@functools.cache
def compressed(case):
    """Formats and tensors of a prompt's layers."""
    overrides = dict(CASES[case])
    budget = Budget(tokens=overrides.pop("tokens")) if "tokens" in overrides else None
    skip_layers, layers = overrides.pop("skip_layers", ()), overrides.pop("layers", ())
    resolved = resolve_plan(
        plan_for(case.split(",")[0], budget=budget, overrides=overrides, skip_layers=skip_layers),
        num_prompt_tokens=PROMPT,
        max_new_tokens=NEW_ROWS + 1,
        num_layers=2,
        head_dim=DIM,
        layers=layers,
    )
    inputs = [
        dataclasses.replace(make_inputs(PROMPT, head_dim=DIM, seed=layer), layer=layer) for layer in range(2)
    ]
    spec = dataclasses.replace(SPEC, layers=layers)
    states = {layer: make_state(layers[layer].state) for layer in spec.state_layers}
    rows = [inputs[layer] for layer in spec.row_layers]
    measured, tensors = compress_prompt(spec, resolved, rows, states)
    return make_formats(spec, measured), tensors


def make_state(state):
    generator = torch.Generator().manual_seed(9)
    return {
        state_spec.name: torch.randn(state_spec.shape, generator=generator).to(TORCH_DTYPES[state_spec.dtype])
        for state_spec in state
    }


class Transfer:
    """What a sender ships of one prompt, and the two ends of it at decode: the wire's cursor and the writer.

    Attributes:
        layers: the tensors of each layer by name, to be changed by tests that damage them.
        buffer: the sequence's bytes and some that belong to nobody, NaN in every dtype.
    """

    def __init__(self, case):
        self.formats, layers = compressed(case)
        self.layers = [{name: tensor.clone() for name, tensor in tensors.items()} for tensors in layers]
        layout = sequence_layout(self.formats)
        self.buffer = torch.full((layout.size_bytes + SPARE_BYTES,), NOT_WRITTEN, dtype=torch.uint8)
        copier = ArenaCopier(1 << 14, self.buffer.device)
        self.writer = CacheWriter(layout, self.buffer, copier)
        self.cursor = TransferCursor(len(layers))

    def header(self, layer):
        tensors = self.layers[layer].items()
        return header_of(
            layer, [NamedTensor(name=name, tensor=tensor, kind="rows") for name, tensor in tensors]
        )

    def begin(self, header):
        self.cursor.pass_layer(self.cursor.sequence, header)
        self.writer.begin_layer(header)

    def block(self, layer, tensor, data, start, end, *, tensor_bytes=None):
        sizes = [each.nbytes for each in self.layers[layer].values()]
        tensor_bytes = len(data) if tensor_bytes is None else tensor_bytes
        position = {"key": KEY, "layer": layer}
        in_layer = {
            "sequence": self.cursor.sequence,
            "total_bytes": sum(sizes) - sum(sizes[tensor : tensor + 1]) + tensor_bytes,
            "offset": sum(sizes[:tensor]) + start,
        }
        self.cursor.pass_block(FrameHeader(type=MessageType.BLOCK, **position, **in_layer), end - start)
        block = BlockHeader(**position, tensor=tensor, offset=start)
        self.writer.write(block, memoryview(data)[start:end])

    def messages(self, cuts=()):
        """All that is sent, in order: callables, each of them one message."""
        for layer, tensors in enumerate(self.layers):
            yield functools.partial(self.begin, self.header(layer))
            for index, tensor in enumerate(tensors.values()):
                data = to_bytes(tensor)
                edges = sorted({0, len(data), *(cut % len(data) for cut in cuts if data)})
                for start, end in itertools.pairwise(edges):
                    yield functools.partial(self.block, layer, index, data, start, end)

    def send_all(self, cuts=()):
        for message in self.messages(cuts):
            message()
        self.cursor.check_complete()
        return self.writer.finish(0)


def damage(tensor):
    """A tensor of these bytes throughout: negative, or NaN."""
    return torch.full_like(tensor.contiguous().view(torch.uint8), 0xFF).view(tensor.dtype)


def test_every_format_is_among_the_cases():
    kinds = {type(fmt) for case in CASES for fmt in compressed(case)[0]}
    assert kinds == {*FORMATS.values(), Evicting, Think, WireRows}


@given(case=st.sampled_from(list(CASES)), cuts=st.lists(st.integers(0, 9999), max_size=8))
def test_layers_are_the_same_however_their_tensors_are_cut(case, cuts):
    transfer = Transfer(case)
    caches = transfer.send_all(cuts)
    assert (transfer.buffer[-SPARE_BYTES:] == NOT_WRITTEN).all()
    start, end = transfer.buffer.data_ptr(), transfer.buffer.data_ptr() + len(transfer.buffer) - SPARE_BYTES
    for fmt, cache, sent in zip(transfer.formats, caches, transfer.layers, strict=True):
        whole = Placed.of(fmt).open(sent)
        assert type(cache) is type(whole)
        # bit for bit, what was never written too
        for name, region in cache.regions.items():
            assert torch.equal(region.view(torch.uint8), whole.regions[name].view(torch.uint8)), name
            assert start <= region.data_ptr() <= end
        if isinstance(cache, RowsCache):
            assert cache.keys.shape[1] == fmt.rows + NEW_ROWS
            assert cache.keys[:, fmt.rows :].isnan().all()
            assert cache.values[:, fmt.rows :].isnan().all()
            assert (cache.positions is None) == ("index" not in sent)
        if fmt.is_plain:
            assert torch.equal(cache.regions["keys"][:, : fmt.rows], sent["keys"])
            assert torch.equal(cache.regions["values"][:, : fmt.rows], sent["values"])
        if isinstance(cache, StoredCache):
            received = cache.prompt
            assert list(received) == list(sent)
            assert all(torch.equal(received[name], sent[name]) for name in sent)
            assert all(start <= tensor.data_ptr() < end for tensor in received.values() if tensor.numel())
            assert all(rows.shape[1] == NEW_ROWS for rows in (cache.keys, cache.values))
            assert all(rows.isnan().all() for rows in (cache.keys, cache.values))
        if isinstance(cache, PackedCache):
            assert cache.packed.layout == whole.packed.layout
            assert cache.packed.buffer.data_ptr() == cache.regions["packed"].data_ptr()
            assert (cache.regions["packed"][cache.packed.layout.size_bytes :] == NOT_WRITTEN).all()
            for one, other in zip(unpack_layer(cache.packed), unpack_layer(whole.packed), strict=True):
                assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@given(case=st.sampled_from(list(CASES)), cuts=st.lists(st.integers(0, 9999), max_size=4), data=st.data())
def test_missing_messages_are_found_at_the_end(case, cuts, data):
    transfer = Transfer(case)
    messages = list(transfer.messages(cuts))
    for message in messages[: data.draw(st.integers(0, len(messages) - 1))]:
        message()
    for finish in (functools.partial(transfer.writer.finish, 0), transfer.cursor.check_complete):
        with pytest.raises(TransferFailed) as caught:
            finish()
        assert caught.value.reason == "incomplete"


@pytest.mark.parametrize("case", CASES)
def test_missing_bytes_are_counted(case):
    transfer = Transfer(case)
    *messages, last = transfer.messages(cuts=(7,))
    for message in messages:
        message()
    _, _, data, start, end = last.args
    with pytest.raises(TransferFailed, match=f"layer 1 is incomplete: {end - start} bytes are missing"):
        transfer.writer.finish(0)
    last()
    assert len(transfer.writer.finish(0)) == 2
    assert len(data) == end


# ---- content ---------------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("name", "reason", "kind"),
    [
        ("index", "index", TransferFailed),
        ("head_rows", "packed", TransferFailed),
        ("channels", "packed", TransferFailed),
        ("scales", "packed", TransferFailed),
        ("state", "state", TransferFailed),
        ("layout", "layout_version", ProtocolMismatch),
    ],
)
@pytest.mark.parametrize("case", CASES)
def test_what_prefill_never_makes_is_refused_with_the_layers_last_byte(case, name, reason, kind):
    """Counts, positions, channels, scales, scores and versions of all ones: negative or NaN."""
    transfer = Transfer(case)
    if name not in transfer.layers[1]:
        assert name not in transfer.formats[1].tensors()
        return
    if not isinstance(transfer.formats[1], Evicting) and not transfer.formats[1].is_plain:
        reason = "packed" if reason == "index" else reason
    transfer.layers[1][name] = damage(transfer.layers[1][name])
    *messages, last = transfer.messages(cuts=(5, 64))
    for message in messages:
        message()
    with pytest.raises(TransferFailed, match="layer 1: ") as caught:
        last()
    assert (type(caught.value), caught.value.reason) == (kind, reason)
    with pytest.raises(TransferFailed) as caught:
        transfer.writer.finish(0)
    assert caught.value.reason == "incomplete"


@pytest.mark.covering(1)
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("case", CASES)
def test_a_row_or_a_state_with_a_number_that_is_not_finite_is_refused(case, number):
    formats = Transfer(case).formats
    tested = 0
    for layer, fmt in enumerate(formats):
        for name in fmt.finite:
            transfer = Transfer(case)
            if name not in transfer.layers[layer] or not transfer.layers[layer][name].numel():
                continue
            tested += 1
            transfer.layers[layer][name].view(-1)[-1] = number
            message = f"layer {layer}: 1 of .* {name} are not finite"
            with pytest.raises(TransferFailed, match=message) as caught:
                transfer.send_all(cuts=(64,))
            assert caught.value.reason == "not_finite"
    packed = all({"codes", "scales"} <= set(fmt.kinds) and "keys" not in fmt.kinds for fmt in formats)
    assert tested or packed  # those have checks of their own


@pytest.mark.parametrize(
    ("entry", "reason"), [(0, "layout_version"), (1, "layout"), (8, "layout"), (16, "layout")]
)
def test_packed_counts_that_are_not_of_the_announced_bytes_are_refused(entry, reason):
    transfer = Transfer("rdkv")
    assert transfer.layers[0]["layout"][0] == LAYOUT_VERSION
    transfer.layers[0]["layout"][entry] += 1
    with pytest.raises(TransferFailed, match="layer 0: ") as caught:
        transfer.send_all()
    assert caught.value.reason == reason


@given(case=st.sampled_from(list(CASES)), data=st.data())
def test_garbage_becomes_layers_within_bounds_or_a_named_error(case, data):
    transfer = Transfer(case)
    for _ in range(data.draw(st.integers(1, 4))):
        tensors = transfer.layers[data.draw(st.integers(0, 1))]
        content = tensors[data.draw(st.sampled_from(list(tensors)))].view(-1).view(torch.uint8)
        if len(content):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    caches, reason = (), ""
    try:
        caches = transfer.send_all()
    except TransferFailed as error:
        reason = error.reason
    assert bool(caches) != (reason in REASONS)
    assert (transfer.buffer[-SPARE_BYTES:] == NOT_WRITTEN).all()
    for cache in caches:
        if isinstance(cache, PackedCache):
            for keys, values, positions in unpack_layer(cache.packed):
                assert keys.isfinite().all()
                assert values.isfinite().all()
                assert ((positions >= 0) & (positions < PROMPT)).all()
        if isinstance(cache, StateLayer):
            continue  # a step runs on whatever numbers it has
        queries, row = torch.randn(2, 2, DIM), torch.randn(2, DIM)
        output = cache.append_and_attend(queries, row, row, num_appended=0, scaling=0.4)
        assert output.shape == (2, 2, DIM)


# ---- headers ---------------------------------------------------------------------------------------------


def wrong_tensors(tensors):
    """Tensor headers that the layer does not have."""
    first, *rest = tensors
    others = {"float32": "int32", "int32": "float32", "uint8": "int16", "int16": "uint8"}
    return {
        "none": (),
        "one is missing": tuple(rest),
        "one more": (*tensors, TensorHeader(name="more", dtype="uint8", shape=(1,))),
        "another name": (dataclasses.replace(first, name="other"), *rest),
        "another dtype": (dataclasses.replace(first, dtype=others[first.dtype]), *rest),
        "another order": tuple(reversed(tensors)),
        "a row more": (dataclasses.replace(first, shape=(first.shape[0] + 1, *first.shape[1:])), *rest),
        "another rank": (dataclasses.replace(first, shape=(*first.shape, 1)), *rest),
        "a negative size": (dataclasses.replace(first, shape=(-1, *first.shape[1:])), *rest),
        "no shape": (dataclasses.replace(first, shape=()), *rest),
        "beyond memory": (dataclasses.replace(first, shape=(2**31 - 1, *first.shape[1:])), *rest),
    }


@pytest.mark.parametrize("case", CASES)
def test_other_tensors_than_the_layers_are_refused_before_their_bytes(case):
    for what, tensors in wrong_tensors(Transfer(case).header(0).tensors).items():
        transfer = Transfer(case)
        with pytest.raises(TransferFailed, match="layer 0: its tensors are") as caught:
            transfer.writer.begin_layer(LayerHeader(layer=0, tensors=tensors))
        assert caught.value.reason == "layer_header", what
        assert (transfer.buffer == NOT_WRITTEN).all()


@pytest.mark.parametrize("case", CASES)
def test_layers_out_of_order_are_refused(case):
    def refused(begin, header):
        before = transfer.buffer.clone()
        with pytest.raises(TransferFailed) as caught:
            begin(header)
        assert caught.value.reason == "order"
        assert torch.equal(transfer.buffer, before)

    for skips_the_cursor in (False, True):
        transfer = Transfer(case)
        begin = transfer.writer.begin_layer if skips_the_cursor else transfer.begin
        refused(begin, transfer.header(1))
        messages = list(transfer.messages())
        messages[0]()
        refused(begin, transfer.header(0))
        refused(begin, transfer.header(1))
        for message in messages[1:]:
            message()
        refused(begin, transfer.header(1))
        refused(begin, dataclasses.replace(transfer.header(1), layer=2))


@pytest.mark.parametrize("case", CASES)
def test_blocks_out_of_order_or_beyond_their_tensor_are_refused(case):
    transfer = Transfer(case)
    tensors = [to_bytes(tensor) for tensor in transfer.layers[0].values()]
    first, second = tensors[0], tensors[1]

    def refused(reason, *args, **kwargs):
        before = transfer.buffer.clone()
        with pytest.raises(TransferFailed) as caught:
            transfer.block(*args, **kwargs)
        assert caught.value.reason == reason
        assert torch.equal(transfer.buffer, before)

    refused("order", 0, 0, first, 0, 4)  # before the layer's header
    transfer.begin(transfer.header(0))
    refused("order", 0, 1, second, 0, len(second))
    refused("order", 1, 0, first, 0, len(first))
    refused("order", 0, 0, first, 4, len(first))
    refused("size", 0, 0, first + b"\0", 0, len(first) + 1)
    refused("size", 0, 0, first, 0, 4, tensor_bytes=1 << 20)
    refused("size", 0, 0, first, 0, 4, tensor_bytes=len(first) - 1)
    refused("size", 0, 0, first, 0, 0)
    transfer.block(0, 0, first, 0, 4)
    refused("order", 0, 0, first, 0, 4)
    refused("order", 0, 0, first, 8, len(first))
    beyond = b"".join(tensors) + b"\0"
    refused("size", 0, 0, beyond, 4, len(beyond), tensor_bytes=len(first))
    transfer = Transfer(case)
    transfer.send_all()
    refused("order", 1, len(tensors) - 1, tensors[-1], 0, 1)
