"""No failure of a decode kernel reaches a client: tokens are the torch path's, the op is quarantined."""

import itertools
import pkgutil

import pytest
import torch
from kvtest.decode import oracle_ids
from kvtest.lanes import some
from kvtest.steps import ReplayingDevice

from kvferry.kernels import quarantine
from kvferry.services.decode import engine, step
from kvferry.shared.errors import KvferryError
from kvferry.shared.sampling import sampler

LAUNCHES = {
    "dense_decode": ("dense_decode.triton_kernel.dense_decode_batch", {}),
    "hsa": ("hsa.triton_kernel.append_and_attend_batch", {"method": "rocketkv", "tokens": 16}),
    "trizone": (
        "trizone.triton_kernel.trizone_decode_batch",
        {"method": "rdkv", "tokens": 16, "overrides": {"window": 4, "rebudget_tokens": 0}},
    ),
}


class OutOfResources(Exception):
    """Named as Triton's."""


@pytest.fixture(autouse=True)
def released():
    yield
    quarantine.state.by_op = {}


def replace_launch(monkeypatch, op, launch):
    """Make the op's launch `launch(kernel, number of the call, queries, ...)`."""
    path = f"kvferry.kernels.{LAUNCHES[op][0]}"
    kernel, numbers = pkgutil.resolve_name(path), itertools.count(1)
    monkeypatch.setattr(path, lambda *args, **kwargs: launch(kernel, next(numbers), *args, **kwargs))


def break_launch(monkeypatch, op, *, when):
    """The op's launch raises at every call for which `when(number of the call, queries)` says so. Returns the
    numbers of the failed calls."""
    failed = []

    def launch(kernel, number, queries, *args, **kwargs):
        if when(number, queries):
            failed.append(number)
            raise OutOfResources("out of resource: shared memory, Required: 100, Hardware limit: 1")
        return kernel(queries, *args, **kwargs)

    replace_launch(monkeypatch, op, launch)
    return failed


def spoil_output(monkeypatch, op, *, value, after):
    """The op's launches add a value to some of the output, but for the first ones."""

    def launch(kernel, number, *args, **kwargs):
        kernel(*args, **kwargs)
        if number > after:
            kwargs["output"].view(-1)[::3] += value

    replace_launch(monkeypatch, op, launch)


@pytest.mark.covering(1)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("op", sorted(LAUNCHES))
@pytest.mark.parametrize("first_failure", [1, 4], ids=["first_launch", "in_mid_answer"])
async def test_an_eager_step_whose_kernel_raises_is_answered_by_torch(
    interpreter, monkeypatch, harness, request_of, small_model, op, first_failure
):
    request = request_of(**LAUNCHES[op][1], max_tokens=7)
    expected = oracle_ids(small_model(), request)
    failed = break_launch(monkeypatch, op, when=lambda number, queries: number >= first_failure)
    made = await harness()
    assert await made.tokens(request) == expected
    assert failed == [first_failure], "the kernel is not called again"
    assert quarantine.quarantined()[op].reason == "out_of_resources"
    paths = (await made.service.status(timeout_s=1)).kernel_paths
    assert paths[op] == "torch (quarantined: out_of_resources)"
    assert await made.arena_is_free(within_s=30)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("op", sorted(LAUNCHES))
async def test_a_shape_whose_kernel_raises_runs_eagerly_in_torch(
    runs_ahead, monkeypatch, harness, request_of, small_model, op
):
    request = request_of(**LAUNCHES[op][1], max_tokens=6)
    expected = oracle_ids(small_model(), request)
    break_launch(monkeypatch, op, when=lambda number, queries: True)
    made = await harness()
    assert await made.tokens(request) == expected
    assert quarantine.is_quarantined(op)
    assert made.value("decode_steps_total", path="graph") == 0
    assert await made.arena_is_free(within_s=30)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("op", some(sorted(LAUNCHES), "dense_decode"))
async def test_a_sequence_that_graphs_have_stepped_goes_on_in_torch(
    runs_ahead, monkeypatch, harness, request_of, small_model, op
):
    """The kernel fails when a second sequence joins; graphs have written rows until then."""
    requests = [
        request_of(request_id=name, **LAUNCHES[op][1], max_tokens=max_tokens)
        for name, max_tokens in (("first", 14), ("second", 5))
    ]
    expected = [oracle_ids(small_model(), request) for request in requests]
    break_launch(monkeypatch, op, when=lambda number, queries: len(queries) == 2)
    made = await harness()
    assert await made.one_joins(*requests) == expected
    assert quarantine.is_quarantined(op)
    assert made.value("decode_steps_total", path="graph") >= 1
    assert made.value("decode_steps_total", path="eager") >= 1


@pytest.mark.timeout(900)
async def test_a_capture_that_failed_is_tried_once_more(interpreter, monkeypatch, harness, request_of):
    captures = []

    class Busy(ReplayingDevice):
        def capture(self, run):
            captures.append(1)
            if len(captures) == 1:
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().capture(run)

    monkeypatch.setattr(step, "RETRY_STEPS", 2)
    monkeypatch.setattr(engine, "step_device", lambda device: Busy())
    made = await harness()
    request = request_of(max_tokens=9)
    assert len(await made.tokens(request)) == 9
    assert len(captures) == 2
    assert made.value("decode_steps_total", path="eager", reason="new_shape") == 1
    assert made.value("decode_steps_total", path="eager", reason="capture_failed") == 2
    assert made.value("decode_steps_total", path="graph") == 5
    assert made.value("decode_captures_total") == 1
    assert not quarantine.quarantined()


@pytest.mark.timeout(900)
async def test_a_capture_that_fails_twice_is_not_tried_again(interpreter, monkeypatch, harness, request_of):
    captures = []

    class Incapable(ReplayingDevice):
        def capture(self, run):
            captures.append(1)
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(step, "RETRY_STEPS", 2)
    monkeypatch.setattr(engine, "step_device", lambda device: Incapable())
    made = await harness()
    assert len(await made.tokens(request_of(max_tokens=9))) == 9
    assert len(captures) == 2
    assert made.value("decode_steps_total", path="eager", reason="capture_failed") == 7
    assert made.value("decode_captures_total") == 0


@pytest.mark.timeout(900)
async def test_a_grammar_that_allows_nothing_fails_its_own_sequence_and_no_kernel(
    interpreter, monkeypatch, harness, request_of, small_model
):
    """Its masked logits have no finite maximum either, as those of a kernel that returns NaN."""
    request = request_of(max_tokens=4)
    expected = oracle_ids(small_model(), request)
    made = await harness()
    with monkeypatch.context() as dead_end:
        error = KvferryError("the grammar allows no token at token 1", reason="grammar_dead_end")
        dead_end.setattr(sampler.SequenceSampler, "refusal", lambda sequence_sampler: error)
        draw = sampler.BatchSampler.sample
        dead_end.setattr(
            sampler.BatchSampler,
            "sample",
            lambda *args: (draw(*args)[0], torch.zeros(len(args[1]), dtype=torch.bool)),
        )
        with pytest.raises(KvferryError, match="allows no token"):
            await made.tokens(request)
    assert not quarantine.quarantined()
    assert await made.tokens(request_of(request_id="next", max_tokens=4)) == expected


@pytest.mark.covering(1)
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("op", sorted(LAUNCHES))
@pytest.mark.parametrize("is_captured", [False, True], ids=["eager", "captured"])
async def test_a_kernel_that_returns_nan_is_found_and_its_tokens_are_torch_s(
    interpreter, monkeypatch, harness, request_of, small_model, op, is_captured
):
    """From the fourth launch on; what later layers have written by then is not finite either."""
    if is_captured:
        monkeypatch.setattr(engine, "step_device", lambda device: ReplayingDevice())
    request = request_of(**LAUNCHES[op][1], max_tokens=9)
    expected = oracle_ids(small_model(), request)
    spoil_output(monkeypatch, op, value=float("nan"), after=6)
    made = await harness()
    assert await made.tokens(request) == expected
    assert quarantine.quarantined()[op].reason == "nan"
    assert made.value("decode_shadow_checks_total", result="kernel_wrong") == 1
    assert await made.arena_is_free(within_s=30)


@pytest.mark.covering(1)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("op", sorted(LAUNCHES))
@pytest.mark.parametrize("is_captured", [False, True], ids=["eager", "captured"])
async def test_a_kernel_that_becomes_wrong_is_found_by_the_shadow_check(
    interpreter, monkeypatch, harness, request_of, small_model, op, is_captured
):
    if is_captured:
        monkeypatch.setattr(engine, "step_device", lambda device: ReplayingDevice())
    request = request_of(**LAUNCHES[op][1], max_tokens=9)
    expected = oracle_ids(small_model(), request)
    spoil_output(monkeypatch, op, value=3.0, after=6)
    made = await harness(shadow_check=1)
    assert await made.tokens(request) == expected
    assert quarantine.quarantined()[op].reason == "wrong_result"
    assert made.value("decode_shadow_checks_total", result="same") >= 1
    assert made.value("decode_shadow_checks_total", result="kernel_wrong") == 1


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_a_shadow_check_of_right_kernels_changes_nothing(runs_ahead, harness, request_of, small_model):
    requests = [request_of(request_id=op, **LAUNCHES[op][1], max_tokens=7) for op in sorted(LAUNCHES)]
    made = await harness(shadow_check=2)
    for request in requests:
        assert await made.tokens(request) == oracle_ids(small_model(), request)
    assert not quarantine.quarantined()
    assert made.value("decode_shadow_checks_total", result="same") == 9
    assert made.value("decode_shadow_checks_total") == 9


async def test_a_model_that_is_not_finite_blames_no_kernel(interpreter, harness, request_of):
    made = await harness()
    made.model.edit_logits = lambda positions, logits: logits * float("nan")
    with pytest.raises(KvferryError, match="logits"):
        await made.tokens(request_of(max_tokens=5))
    assert not quarantine.quarantined()
    assert made.value("decode_shadow_checks_total", result="model_wrong") == 1
