"""Each fault of each kernel is found before a worker serves, or at its first call; tokens are torch's.

A GPU's hang ends its process (`tests/shared/test_self_test.py` has such processes), so here a child that only
reports hangs, within the limits of a worker.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from kvtest import faulty_kernels
from kvtest.decode import SPEC, Harness, SmallModel, make_request, oracle_ids
from kvtest.tiny_models import make_model

from kvferry.kernels import dispatch, quarantine
from kvferry.shared.control.messages import GenerateRequest, TokenGenerated
from kvferry.shared.device import self_test
from kvferry.shared.device.kernel_paths import OPS, Role
from kvferry.shared.device.self_test import Limits, model_shapes
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.loading import load_model

RDKV = {"method": "rdkv", "tokens": 16, "overrides": {"window": 4, "rebudget_tokens": 0}}
REQUESTS: dict[str, dict[str, Any]] = {
    "chunk_scores": {"method": "compactor", "tokens": 12},
    "column_sums": {"method": "h2o", "tokens": 12},
    "decoder_ops": {},
    "dense_decode": {},
    "hsa": {"method": "rocketkv", "tokens": 16},
    "kivi": {"method": "kivi", "overrides": {"bits": 4}},
    "knapsack": RDKV,
    "pack": RDKV,
    "packed_check": RDKV,
    "trizone": RDKV,
    "window_scores": {"method": "snapkv", "tokens": 12, "overrides": {"window": 4}},
}
"""A request whose tokens depend on the operator."""
FOUND = ("wrong_result", "nan", "out_of_resources", "compile_error", "exception", "hang")
RAISED = ("out_of_resources", "compile_error", "exception")
"""What a call shows by itself."""
HANGS = """
import json, sys, time
ops = json.loads(sys.argv[1])["ops"]
reports = [{"phase": "ready"}, {"phase": "begin", "name": "a case"}, {"phase": "launched", "name": "a case"}]
print("\\n".join(map(json.dumps, reports)), flush=True)
time.sleep(600)
"""
RUN_S = 0.2
pytestmark = [
    pytest.mark.usefixtures("interpreter", "released"),
    # NumPy's, of the interpreter
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning"),
    pytest.mark.timeout(600),
]


@pytest.fixture
def released() -> Iterator[None]:
    yield
    quarantine.state.by_op = {}


@pytest.fixture(scope="module")
def fused_model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """Of a family whose decoder layers are fused."""
    return load_model(make_model("qwen3", tmp_path_factory.mktemp("models") / "qwen3"), device="cpu")


@dataclass
class Served:
    """An operator's request. Attributes: calls: of its kernel."""

    op: str
    model: Callable[[], LanguageModel]
    calls: list[str] = field(default_factory=list)

    @functools.cached_property
    def request(self) -> GenerateRequest:
        fingerprint = self.model().spec.fingerprint
        return make_request(range(5, 35), **REQUESTS[self.op], max_tokens=4, model_fingerprint=fingerprint)

    def expected(self) -> list[int]:
        """The tokens in one process, of torch."""
        dispatch.configure("torch", self.model().device)
        try:
            ids: list[int] = oracle_ids(self.model(), self.request)
        finally:
            dispatch.configure("triton", self.model().device)
        return ids

    def spoil(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make the kernel fail, and note its calls."""
        faulty_kernels.install(self.op, kind, monkeypatch.setattr)
        module, name = faulty_kernels.LAUNCHES[self.op]
        owner = importlib.import_module(module)
        fault = getattr(owner, name)

        def launch(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(kind)
            return fault(*args, **kwargs)

        monkeypatch.setattr(owner, name, launch)


@pytest.fixture
def served(
    request: pytest.FixtureRequest, fused_model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> Served:
    """All other operators take the torch path, which costs less than the interpreter."""
    op: str = request.param
    monkeypatch.setattr(dispatch, "TORCH_OPS", tuple({*dispatch.TRITON_OPS, *dispatch.TORCH_OPS} - {op}))
    return Served(op, (lambda: fused_model) if op == "decoder_ops" else SmallModel)


async def answer(served: Served, make: Any) -> list[int]:
    made: Harness = await make(model=served.model(), prefill_model=served.model())
    first, events = await made.run(served.request, timeout_s=300)
    assert await made.arena_is_free(within_s=30)
    return [first.token_id, *(event.token.token_id for event in events if isinstance(event, TokenGenerated))]


def test_every_operator_is_in_the_matrix() -> None:
    assert set(REQUESTS) == set(dispatch.TRITON_OPS)
    assert set(FOUND) == set(faulty_kernels.FAULTS) - {"crash"}
    assert SPEC.num_kv_heads > 1


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", FOUND)
@pytest.mark.parametrize("served", dispatch.TRITON_OPS, indirect=True)
async def test_a_fault_that_the_self_test_finds_reaches_no_client(
    served: Served, kind: str, harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = served.expected()
    served.spoil(kind, monkeypatch)
    role: Role = "prefill" if served.op in OPS["prefill"] else "decode"
    monkeypatch.setattr(self_test, "OPS", {role: (served.op,)})
    # without a process of its own the worker runs the cases, with the fault that is installed here
    command = (sys.executable, "-S", "-c", HANGS) if kind == "hang" else ("false",)
    for shape in model_shapes(served.model().spec, served.model().device):
        self_test.self_test(role, shape, command=command, limits=Limits(run_s=RUN_S))
    # bytes and integers are never NaN
    is_integer = served.op in ("knapsack", "pack", "packed_check")
    reason = "wrong_result" if is_integer and kind == "nan" else kind
    assert {op: entry.reason for op, entry in quarantine.quarantined().items()} == {served.op: reason}
    served.calls.clear()
    assert await answer(served, harness) == expected
    assert not served.calls, "a quarantined kernel is not launched"


@pytest.mark.parametrize(
    ("served", "kind"),
    list(zip(dispatch.TRITON_OPS, itertools.cycle(RAISED), strict=False)),
    indirect=["served"],
)
async def test_a_kernel_that_raises_while_serving_is_answered_by_torch(
    served: Served, kind: str, harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = served.expected()
    served.spoil(kind, monkeypatch)
    assert await answer(served, harness) == expected
    assert {op: entry.reason for op, entry in quarantine.quarantined().items()} == {served.op: kind}
    assert len(served.calls) == 1, "the kernel is not called again"
