"""A decode step asks the device for nothing, allocates no more from step to step, and runs ahead of the host.

The kernels run in Triton's interpreter on the CPU, through the code that a GPU captures. Triton's own copies
of what it interprets are left out of what is watched.
"""

import asyncio
import contextlib
import itertools
import threading
from collections import Counter
from dataclasses import replace

import pytest
import torch
from kvtest.compression import opened
from kvtest.decode import oracle_ids
from kvtest.steps import CountingDevice, ReplayingDevice
from torch.utils._python_dispatch import TorchDispatchMode

from kvferry.kernels import dispatch, quarantine
from kvferry.services.decode import engine, slots
from kvferry.services.decode.attention import BatchAttention
from kvferry.services.decode.slots import StepRunner
from kvferry.services.decode.step import EAGER_STEPS, BatchSlots, DecodeStep, StepInput
from kvferry.shared.cache.arena import sequence_layout
from kvferry.shared.compression.formats import make_formats
from kvferry.shared.control.messages import TokenGenerated
from kvferry.shared.model.loading import load_model
from kvferry.shared.sampling.params import SamplingParams
from kvferry.shared.sampling.sampler import SequenceSampler
from kvferry.tools.oracle import OneProcessGenerator

aten = torch.ops.aten
WAITS = {
    aten._local_scalar_dense.default,
    aten.is_nonzero.default,
    aten.item.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.unique_consecutive.default,
    aten._unique2.default,
    aten.bincount.default,
    aten.equal.default,
    # what the host has made would be copied to the device
    aten.lift_fresh.default,
}


class NoWait(TorchDispatchMode):
    """Refuses operators that ask the device for a value or a size; counts the others."""

    def __init__(self):
        super().__init__()
        self.operators = Counter()
        self.num_storages = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function not in WAITS, f"{function} waits for the device"
        if function is aten.index.Tensor:
            assert all(i is None or i.dtype != torch.bool for i in args[1]), "a mask selects: its size waits"
        result = function(*args, **(kwargs or {}))
        self.operators[str(function)] += 1
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        self.num_storages += (
            isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in given
        )
        return result


@pytest.fixture(scope="module")
def demo(demo_model_dir):
    return load_model("demo", device="cpu")


def sequences_of(model, request_of, methods, sampling):
    """What a step is given of the requests' prompts, filled as the receiver fills them."""
    oracle, inputs = OneProcessGenerator(model), []
    for method, params in zip(methods, sampling, strict=True):
        request = request_of([i % 40 + 4 for i in range(60)], **method)
        captured = oracle.capture(list(request.prompt_token_ids))
        continuation = oracle.compress(captured, plan=request.plan, max_new_tokens=8)
        formats = make_formats(model.spec, continuation.resolved)
        layers = zip(formats, continuation.compressed, strict=True)
        caches = tuple(opened(fmt, tensors) for fmt, tensors in layers)
        sampler = SequenceSampler(params, request.prompt_token_ids, model.spec.vocab_size)
        first = sampler.sample(captured.logits)
        given = StepInput(
            caches=caches,
            num_appended=0,
            token_id=first.token_id,
            position=60,
            num_left=7,
            stop_ids=frozenset(),
            sampler=sampler,
        )
        inputs.append(given)
    return inputs


def step_over(model, slots, num_slots):
    return DecodeStep(model, slots, num_slots, BatchAttention(slots.attention, num_slots))


@torch.inference_mode()
def test_a_step_waits_for_nothing_and_allocates_no_more_than_the_one_before(interpreter, demo, request_of):
    methods = [{}, {"method": "rocketkv", "tokens": 24}, {"method": "kivi"}]
    sampling = [
        SamplingParams(max_tokens=8, temperature=0.0, repetition_penalty=1.2),
        SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9, top_k=20, min_p=0.01, seed=5),
        SamplingParams(max_tokens=8, temperature=0.0),
    ]
    inputs = sequences_of(demo, request_of, methods, sampling)
    slots = BatchSlots(demo, demo.spec, 3, inputs[0].caches[0].regions["keys"])
    for slot, given in enumerate(inputs):
        slots.place(slot, given)
    step = step_over(demo, slots, 3)
    assert step.attention.is_launched
    step.launch()  # what is imported and compiled at the first time is
    watched = []
    for _ in range(3):
        slots.sampler.refill()
        with NoWait() as mode:
            step.run()
        watched.append(mode)
    assert watched[0].operators.total() > 100
    assert watched[0].operators == watched[1].operators == watched[2].operators
    assert watched[0].num_storages == watched[1].num_storages == watched[2].num_storages
    assert not slots.attention.errors
    assert step.drawn[1:].all()


def runner_of_dense(model, request_of, device, *, max_batch_size=4):
    """A runner on C code, which is fast, and a sequence to give it any number of times."""
    if not dispatch.uses_native("dense_decode", torch.device("cpu")):
        pytest.skip("there is no C compiler")
    (given,) = sequences_of(model, request_of, [{}], [SamplingParams(max_tokens=8, temperature=0.0)])
    # in the same memory, to which all write: C code is given one arena
    layout = sequence_layout([cache.format for cache in given.caches])
    buffer = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    rows = [{name: cache.regions[name][:, :60] for name in ("keys", "values")} for cache in given.caches]
    caches = tuple(layer.place(buffer, tensors) for layer, tensors in zip(layout.layers, rows, strict=True))
    runner = StepRunner(model, device, max_batch_size=max_batch_size, warn=pytest.fail)
    return runner, replace(given, caches=caches)


class Written(TorchDispatchMode):
    """Counts operators and the elements that they write to tensors in place."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.counts["operators"] += 1
        if function in (aten.copy_.default, aten.zero_.default, aten.index_put_.default):
            self.counts["written"] += args[0].numel()
        return result


def writes_of_a_join(model, request_of, method, *, after):
    """What joining a batch writes, for each number of sequences that it already has."""
    greedy = SamplingParams(max_tokens=8, temperature=0.0)
    (given,) = sequences_of(model, request_of, [method], [greedy])
    written = []
    for others in after:
        slots = BatchSlots(model, model.spec, 32, given.caches[0].regions["keys"])
        for slot in range(others):
            slots.place(slot, given)
        with Written() as mode:
            slots.place(others, given)
        written.append(dict(mode.counts))
    return written


@torch.inference_mode()
@pytest.mark.parametrize(
    ("method", "fields"),
    [({}, 3), ({"method": "rocketkv", "tokens": 24}, 9), ({"method": "kivi"}, 10)],
    ids=["dense", "hsa", "kivi"],
)
def test_a_join_writes_one_sequence_s_descriptors_however_many_others_there_are(
    interpreter, demo, request_of, method, fields
):
    written = writes_of_a_join(demo, request_of, method, after=(1, 7, 31))
    assert written[0] == written[1] == written[2]
    # descriptors, lengths and which of them grow; sampling parameters, the last token, stop ids
    descriptors = demo.spec.num_layers * demo.spec.num_kv_heads * (fields + 2)
    assert written[0]["written"] == descriptors + 7 + 4 + 1


@torch.inference_mode()
def test_a_packed_sequence_joins_with_as_many_writes_however_many_others_there_are(
    interpreter, demo, request_of
):
    written = writes_of_a_join(demo, request_of, {"method": "rdkv", "tokens": 24}, after=(1, 31))
    assert written[0] == written[1]


KINDS = {
    "dense": {},
    "hsa": {"method": "rocketkv", "tokens": 24},
    "trizone": {"method": "rdkv", "tokens": 24, "overrides": {"window": 4, "rebudget_tokens": 0}},
    "kivi": {"method": "kivi"},
}


@torch.inference_mode()
@pytest.mark.parametrize("former", KINDS)
def test_a_slot_has_nothing_of_the_sequence_before_it(interpreter, small_model, request_of, former):
    """Another of the former's kind stays in the batch, so that its kernels run; the next is of each kind."""
    model = small_model()
    greedy = SamplingParams(max_tokens=8, temperature=0.0)
    methods = [KINDS[former], KINDS[former], *KINDS.values()]
    first, stays, *others = sequences_of(model, request_of, methods, [greedy] * len(methods))
    for given in others:
        alone = BatchSlots(model, model.spec, 2, given.caches[0].regions["keys"])
        alone.place(0, given)
        alone_step = step_over(model, alone, 1)
        alone_step.launch()
        slots = BatchSlots(model, model.spec, 2, given.caches[0].regions["keys"])
        slots.place(0, first)
        slots.place(1, stays)
        step_over(model, slots, 2).launch()
        slots.remove(0)
        slots.place(0, given)
        step = step_over(model, slots, 2)
        step.launch()
        assert (step.logits[0] - alone_step.logits[0]).abs().max() < 1e-3


@torch.inference_mode()
def test_steps_of_every_size_and_way_of_sampling_stay_captured(small_model, request_of):
    """As many as the warm-up captures of one kind of cache at 32 sequences; they share scratch memory."""
    model, device = small_model(), CountingDevice()
    runner, first = runner_of_dense(model, request_of, device, max_batch_size=32)
    ways = [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 20}, {"repetition_penalty": 1.5}]
    params = [SamplingParams(max_tokens=8, **{"temperature": 0.8, **way}) for way in ways]
    samplers = [SequenceSampler(sampling, (5, 6), model.spec.vocab_size) for sampling in params]
    givens = [replace(first, sampler=sampler) for sampler in samplers]
    sizes = [1, 2, 4, 8, 16, 32]
    for _ in range(2):
        for given in givens:
            for size in sizes:
                slots = [runner.join(given) for _ in range(size)]
                runner.launch().wait(60)
                for slot in reversed(slots):
                    runner.leave(slot)
        assert device.num_captures == len(ways) * len(sizes)


def test_what_refuses_waits_refuses_them():
    values = torch.tensor([1.0, 2.0])
    for wait in (
        lambda: values[0].item(),
        lambda: values[values > 1],
        lambda: values.nonzero(),
        lambda: torch.tensor([1]),
    ):
        with pytest.raises(AssertionError, match="waits"), NoWait():
            wait()


def eager_of_new_shapes(made):
    return made.value("decode_steps_total", path="eager", reason="new_shape")


@torch.inference_mode()
def test_a_new_shape_runs_eagerly_before_it_is_captured_and_draws_the_same_tokens(
    interpreter, small_model, request_of
):
    model, methods = small_model(), list(KINDS.values())
    params = [SamplingParams(max_tokens=8, temperature=0.9, seed=i, presence_penalty=0.5) for i in range(4)]
    params[1] = SamplingParams(max_tokens=8, temperature=0.0)
    givens = sequences_of(model, request_of, methods, params)
    drawn, paths, captured = {}, {}, {}
    for eager_steps in (0, 1):
        runner = StepRunner(model, CountingDevice(), max_batch_size=4, warn=pytest.fail)
        for given in givens:
            runner.join(given)
        launched, captured[eager_steps] = [], []
        for _ in range(3):
            launched.append(runner.launch(eager_steps=eager_steps))
            launched[-1].wait(60)
            captured[eager_steps].append(runner.captures.number)
        drawn[eager_steps] = [step.drawn() for step in launched]
        paths[eager_steps] = [(step.path.name, step.path.reason) for step in launched]
    assert paths == {0: [("graph", "")] * 3, 1: [("eager", "new_shape"), ("graph", ""), ("graph", "")]}
    assert captured == {0: [1, 1, 1], 1: [0, 1, 1]}
    assert drawn[0] == drawn[1]
    assert len({tuple(tokens) for tokens in zip(*drawn[0][0].values(), strict=True)}) > 1


@torch.inference_mode()
def test_a_capture_after_eager_steps_is_told_that_it_needs_no_warm_up(small_model, request_of):
    class Device(CountingDevice):
        num_warm = 0

        def capture_warm(self, run):
            self.num_warm += 1
            return super().capture_warm(run)

    device = Device()
    runner, given = runner_of_dense(small_model(), request_of, device)
    runner.join(given)
    for _ in range(3):
        runner.launch(eager_steps=1).wait(60)
    assert (device.num_warm, device.num_captures) == (1, 1)
    runner = StepRunner(small_model(), device, max_batch_size=4, warn=pytest.fail)
    runner.join(given)
    runner.launch().wait(60)
    assert (device.num_warm, device.num_captures) == (1, 2)


@torch.inference_mode()
def test_a_graph_whose_kernel_is_quarantined_is_not_replayed(interpreter, demo, request_of):
    """Not only attention's: every op that was launched in the capture."""
    device = CountingDevice()

    def joined(device):
        runner = StepRunner(demo, device, max_batch_size=4, warn=pytest.fail)
        (given,) = sequences_of(demo, request_of, [{}], [SamplingParams(max_tokens=8, temperature=0.0)])
        runner.join(given)
        return runner

    def next_token(runner):
        launched = runner.launch()
        launched.wait(60)
        return launched.drawn()[0][0]

    whole, runner = joined(CountingDevice()), joined(device)
    expected = [next_token(whole) for _ in range(4)]
    tokens = [next_token(runner) for _ in range(2)]
    step = runner._step
    assert {"dense_decode", "decoder_ops"} <= {op for op, path in step._calls if path != "torch"}
    try:
        quarantine.quarantine("sampling", "nan")  # of none of its kernels
        tokens.append(next_token(runner))
        assert (device.num_captures, runner._step) == (1, step)
        quarantine.quarantine("decoder_ops", "nan")
        tokens.append(next_token(runner))
        assert device.num_captures == 2
        assert not quarantine.uses_quarantined(runner._step._calls)
    finally:
        quarantine.state.by_op = {}
    assert tokens == expected


@torch.inference_mode()
def test_the_steps_used_last_stay_and_share_their_attention(monkeypatch, small_model, request_of):
    monkeypatch.setattr(slots, "MAX_STEPS", 2)
    device = CountingDevice()
    runner, given = runner_of_dense(small_model(), request_of, device)
    drawn = replace(given, sampler=SequenceSampler(SamplingParams(max_tokens=8, temperature=1.0), (5,), 50))

    def captures_of(*givens):
        before, slots = device.num_captures, [runner.join(each) for each in givens]
        runner.launch().wait(60)
        for slot in reversed(slots):
            runner.leave(slot)
        return device.num_captures - before

    assert [captures_of(each) for each in (given, drawn, given, drawn)] == [1, 1, 0, 0]
    greedy_one, drawn_one = runner._steps.values()
    assert greedy_one.attention is drawn_one.attention
    assert captures_of(given, given) == 1, "the greedy step of one sequence gave way"
    assert [captures_of(each) for each in (drawn, given)] == [0, 1]
    assert len(runner._steps) == 2


async def test_while_sequences_wait_a_new_shape_is_captured_later(monkeypatch, harness, request_of):
    """One sequence at a time: the second waits for all of the first one's steps."""
    if not dispatch.uses_native("dense_decode", torch.device("cpu")):
        pytest.skip("there is no C compiler")
    monkeypatch.setattr(engine, "step_device", lambda device: ReplayingDevice())
    made = await harness(max_batch_size=1)
    both_are_there, submit, num_submitted = threading.Event(), made.service._engine.submit, itertools.count(1)

    def submit_and_tell(*args):
        submit(*args)
        if next(num_submitted) == 2:
            both_are_there.set()

    monkeypatch.setattr(made.service._parts._listener, "_submit", submit_and_tell)
    made.model.before_step = lambda token_ids: both_are_there.wait(60)
    requests = [request_of(request_id=name, max_tokens=max_tokens) for name, max_tokens in NEXT_TO_EACH_OTHER]
    await made.together(requests)
    # the very first step began before the second sequence came
    assert eager_of_new_shapes(made) == EAGER_STEPS
    assert made.value("decode_captures_total", when="load") == 1
    alone = request_of(max_tokens=5, temperature=1.0, seed=3)
    await made.tokens(alone)
    assert eager_of_new_shapes(made) == EAGER_STEPS + 1, "nobody waited"
    assert made.value("decode_captures_total", when="load") == 2


NEXT_TO_EACH_OTHER = (("runs", 12), ("waits", 6))
CASES = [
    {"temperature": 1.0, "seed": 4, "top_p": 0.8, "frequency_penalty": 0.5, "logprobs": 2, "max_tokens": 5},
    {"method": "rocketkv", "tokens": 16, "prompt": [9] * 50, "max_tokens": 4},
    {"method": "rdkv", "tokens": 16, "overrides": {"window": 4, "rebudget_tokens": 0}, "max_tokens": 3},
    {"method": "compactor-kivi", "tokens": 12, "prompt": [i * 7 % 50 for i in range(60)], "max_tokens": 3},
    {"method": "kivi", "overrides": {"bits": 8}, "prompt": [i * 7 % 50 for i in range(70)], "max_tokens": 4},
    {"method": "snapkv-kivi", "tokens": 12, "prompt": [i * 5 % 50 for i in range(90)], "max_tokens": 3},
]


@pytest.mark.timeout(900)
async def test_running_ahead_changes_no_token(runs_ahead, harness, request_of, small_model):
    """Every batched kind, sequences that join and end at other times."""
    made = await harness(max_batch_size=2)
    requests = [request_of(request_id=str(i), **case) for i, case in enumerate(CASES)]
    tokens = await made.together(requests)
    expected = [oracle_ids(small_model(), request) for request in requests]
    assert [[t.token_id for t in ids] for ids in tokens] == expected
    assert all(len(t.top_logprobs) == 2 for t in tokens[0])
    graph, new_shape = made.value("decode_steps_total", path="graph"), eager_of_new_shapes(made)
    assert graph > 0
    assert made.value("decode_steps_total") == graph + new_shape
    assert 0 < made.value("decode_captures_total", when="load") == made.value("decode_captures_total")
    assert await made.arena_is_free(within_s=30)


@pytest.mark.timeout(900)
async def test_a_stop_string_and_a_closed_stream_end_a_sequence_that_a_step_was_launched_for(
    runs_ahead, harness, request_of, ticket_of
):
    made = await harness()
    free = await made.tokens(request_of(max_tokens=8))
    words = [made.service._tokenizer.decode([token]) for token in free]
    at = next(i for i in range(1, 8) if words[i].strip())
    _, events = await made.run(request_of(max_tokens=20, stop=(words[at],)), timeout_s=300)
    assert events[-1].finish_reason == "stop"
    assert events[-1].num_tokens <= at + 1
    stream, ticket = await ticket_of(made.service, request_of(max_tokens=300), timeout_s=300)
    async with contextlib.aclosing(stream):
        await asyncio.to_thread(made.shipper.ship, request_of(max_tokens=300), ticket)
        async for event in stream:
            if isinstance(event, TokenGenerated):
                break
    assert await made.arena_is_free(within_s=60)


async def test_an_attention_without_a_kernel_runs_eagerly_and_is_named(
    runs_ahead, harness, request_of, small_model
):
    made = await harness()
    request = request_of(method="h2o", tokens=16, max_tokens=4)
    assert await made.tokens(request) == oracle_ids(small_model(), request)
    assert made.value("decode_steps_total", path="eager", reason="evict") == 3
    assert made.value("decode_steps_total") == 3


@pytest.mark.timeout(900)
async def test_a_sequence_without_a_kernel_runs_beside_the_others_not_in_their_step(
    runs_ahead, harness, request_of, small_model
):
    """It joins while their steps run ahead, and ends before they do."""
    made = await harness()
    sizes = []
    made.model.before_step = lambda token_ids: sizes.append(len(token_ids))
    requests = [
        request_of(request_id="captured", max_tokens=14),
        request_of(request_id="beside", method="h2o", tokens=16, max_tokens=4),
    ]
    expected = [oracle_ids(small_model(), request) for request in requests]
    assert await made.one_joins(*requests) == expected
    assert set(sizes) == {1}, "no step had both"
    assert made.value("decode_steps_total", path="eager", reason="evict") == 3
    assert made.value("decode_steps_total", path="eager") == 3 + eager_of_new_shapes(made)
    assert made.value("decode_steps_total", path="graph") + eager_of_new_shapes(made) >= 13
    assert made.value("decode_steps_total", path="graph") > 0
    assert await made.arena_is_free(within_s=30)


async def test_the_cpu_steps_eagerly_and_says_so(harness, request_of):
    made = await harness()
    await made.tokens(request_of(max_tokens=4))
    assert made.value("decode_steps_total", path="eager", reason="cpu") == 3
    assert (await made.service.status(timeout_s=1)).kernel_paths["decode_step"] == "eager"
