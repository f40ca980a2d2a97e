"""One sequence's failure inside a step stays its own."""

import pytest
import torch
from kvtest.compression import Placed, make_resolved, make_spec, one_format, packed_tensors
from kvtest.reference.dense import dense_decode
from torch.utils._python_dispatch import TorchDispatchMode

from kvferry.kernels import dispatch
from kvferry.kernels.packed.packing import pack_layer
from kvferry.services.decode.attention import BatchAttention, SlotAttention
from kvferry.shared.cache.arena import sequence_layout
from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.plan import LayerPlan, Part

SPEC = make_spec()
NOT_WRITTEN = 0xFF
"""A byte that makes every floating-point number NaN."""


def rows_of(fmt, generator):
    """K and V of a layer's prompt."""
    shape = (fmt.shape.num_kv_heads, fmt.rows, fmt.shape.head_dim)
    return {name: torch.randn(*shape, generator=generator) for name in ("keys", "values")}


def open_layer(fmt, regions, tensors):
    """A layer whose tensors have arrived."""
    for name, tensor in tensors.items():
        regions[name][:, : fmt.rows] = tensor
    return fmt.open(regions, tensors)


def make_caches(*rows):
    """Sequences in one memory, with room for one more row each, NaN where nothing has been written."""
    layouts = []
    for num_rows in rows:
        plan = make_resolved(*(LayerPlan(rows=num_rows),) * 2, num_prompt_tokens=num_rows, max_new_tokens=2)
        layouts.append(sequence_layout(make_formats(SPEC, plan)))
    sizes = [layout.size_bytes for layout in layouts]
    buffers = torch.full((sum(sizes),), NOT_WRITTEN, dtype=torch.uint8).split(sizes)
    generator = torch.Generator().manual_seed(0)
    return [
        [
            open_layer(layer.format, layer.views(buffer), rows_of(layer.format, generator))
            for layer in layout.layers
        ]
        for layout, buffer in zip(layouts, buffers, strict=True)
    ]


def test_a_full_cache_is_recorded_for_its_sequence_and_the_other_goes_on():
    caches = make_caches(5, 3)
    slots, attention = placed(caches, num_appended=[1, 0])  # the first has used its one spare row already
    for layer in range(2):
        queries, keys, values = torch.randn(2, 2, 2, 8), torch.randn(2, 2, 8), torch.randn(2, 2, 8)
        output = attention(layer, queries, keys, values, 0.3)
        cache = caches[1][layer]
        assert torch.equal(cache.keys[:, 3], keys[1])
        assert torch.equal(cache.values[:, 3], values[1])
        expected = dense_decode(queries[1], cache.keys, cache.values, scaling=0.3)
        torch.testing.assert_close(output[1], expected, atol=2e-6, rtol=2e-6)
        assert not output[0].any()
    assert list(slots.errors) == [0]
    assert isinstance(slots.errors[0], IndexError)


class OperatorCount(TorchDispatchMode):
    """How many torch operators ran."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def count_operators(attention, *, num_kv_heads, rows):
    """Operators of one token in one layer."""
    fmt = one_format(
        attention, rows=rows, num_prompt_tokens=rows, max_new_tokens=2, num_kv_heads=num_kv_heads
    )
    cache = Placed.of(fmt).open(rows_of(fmt, torch.Generator().manual_seed(0)))
    queries, row = torch.randn(num_kv_heads, 2, 8), torch.randn(num_kv_heads, 8)
    # tables that layers share are made at the first call for a length
    cache.append_and_attend(queries, row, row, num_appended=0, scaling=0.3)
    with OperatorCount() as operators:
        cache.append_and_attend(queries, row, row, num_appended=0, scaling=0.3)
    return operators.count


@pytest.mark.parametrize(
    "attention",
    [
        Part(name="dense"),
        Part(name="hsa", params={"page_size": 3, "num_channels": 5, "num_tokens": 6}),
        Part(name="quest", params={"page_size": 3, "num_tokens": 6}),
        Part(name="sparq", params={"num_channels": 5, "num_tokens": 6}),
        Part(name="exact_topk", params={"num_tokens": 6}),
    ],
    ids=lambda part: part.name,
)
def test_a_step_takes_as_many_operators_however_many_kv_heads_and_tokens_there_are(attention):
    few = count_operators(attention, num_kv_heads=1, rows=19)
    assert count_operators(attention, num_kv_heads=8, rows=19) == few
    assert count_operators(attention, num_kv_heads=1, rows=1999) == few


HSA = Part(name="hsa", params={"page_size": 3, "num_channels": 5, "num_tokens": 6})
HSA_FINE = Part(name="hsa", params={"page_size": 1, "num_channels": 8, "num_tokens": 4})
QUEST = Part(name="quest", params={"page_size": 3, "num_tokens": 6})
PACKED = Part(name="rdkv", params={"budget_tokens": 40})
STEPS = 2


def fill_arena(plans):
    """Sequences of these (rows, attention of each layer) in one arena; packed where rows are None."""
    sizes = []
    for rows, *kinds in plans:
        part = Part(name="rows") if rows else PACKED
        layers = (LayerPlan(rows=rows or 40, attention=kind, representation=part) for kind in kinds)
        plan = make_resolved(
            *layers,
            num_prompt_tokens=rows or 40,
            max_new_tokens=STEPS + 1,
            method="full" if rows else "rdkv",
        )
        sizes.append(sequence_layout(make_formats(SPEC, plan)))
    arena = torch.full((sum(layout.size_bytes for layout in sizes),), NOT_WRITTEN, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(1)
    sequences, start = [], 0
    for (rows, *_), layout in zip(plans, sizes, strict=True):
        buffer = arena[start : start + layout.size_bytes]
        start += layout.size_bytes
        caches = []
        for layer in layout.layers:
            fmt, regions = layer.format, layer.views(buffer)
            if rows:
                caches.append(open_layer(fmt, regions, rows_of(fmt, generator)))
                continue
            tensors = packed_prompt(generator)
            packed = torch.cat([tensor for name, tensor in tensors.items() if name != "layout"])
            regions["packed"][: len(packed)] = packed
            caches.append(fmt.open(regions, tensors))
        sequences.append(tuple(caches))
    return sequences


def packed_prompt(generator):
    widths = torch.tensor([2, 4, 8, 16], dtype=torch.uint8)
    keys, values = torch.randn(2, 2, 40, 8, generator=generator)
    bits = [widths[torch.randint(4, (2, n), generator=generator)] for n in (8, 40)]
    return packed_tensors(pack_layer(keys, values, *bits))


MIXED = [
    (5, Part(name="dense"), HSA),
    (None, Part(name="dense"), Part(name="dense")),
    (23, HSA, HSA_FINE),
    (1, Part(name="dense"), Part(name="dense")),
    (12, QUEST, HSA),
]


def placed(sequences, *, num_slots=None, num_appended=None):
    """Slots with these sequences, and attention over them."""
    num_slots = len(sequences) if num_slots is None else num_slots
    slots = SlotAttention(SPEC, num_slots, sequences[0][0].regions["keys"])
    for slot, caches in enumerate(sequences):
        slots.place(slot, caches, num_appended[slot] if num_appended else 0)
    return slots, BatchAttention(slots, num_slots)


def run_steps(plans, *, num_slots, active=None):
    """Outputs of a few steps, `[STEPS, 2, S, H_kv, G, D]`, and the batch's caches; the same at every call."""
    sequences = fill_arena(plans)
    slots, attention = placed(sequences, num_slots=num_slots)
    generator = torch.Generator().manual_seed(2)
    outputs = []
    for step in range(STEPS):
        if step:
            attention.advance(torch.ones(num_slots, dtype=torch.int64) if active is None else active)
        for layer in range(2):
            queries = torch.randn(num_slots, 2, 2, 8, generator=generator)
            keys, values = torch.randn(2, num_slots, 2, 8, generator=generator)
            outputs.append(attention(layer, queries, keys, values, 0.3).clone())
    assert not slots.errors
    return torch.stack(outputs).view(STEPS, 2, num_slots, 2, 2, 8), sequences


@pytest.fixture
def interpreter():
    dispatch.configure("triton", torch.device("cpu"))
    yield
    dispatch.configure("auto", torch.device("cpu"))


def test_kernels_attend_a_batch_of_every_kind_as_each_sequence_alone(interpreter):
    """Ragged lengths, three kinds and one without a kernel, layers that differ, empty slots."""
    outputs, sequences = run_steps(MIXED, num_slots=6)
    dispatch.configure("torch", torch.device("cpu"))
    expected, expected_sequences = run_steps(MIXED, num_slots=6)
    torch.testing.assert_close(outputs, expected, rtol=2e-3, atol=2e-3)
    assert not outputs[:, :, len(MIXED) :].any()
    for caches, others in zip(sequences, expected_sequences, strict=True):
        for cache, other in zip(caches, others, strict=True):
            rows = cache.format.rows + STEPS
            assert torch.equal(cache.keys[:, :rows], other.keys[:, :rows])
            assert torch.equal(cache.values[:, :rows], other.values[:, :rows])


def test_a_slot_that_is_not_active_writes_nothing_and_its_output_is_zero(interpreter):
    active = torch.tensor([1, 0, 1, 0])
    outputs, sequences = run_steps(MIXED[:4], num_slots=4, active=active)
    assert outputs[:, :, 0].any()
    assert outputs[0, :, 1].any()
    # what is packed is attended all the same; nobody looks at it
    assert not outputs[1:, :, 3].any()
    for cache in sequences[3]:
        assert cache.keys[:, : cache.format.rows + 1].isfinite().all()
        assert cache.keys[:, cache.format.rows + 1 :].isnan().all()


def test_a_layer_takes_as_many_launches_however_many_sequences_there_are(interpreter):
    def launches(copies):
        sequences = fill_arena([plan for plan in MIXED[:3] for _ in range(copies)])
        _, attention = placed(sequences)
        before = dispatch.calls()
        num_slots = len(sequences)
        attention(0, *(torch.zeros(num_slots, 2, *size, 8) for size in ((2,), (), ())), 0.3)
        return {op: count - before.get(op, 0) for op, count in dispatch.calls().items()}

    one = launches(1)
    assert {op: count for op, count in one.items() if count} == {
        ("dense_decode", "interpreter"): 1,
        ("hsa", "interpreter"): 1,
        ("trizone", "interpreter"): 1,
    }
    assert {op: count for op, count in launches(2).items() if count} == {
        op: count for op, count in one.items() if count
    }


def test_batches_whose_pages_want_other_launches_share_none(interpreter):
    """Pages of one token have a launch of their own: sizes alike otherwise are not enough."""
    of_one = Part(name="hsa", params=dict(HSA.params) | {"page_size": 1})
    sequences = fill_arena([(20, HSA, HSA), (20, of_one, of_one), (20, HSA, of_one)])
    signatures = {placed([caches])[0].signature() for caches in sequences}
    assert len(signatures) == 3


def test_batches_of_one_shape_share_memory_and_launches(interpreter):
    """Sequences that take the slots of others attend as they would in a batch of their own."""
    plans = [*MIXED[:3], (7, *MIXED[0][1:]), MIXED[1], (20, HSA, HSA_FINE)]
    sequences = fill_arena(plans)
    slots, attention = placed(sequences[:3])
    assert slots.signature() == placed(sequences[3:])[0].signature()
    assert slots.signature() != placed(sequences[:2], num_slots=3)[0].signature()
    inputs = [torch.randn(3, 2, 2, 8), *torch.randn(2, 3, 2, 8)]
    attention(0, *inputs, 0.3)
    for slot, caches in enumerate(sequences[3:]):
        slots.remove(slot)
        slots.place(slot, caches, 0)
    assert torch.equal(attention(0, *inputs, 0.3).clone(), placed(sequences[3:])[1](0, *inputs, 0.3))


@pytest.mark.parametrize("path", ["triton", "torch"])
def test_a_sequence_that_joins_or_leaves_changes_no_other_output(interpreter, path):
    """Each one's outputs are those it has in a batch that never changes, wherever it is placed and when."""
    dispatch.configure(path, torch.device("cpu"))
    plans = [MIXED[i] for i in (2, 1, 0, 4)]
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(3, 2, 4, 2, 4, 8, generator=generator)  # steps, layers, sequences

    def attend(attention, slots_of, step):
        attended = {}
        for layer in range(2):
            rows = torch.zeros(4, 2, 4, 8)
            for sequence, slot in slots_of.items():
                rows[slot] = inputs[step - started[sequence], layer, sequence]
            output = attention(layer, rows[:, :, :2], rows[:, :, 2], rows[:, :, 3], 0.3)
            for sequence, slot in slots_of.items():
                attended[sequence, step - started[sequence], layer] = output[slot].clone()
        return attended

    sequences, started = fill_arena(plans), dict.fromkeys(range(4), 0)
    expected = {}
    _, attention = placed(sequences)
    for step in range(STEPS):
        expected |= attend(attention, {i: i for i in range(4)}, step)
        attention.advance(torch.ones(4, dtype=torch.int64))

    sequences, found, slots_of = fill_arena(plans), {}, {}
    slots = SlotAttention(SPEC, 4, sequences[0][0].regions["keys"])
    for step, (leaving, joining) in enumerate([([], [3, 1]), ([], [0]), ([3, 1], [2])]):
        for sequence in leaving:
            slots.remove(slots_of.pop(sequence))
        for sequence in joining:
            slot = min({0, 1, 2, 3} - set(slots_of.values()))
            slots.place(slot, sequences[sequence], 0)
            slots_of[sequence], started[sequence] = slot, step
        attention = BatchAttention(slots, 4)
        found |= attend(attention, slots_of, step)
        attention.advance(torch.tensor([int(slot in slots_of.values()) for slot in range(4)]))
    assert not slots.errors
    for key, output in found.items():
        torch.testing.assert_close(output, expected[key], rtol=2e-3, atol=2e-3)
