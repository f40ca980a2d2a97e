"""Before a worker is ready, every batch size, way of sampling and kind of cache has had its step."""

import pytest
import structlog
import torch
from kvtest.families import FAMILIES
from kvtest.faulty_kernels import install
from kvtest.steps import CountingDevice
from kvtest.waiting import eventually

from kvferry.kernels import dispatch, quarantine
from kvferry.kernels.hsa import triton_kernel
from kvferry.kernels.native import library as native
from kvferry.services.decode import engine
from kvferry.services.decode.config import DecodeConfig
from kvferry.services.decode.slots import MAX_STEPS, StepRunner
from kvferry.services.decode.warm_up import SAMPLING, batch_sizes
from kvferry.shared.device import warm_up
from kvferry.shared.model.loading import load_model
from kvferry.tools.oracle import OneProcessGenerator

METHODS = ("full", "snapkv", "rocketkv", "rdkv", "h2o")
READY_S = 600.0


@pytest.fixture
def device(interpreter, monkeypatch):
    device = CountingDevice()
    monkeypatch.setattr(engine, "step_device", lambda _: device)
    monkeypatch.setattr(warm_up, "applicable_methods", lambda layers: METHODS)
    monkeypatch.setattr(warm_up, "PROMPT_TOKENS", (64, 67))
    monkeypatch.setattr("kvferry.services.decode.warm_up.PROMPT_TOKENS", (64, 67))
    yield device
    quarantine.state.by_op = {}


async def until_ready(made):
    await eventually(lambda: made.service.is_ready, READY_S)


def test_batch_sizes_are_the_powers_of_two_and_the_largest():
    assert batch_sizes(1) == [1]
    assert batch_sizes(6) == [1, 2, 4, 6]
    assert batch_sizes(32) == [1, 2, 4, 8, 16, 32]


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_requests_need_no_capture_that_the_warm_up_has_not_made(
    device, monkeypatch, harness, request_of, small_model
):
    selections = []
    select = triton_kernel.select_tokens
    monkeypatch.setattr(
        triton_kernel,
        "select_tokens",
        lambda heads, scratch: (selections.append(scratch.size.max_pages), select(heads, scratch)),
    )
    made = await harness(warm_up=True, max_batch_size=2)
    assert not made.service.is_ready, "it is warming up"
    assert not (await made.service.status(timeout_s=1)).ready
    await until_ready(made)
    assert made.value("decode_warm_up_ratio") == 1
    assert await made.arena_is_free(within_s=5)
    # dense, sparse and packed; greedy, drawn, drawn from two kinds of parts; one and two slots
    assert device.num_captures == made.value("decode_captures_total", when="warm_up") == 3 * 4 * 2
    assert 128 in selections
    drawn = {"temperature": 1.0, "seed": 3}
    for changes in (
        {},
        drawn,
        {**drawn, "top_p": 0.9},
        {**drawn, "top_k": 40},
        {**drawn, "top_k": 2, "top_p": 0.5},
    ):
        request = request_of(max_tokens=4, **changes)
        generated = OneProcessGenerator(small_model()).generate(
            list(request.prompt_token_ids), plan=request.plan, sampling=request.sampling
        )
        assert await made.tokens(request) == [token.token_id for token in generated]
    assert device.num_captures == 3 * 4 * 2


def test_what_the_largest_warm_up_captures_is_cached():
    """Rows, sparse, packed and quantised, at the default number of sequences; as much is left for load."""
    sizes = batch_sizes(DecodeConfig.model_fields["max_batch_size"].default)
    assert 4 * len(sizes) * len(SAMPLING) < MAX_STEPS / 2


@pytest.mark.timeout(900)
async def test_the_first_kind_takes_every_step_even_without_a_kernel(
    device, monkeypatch, harness, small_model
):
    """As in models with latent rows, whose other kernels are warmed up all the same."""
    monkeypatch.setattr(warm_up, "applicable_methods", lambda layers: ("h2o", "adakv"))
    model, sizes = small_model(), []
    model.before_step = lambda token_ids: sizes.append(len(token_ids))
    await until_ready(await harness(model=model, warm_up=True, max_batch_size=2))
    assert sizes == [*[1, 2] * len(SAMPLING), 1]
    assert device.num_captures == 0


@pytest.mark.timeout(900)
async def test_kinds_without_a_kernel_take_one_step_and_the_log_says_where_the_time_went(
    device, monkeypatch, harness
):
    monkeypatch.setattr(warm_up, "applicable_methods", lambda layers: ("full", "h2o", "snapkv", "quest"))
    launch, launched = StepRunner.launch, []

    def watched(runner, **options):
        step = launch(runner, **options)
        launched.append((step.path.name, step.path.reason, step.host_drawn.shape[1]))
        return step

    monkeypatch.setattr(StepRunner, "launch", watched)
    with structlog.testing.capture_logs() as logs:
        made = await harness(warm_up=True, max_batch_size=2)
        await until_ready(made)
    assert [record for record in launched if record[0] == "eager"] == [("eager", "evict", 1)]
    # quest's first layers are dense, and this model has no others
    assert sorted(record for record in launched if record[0] == "graph") == sorted(
        [("graph", "", 1), ("graph", "", 2)] * 4
    )
    (entry,) = [entry for entry in logs if entry["event"] == "warmed up"]
    assert (entry["kinds"], entry["captures"]) == (2, 8)
    assert 0 <= entry["captures_s"] <= entry["seconds"]
    assert made.value("decode_captures_total", when="warm_up") == 8
    assert made.value("decode_captures_total", when="load") == 0
    assert await made.arena_is_free(within_s=5)


@pytest.mark.timeout(900)
async def test_a_kernel_that_fails_in_the_warm_up_is_quarantined_and_the_worker_becomes_ready(
    device, monkeypatch, harness, request_of
):
    install("hsa", "out_of_resources", monkeypatch.setattr)
    made = await harness(warm_up=True, max_batch_size=1)
    await until_ready(made)
    assert set(quarantine.quarantined()) == {"hsa"}
    assert len(await made.tokens(request_of(method="rocketkv", tokens=16, max_tokens=3))) == 3


async def test_nothing_is_warmed_up_on_a_cpu(harness, monkeypatch):
    native.is_available()  # what it is checked with, once in a process, calls this
    monkeypatch.setattr(torch, "arange", None)
    made = await harness(warm_up=True)
    await until_ready(made)
    assert made.value("decode_warm_up_ratio") == 1


@pytest.mark.timeout(900)
async def test_a_model_with_states_is_warmed_up(device, harness, monkeypatch, tmp_path):
    """Its steps are eager, and their attention's kernels are compiled all the same."""
    monkeypatch.setattr(warm_up, "applicable_methods", lambda layers: ("rocketkv",))
    model = load_model(FAMILIES["qwen3_next"].save(tmp_path / "model"), device="cpu", max_model_len=128)
    assert model.spec.state_layers
    before = dispatch.calls()
    with structlog.testing.capture_logs() as logs:
        made = await harness(model=model, warm_up=True, max_batch_size=1)
        await until_ready(made)
    assert not [entry for entry in logs if entry["log_level"] != "info"]
    assert dispatch.calls()["hsa", "interpreter"] > before.get(("hsa", "interpreter"), 0)
    assert await made.arena_is_free(within_s=5)
