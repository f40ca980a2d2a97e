"""The warm-up's prompt goes through every method, and so through every kernel of prefill."""

import pytest
import torch
from kvtest.decode import SmallModel
from kvtest.steps import CountingDevice

from kvferry.kernels import dispatch, quarantine
from kvferry.shared.compression.applicable import applicable_methods
from kvferry.shared.compression.draft_steps import DraftSteps
from kvferry.shared.device import warm_up

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")


@pytest.fixture(autouse=True)
def interpreter():
    dispatch.configure("triton", CPU)
    yield
    dispatch.configure("auto", CPU)
    quarantine.state.by_op = {}


@pytest.mark.timeout(900)
@torch.inference_mode()
def test_every_method_and_every_kernel_of_prefill_is_run():
    model, seen = SmallModel(), []
    before = dispatch.calls()
    prompts = list(warm_up.warm_prompts(model, 67, lambda done, what: seen.append((done, what))))
    methods = applicable_methods(model.spec.layers)
    assert [prompt.method for prompt in prompts] == list(methods)
    assert all(len(prompt.tensors) == model.spec.num_layers for prompt in prompts)
    assert [what for _, what in seen] == list(methods)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    for op in ("chunk_scores", "column_sums", "pack", "window_scores"):
        assert dispatch.calls()[op, "interpreter"] > before.get((op, "interpreter"), 0), op
    assert not quarantine.quarantined()


@torch.inference_mode()
def test_a_method_that_fails_is_left_out(monkeypatch):
    compress = warm_up.compress_prompt

    def fail(spec, resolved, layers, states):
        if resolved.method == "snapkv":
            raise RuntimeError("out of memory")
        return compress(spec, resolved, layers, states)

    monkeypatch.setattr(warm_up, "compress_prompt", fail)
    monkeypatch.setattr(warm_up, "applicable_methods", lambda layers: ("full", "snapkv", "streamingllm"))
    prompts = warm_up.warm_prompts(SmallModel(), 40, lambda done, what: None)
    assert [prompt.method for prompt in prompts] == ["full", "streamingllm"]


def test_the_step_of_drafts_is_captured_once_before_requests(monkeypatch):
    monkeypatch.setattr(warm_up, "applicable_methods", lambda layers: ("full", "rdkv-draft"))
    monkeypatch.setattr(warm_up, "PROMPT_TOKENS", (40, 43))
    model, device = SmallModel(), CountingDevice()
    drafts = DraftSteps(model, device)
    warm_up.warm_prefill(model, lambda done, what: None, drafts)
    assert device.num_captures == 1
    assert drafts.is_captured


def test_a_worker_without_kernels_needs_no_warm_up():
    assert warm_up.needs_warm_up("prefill", SmallModel())
    dispatch.configure("auto", CPU)
    assert not warm_up.needs_warm_up("prefill", SmallModel())
