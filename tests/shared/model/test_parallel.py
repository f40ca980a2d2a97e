"""A model in several ranks, real gloo processes, beside the same model in one."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import kvtest
import pytest
import torch
from kvtest.families import FAMILIES
from kvtest.lanes import some
from kvtest.rank import ATTENDING_RANK, attention_of
from kvtest.tiny_models import make_config
from torch import Tensor

from kvferry.models import DEMO_MODEL
from kvferry.shared.compression.formats import compress_layer, make_formats
from kvferry.shared.compression.formats.interface import Encoded, Tensors
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import Budget, ResolvedPlan
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.errors import (
    ConfigurationError,
    ContextLengthExceeded,
    UnsupportedModel,
    WorkerUnavailable,
)
from kvferry.shared.model.bridge import TransformersModel
from kvferry.shared.model.interface import Division, LanguageModel
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.model_types import PARALLEL_TYPES
from kvferry.shared.model.parallel import passes
from kvferry.shared.model.parallel.lead import LeadingRank
from kvferry.shared.model.parallel.model import ParallelModel, load_parallel_model
from kvferry.shared.model.parallel.ranks import backend_for
from kvferry.shared.model.question import Question
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.model.support import check_parallel
from kvferry.shared.wire.messages import TransferKey

# A process has one group of ranks at a time: the last tests end the one that those before share.
pytestmark = pytest.mark.random_order(disabled=True)

TOLERANCE = {"rtol": 2e-3, "atol": 2e-3}
"""float32, with sums in another order."""


def text_type(family: str) -> str:
    return str(FAMILIES[family].config().get_text_config().model_type)


_SUPPORTED = [family for family in sorted(FAMILIES) if text_type(family) in PARALLEL_TYPES]


class Layers:
    """Observes a pass: stores what it is given. Args: before: layers of the tokens before it."""

    def __init__(self, before: Layers | None = None) -> None:
        self.given: dict[int, tuple[Tensor, ...]] = {}
        self._before = before

    def history(self, layer: int) -> tuple[Tensor, Tensor] | None:
        if self._before is None:
            return None
        return self._before.given[layer][1], self._before.given[layer][2]

    def layer_done(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        self.given[layer] = (queries.clone(), keys.clone(), values.clone(), torch.tensor(scaling))


class Interrupting(Layers):
    """Calls something in one layer."""

    def __init__(self, layer: int, action: Callable[[], object], *, in_history: bool = False) -> None:
        super().__init__()
        self._layer, self._action, self._in_history = layer, action, in_history

    def history(self, layer: int) -> None:
        if layer == self._layer and self._in_history:
            self._action()

    def layer_done(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        super().layer_done(layer, queries, keys, values, scaling)
        if layer == self._layer and not self._in_history:
            self._action()


def ids(num_tokens: int, seed: int) -> Tensor:
    return torch.randint(8, 600, (num_tokens,), generator=torch.Generator().manual_seed(seed))


def assert_same_passes(model: LanguageModel, one: LanguageModel) -> None:
    assert model.spec == one.spec
    first, expected = Layers(), Layers()
    logits = model.prefill(ids(70, 1), start=0, observer=first)
    torch.testing.assert_close(logits, one.prefill(ids(70, 1), start=0, observer=expected), **TOLERANCE)
    more, more_expected = Layers(first), Layers(expected)
    logits = model.prefill(ids(9, 2), start=70, observer=more, num_queries=3)
    expected_logits = one.prefill(ids(9, 2), start=70, observer=more_expected, num_queries=3)
    torch.testing.assert_close(logits, expected_logits, **TOLERANCE)
    for layers, reference in ((first, expected), (more, more_expected)):
        assert layers.given.keys() == reference.given.keys() == set(range(one.spec.num_layers))
        for layer, given in layers.given.items():
            torch.testing.assert_close(given, reference.given[layer], **TOLERANCE)
    step = (ids(3, 3), torch.tensor([4, 40, 9]))
    torch.testing.assert_close(
        model.decode(*step, attention=attention_of(0)),
        one.decode(*step, attention=attention_of(0)),
        **TOLERANCE,
    )


@pytest.fixture(scope="module", autouse=True)
def helpers_in_children() -> Iterator[None]:
    """Child processes find this test's helpers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(kvtest.__path__[0]).parent), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def lead() -> Iterator[LeadingRank]:
    lost: list[Exception] = []
    lead = LeadingRank(2, backend="gloo", num_threads=1, on_lost=lost.append, follower_class=ATTENDING_RANK)
    try:
        lead.join()
        yield lead
    finally:
        lead.close()
    assert not lost


def load(lead: LeadingRank, folder: Path | str) -> ParallelModel:
    lead.call("load", folder, "cpu", "auto", 0)
    part: TransformersModel = load_model(folder, device="cpu", ranks=lead)
    return ParallelModel(part, lead)


@pytest.fixture(scope="module")
def demo(lead: LeadingRank) -> ParallelModel:
    return load(lead, DEMO_MODEL)


@pytest.fixture(scope="module")
def one() -> TransformersModel:
    return load_model(DEMO_MODEL, device="cpu")


def test_passes_of_two_ranks_are_those_of_one(demo: ParallelModel, one: TransformersModel) -> None:
    assert demo.num_ranks == 2
    assert_same_passes(demo, one)
    keys = torch.randn(one.spec.num_kv_heads, 5, one.spec.head_dim)
    assert torch.equal(demo.pre_rope_keys(1, keys), one.pre_rope_keys(1, keys))


def test_a_part_has_half_of_the_divided_weights(demo: ParallelModel, one: TransformersModel) -> None:
    part = dict(demo._model.named_parameters())
    for name, whole in one._model.named_parameters():
        local = part[name].to_local() if hasattr(part[name], "to_local") else part[name]
        assert local.numel() * (1 if "norm" in name else 2) == whole.numel(), name


def test_logits_of_the_prompt_are_those_of_one_rank(demo: ParallelModel, one: TransformersModel) -> None:
    found: list[list[Tensor]] = [[], []]
    for model, parts in zip((demo, one), found, strict=True):
        model.prefill(
            ids(40, 1),
            start=0,
            observer=Layers(),
            on_logits=lambda first, rows, parts=parts: parts.append(rows),
        )
    torch.testing.assert_close(torch.cat(found[0]), torch.cat(found[1]), **TOLERANCE)


@pytest.mark.parametrize("in_history", [True, False])
def test_an_error_of_the_observer_ends_its_pass_only(
    demo: ParallelModel, one: TransformersModel, in_history: bool
) -> None:
    def fail() -> None:
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        demo.prefill(ids(40, 1), start=0, observer=Interrupting(1, fail, in_history=in_history))

    def broken(*_: object) -> Tensor:
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        demo.decode(ids(2, 1), torch.tensor([1, 2]), attention=broken)
    with pytest.raises(ContextLengthExceeded):
        demo.prefill(ids(9, 1), start=demo.spec.max_model_len, observer=Layers())
    assert_same_passes(demo, one)


class Dividing(Layers):
    """Stores what each rank has compressed by a plan."""

    def __init__(
        self,
        plan: ResolvedPlan,
        *,
        with_rows: bool,
        before: Layers | None = None,
        question: Question | None = None,
    ) -> None:
        super().__init__(before)
        self.division = Division(
            plan=plan,
            with_rows=with_rows,
            transfer=TransferKey(transfer_id=1, generation=1),
            question=question,
        )
        self.compressed: dict[int, Tensors] = {}
        """Of this rank's heads."""
        self.rows: dict[int, tuple[Tensor, Tensor] | None] = {}

    def compressing(self, layer: int) -> nullcontext[None]:
        return nullcontext()

    def layer_done(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        raise AssertionError("no rank has all heads")

    def layer_compressed(self, layer: int, part: Encoded, rows: tuple[Tensor, Tensor] | None) -> None:
        self.compressed[layer], self.rows[layer] = part.finish(part.tensors), rows


@pytest.fixture
def noted(demo: ParallelModel) -> Iterator[queue.Queue[Any]]:
    """What the other rank has compressed, or why it has not: `(layer, tensors as arrays or error)`."""
    notes: queue.Queue[Any] = queue.Queue()
    demo.lead.on_note = lambda rank, note: notes.put(note)
    yield notes
    demo.lead.on_note = lambda rank, note: None


def plan_for_prompt(spec: ModelSpec, num_tokens: int, method: str = "compactor-rdkv") -> ResolvedPlan:
    return resolve_plan(
        plan_for(method, budget=Budget(tokens=16)),
        num_prompt_tokens=num_tokens,
        max_new_tokens=4,
        num_layers=spec.num_layers,
        head_dim=spec.head_dim,
    )


@pytest.mark.parametrize(
    ("method", "question"),
    [
        ("compactor-rdkv", None),
        ("rdkv-union", None),
        ("snapkv", None),
        ("snapkv", Question(num_tokens=3, num_after=4)),
    ],
)
def test_each_rank_compresses_its_heads(
    demo: ParallelModel,
    one: TransformersModel,
    noted: queue.Queue[Any],
    method: str,
    question: Question | None,
) -> None:
    plan = plan_for_prompt(one.spec, 79, method)
    before = Layers()
    one.prefill(ids(70, 1), start=0, observer=before)
    expected = Layers(before)
    divided = Dividing(plan, with_rows=True, before=before, question=question)
    of_one = one.prefill(ids(9, 2), start=70, observer=expected)
    logits = demo.prefill(ids(9, 2), start=70, observer=divided)
    torch.testing.assert_close(logits, of_one, **TOLERANCE)
    formats = make_formats(one.spec, plan)
    for layer, (queries, keys, values, scaling) in expected.given.items():
        inputs = LayerInputs(
            layer=layer,
            queries=queries,
            keys=keys,
            values=values,
            scaling=float(scaling),
            unrotate=lambda rows, layer=layer: one.pre_rope_keys(layer, rows),
            question=question,
        )
        whole = compress_layer(plan, formats[layer], inputs)
        number, other = noted.get(timeout=10)
        assert number == layer
        tensors = {name: torch.from_numpy(array) for name, array in other.items()}
        for given, part in zip(
            (divided.compressed[layer], tensors), formats[layer].parts(whole, 2), strict=True
        ):
            assert list(given) == list(part)
            if method == "snapkv":
                assert torch.equal(given["index"], part["index"])
                torch.testing.assert_close(given["keys"], part["keys"], **TOLERANCE)
            else:  # rounding may decide which of two tokens gets more bits
                sizes = [sum(tensor.numel() for tensor in tensors.values()) for tensors in (given, part)]
                assert sizes[0] == pytest.approx(sizes[1], rel=0.05)
        torch.testing.assert_close(divided.rows[layer], (keys[:, 70:], values[:, 70:]), **TOLERANCE)


def test_rows_and_what_is_made_of_them_stay_in_their_ranks_unless_they_are_wanted(
    demo: ParallelModel, one: TransformersModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered: list[int] = []
    gather = demo.lead.gather
    monkeypatch.setattr(demo.lead, "gather", lambda part: gathered.append(part.nbytes) or gather(part))
    divided = Dividing(plan_for_prompt(one.spec, 40), with_rows=False)
    demo.prefill(ids(40, 1), start=0, observer=divided)
    assert divided.rows == dict.fromkeys(range(one.spec.num_layers))
    assert len(divided.compressed) == one.spec.num_layers
    assert gathered == []
    demo.prefill(ids(40, 1), start=0, observer=Layers())
    assert len(gathered) == 3 * one.spec.num_layers


def test_a_rank_that_cannot_compress_ends_the_pass_only(
    demo: ParallelModel,
    one: TransformersModel,
    noted: queue.Queue[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = Dividing(plan_for_prompt(one.spec, 50), with_rows=False)
    with pytest.raises(AssertionError, match="40, 50"):
        demo.prefill(ids(40, 1), start=0, observer=wrong)
    assert wrong.compressed == {}
    nothing = Encoded(tensors=(), names=())
    monkeypatch.setattr(passes, "encode_layer", lambda *_: nothing)
    demo.prefill(ids(40, 1), start=0, observer=wrong)
    layers, errors = zip(*(noted.get(timeout=10) for _ in range(1 + one.spec.num_layers)), strict=True)
    assert layers == (0, *range(one.spec.num_layers))
    assert all("40, 50" in str(error) for error in errors)
    assert_same_passes(demo, one)


def test_passes_run_within_a_layer_of_another(demo: ParallelModel, one: TransformersModel) -> None:
    inner, deepest, expected = Layers(), Layers(), Layers()

    def fail() -> None:
        demo.prefill(ids(5, 8), start=0, observer=deepest)
        raise LookupError

    def interrupt() -> None:
        demo.prefill(ids(11, 7), start=0, observer=inner)
        with pytest.raises(LookupError):
            demo.prefill(ids(20, 6), start=0, observer=Interrupting(2, fail))

    outer = Interrupting(1, interrupt)
    logits = demo.prefill(ids(40, 1), start=0, observer=outer)
    torch.testing.assert_close(logits, one.prefill(ids(40, 1), start=0, observer=expected), **TOLERANCE)
    torch.testing.assert_close(outer.given[3], expected.given[3], **TOLERANCE)
    assert len(inner.given) == len(deepest.given) == 4


@pytest.mark.parametrize(
    "family", some(_SUPPORTED, "llama", "gpt_neox", "llama4_text", "mixtral", "vaultgemma")
)
def test_every_supported_type_is_that_of_one_rank(lead: LeadingRank, family: str, tmp_path: Path) -> None:
    folder = FAMILIES[family].save(tmp_path)
    assert_same_passes(load(lead, folder), load_model(folder, device="cpu"))


def test_every_supported_type_has_a_family() -> None:
    assert {text_type(family) for family in _SUPPORTED} == PARALLEL_TYPES


@pytest.mark.parametrize(
    ("family", "settings", "num_ranks", "error", "reason"),
    [
        ("llama", {}, 4, ConfigurationError, "tensor_parallel is 4, and the model has 2 KV heads"),
        ("llama", {}, 3, ConfigurationError, "it must divide them"),
        ("phi3", {}, 2, UnsupportedModel, "model type 'phi3' has not been checked with tensor_parallel 2"),
    ],
)
def test_models_that_cannot_be_divided_are_refused_by_name(
    family: str, settings: dict[str, int], num_ranks: int, error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        check_parallel(make_config(family, **settings), num_ranks, is_quantised=False)


def test_quantised_weights_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="quantised"):
        check_parallel(make_config("llama"), 2, is_quantised=True)


def test_a_device_must_not_have_a_number() -> None:
    assert backend_for("cpu", 2) == "gloo" or torch.cuda.is_available()
    with pytest.raises(
        ConfigurationError, match="device is 'cuda:1' with tensor_parallel 2; it must be auto"
    ):
        backend_for("cuda:1", 2)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigurationError, match="there are 0 CUDA devices"):
            backend_for("cuda", 2)


def test_a_rank_tells_why_it_does_not_load(lead: LeadingRank) -> None:
    lead.call("load", DEMO_MODEL, "cpu", "auto", 99999999)
    with pytest.raises(ConfigurationError, match="rank 1 of 2 does not load: max_model_len is 99999999"):
        lead.loaded()


def test_a_rank_that_ends_before_it_has_loaded_is_named(lead: LeadingRank) -> None:
    lead.close()  # one group in a process at a time
    started = LeadingRank(2, backend="gloo", num_threads=1, on_lost=lambda error: None)
    try:
        started._followers[0].process.kill()
        with pytest.raises(WorkerUnavailable, match="rank 1 of 2 has ended with exit code -9"):
            started.join()
    finally:
        started.close()


@pytest.mark.parametrize(
    ("sign", "reason"),
    [
        (signal.SIGKILL, "rank 1 of 2 has ended with exit code -9"),
        (signal.SIGSTOP, "rank 1 of 2 has not answered for"),
    ],
)
def test_a_lost_rank_is_the_workers_end_with_its_name_in_bounded_time(
    lead: LeadingRank, monkeypatch: pytest.MonkeyPatch, sign: signal.Signals, reason: str
) -> None:
    lead.close()
    if sign == signal.SIGSTOP:
        monkeypatch.setattr("kvferry.shared.model.parallel.lead._HUNG_S", 3.0)
    lost: list[Exception] = []
    told = threading.Event()

    def on_lost(error: Exception) -> None:
        lost.append(error)
        told.set()

    model = load_parallel_model(DEMO_MODEL, num_ranks=2, on_lost=on_lost, device="cpu", num_threads=2)
    ended = threading.Event()
    model.lead.on_note = lambda rank, note: ended.set() if (rank, note) == (1, None) else None
    try:
        process = model.lead._followers[0].process
        pass_of_death = Interrupting(1, lambda: os.kill(process.pid, sign))
        with pytest.raises(WorkerUnavailable, match=reason) as raised:
            model.prefill(ids(40, 1), start=0, observer=pass_of_death)
        assert raised.value.reason == "rank_lost"
        assert told.wait(60.0)
        with pytest.raises(WorkerUnavailable, match=reason):
            model.decode(ids(1, 1), torch.tensor([1]), attention=attention_of(0))
        assert [str(error) for error in lost] == [str(raised.value)]
        assert process.wait(60.0) is not None
        assert ended.wait(60.0)
    finally:
        model.close()
