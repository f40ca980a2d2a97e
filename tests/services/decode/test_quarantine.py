"""No failure of a decode kernel reaches a client: tokens are the torch path's, the op is quarantined."""

import asyncio
import contextlib

import pytest
from kvtest.lanes import some
from kvtest.steps import ReplayingDevice

from kvferry.kernels import quarantine
from kvferry.services.decode import engine, step
from kvferry.shared.control.messages import TokenGenerated
from kvferry.shared.errors import KvferryError
from kvferry.tools.oracle import OneProcessGenerator

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
    quarantine.release_all()


def break_launch(monkeypatch, op, *, when):
    """The op's launch raises at every call for which `when(number of the call, queries)` says so. Returns the
    numbers of the failed calls."""
    path = f"kvferry.kernels.{LAUNCHES[op][0]}"
    module, _, name = path.rpartition(".")
    kernel = getattr(__import__(module, fromlist=[name]), name)
    failed, calls = [], []

    def launch(queries, *args, **kwargs):
        calls.append(1)
        if when(len(calls), queries):
            failed.append(len(calls))
            raise OutOfResources("out of resource: shared memory, Required: 100, Hardware limit: 1")
        return kernel(queries, *args, **kwargs)

    monkeypatch.setattr(path, launch)
    return failed


def expected_of(model, request):
    generated = OneProcessGenerator(model).generate(
        list(request.prompt_token_ids), plan=request.plan, sampling=request.sampling
    )
    return [token.token_id for token in generated]


@pytest.mark.covering(1)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("op", sorted(LAUNCHES))
@pytest.mark.parametrize("first_failure", [1, 4], ids=["first_launch", "in_mid_answer"])
async def test_an_eager_step_whose_kernel_raises_is_answered_by_torch(
    interpreter, monkeypatch, harness, request_of, small_model, op, first_failure
):
    request = request_of(**LAUNCHES[op][1], max_tokens=7)
    expected = expected_of(small_model(), request)
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
    expected = expected_of(small_model(), request)
    break_launch(monkeypatch, op, when=lambda number, queries: True)
    made = await harness()
    assert await made.tokens(request) == expected
    assert quarantine.is_quarantined(op)
    assert made.value("decode_steps_total", path="graph") == 0
    assert await made.arena_is_free(within_s=30)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("op", some(sorted(LAUNCHES), "dense_decode"))
async def test_a_sequence_that_graphs_have_stepped_goes_on_in_torch(
    runs_ahead, monkeypatch, harness, request_of, ticket_of, small_model, op
):
    """The kernel fails when a second sequence joins; graphs have written rows until then."""
    requests = [
        request_of(request_id=name, **LAUNCHES[op][1], max_tokens=max_tokens)
        for name, max_tokens in (("first", 14), ("second", 5))
    ]
    expected = [expected_of(small_model(), request) for request in requests]
    break_launch(monkeypatch, op, when=lambda number, queries: len(queries) == 2)
    made = await harness()
    tokens = {request.request_id: [] for request in requests}
    joined = asyncio.Event()

    async def run(request):
        stream, ticket = await ticket_of(made.service, request, timeout_s=600)
        async with contextlib.aclosing(stream):
            first = await asyncio.to_thread(made.shipper.ship, request, ticket)
            tokens[request.request_id].append(first.token_id)
            async for event in stream:
                if isinstance(event, TokenGenerated):
                    tokens[request.request_id].append(event.token.token_id)
                    if len(tokens["first"]) == 3:
                        joined.set()

    async def run_later(request):
        await joined.wait()
        await run(request)

    await asyncio.gather(run(requests[0]), run_later(requests[1]))
    assert list(tokens.values()) == expected
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

    monkeypatch.setattr(step, "RETRY_STEPS", 3)
    monkeypatch.setattr(engine, "step_device", lambda device: Busy())
    made = await harness()
    request = request_of(max_tokens=9)
    assert len(await made.tokens(request)) == 9
    assert len(captures) == 2
    assert made.value("decode_steps_total", path="eager", reason="capture_failed") == 2
    assert made.value("decode_steps_total", path="graph") == 6
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
    assert made.value("decode_steps_total", path="eager", reason="capture_failed") == 8


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
    expected = expected_of(small_model(), request)
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
    expected = expected_of(small_model(), request)
    spoil_output(monkeypatch, op, value=3.0, after=6)
    made = await harness(shadow_check=1)
    assert await made.tokens(request) == expected
    assert quarantine.quarantined()[op].reason == "wrong_result"
    assert made.value("decode_shadow_checks_total", result="same") >= 1
    assert made.value("decode_shadow_checks_total", result="kernel_wrong") == 1


@pytest.mark.timeout(900)
async def test_a_shadow_check_of_right_kernels_changes_nothing(runs_ahead, harness, request_of, small_model):
    requests = [request_of(request_id=op, **LAUNCHES[op][1], max_tokens=7) for op in sorted(LAUNCHES)]
    made = await harness(shadow_check=2)
    for request in requests:
        assert await made.tokens(request) == expected_of(small_model(), request)
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


def spoil_output(monkeypatch, op, *, value, after):
    """The op's launches add a value to some of the output, but for the first ones."""
    path = f"kvferry.kernels.{LAUNCHES[op][0]}"
    module, _, name = path.rpartition(".")
    kernel = getattr(__import__(module, fromlist=[name]), name)
    calls = []

    def launch(queries, *args, **kwargs):
        kernel(queries, *args, **kwargs)
        calls.append(1)
        if len(calls) > after:
            kwargs["output"].view(-1)[::3] += value

    monkeypatch.setattr(path, launch)
