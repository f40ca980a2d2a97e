"""Queues, batches and workers follow from the machine's times; the fit finds the times again."""

from __future__ import annotations

import dataclasses
import heapq
import random
from pathlib import Path

import pytest

from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.errors import ConfigurationError
from kvferry.tools.plan import predict
from kvferry.tools.plan.advice import Advice, advise
from kvferry.tools.plan.fit import fit
from kvferry.tools.plan.machine import GPUS, find_machine
from kvferry.tools.plan.model import ModelCost, read_model
from kvferry.tools.plan.predict import Deployment, Workload, disaggregated, together

LLAMA_8B = """{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
"intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
"max_position_embeddings": 131072, "vocab_size": 128256, "dtype": "bfloat16", "tie_word_embeddings": false}"""
FULL, RDKV = plan_for("full"), plan_for("rdkv", budget=Budget(retention=0.05))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ModelCost:
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(LLAMA_8B)
    return read_model(str(folder))


def deployed(model: ModelCost, machine: str = "H100-SXM", gbits: float = 100.0) -> Deployment:
    return Deployment(
        machine=GPUS[machine],
        model=model,
        link_bytes_per_s=gbits * 1e9 / 8,
        link_latency_s=0.0002,
        max_batch=32,
    )


def test_the_shape_of_llama_8b(llama: ModelCost) -> None:
    assert llama.num_parameters == llama.num_active == 8_030_261_248
    assert llama.spec.kv_token_bytes == 131_072
    # Two operations a parameter and token, and attention: 4 * layers * hidden * T^2 / 2.
    assert llama.prefill_flops(8192) == pytest.approx(2 * 8.03e9 * 8192 + 2 * 32 * 4096 * 8192**2, rel=1e-3)


@pytest.mark.parametrize(("workers", "load"), [(1, 0.5), (1, 0.7), (4, 0.6), (10, 0.7)])
def test_waits_are_those_of_a_simulated_queue(workers: int, load: float) -> None:
    chance, service_s = random.Random(1), 0.5
    rate = load * workers / service_s
    free, now_s, waited_s, number = [0.0] * workers, 0.0, 0.0, 100_000
    for _ in range(number):
        now_s += chance.expovariate(rate)
        start_s = max(now_s, heapq.heappop(free))
        waited_s += start_s - now_s
        heapq.heappush(free, start_s + service_s)
    assert predict._wait_s(service_s, rate, workers) == pytest.approx(waited_s / number, rel=0.15)


def test_a_batch_is_what_comes_while_one_is_answered(llama: ModelCost) -> None:
    load = Workload(prompt_tokens=2000, answer_tokens=400, rate=4.0)
    found = disaggregated(deployed(llama), FULL, load)
    assert found.decode_workers is not None
    assert found.prefill_workers is not None
    per_worker = load.rate / found.decode_workers
    assert found.batch == pytest.approx(1 + per_worker * 400 * found.step_s, rel=1e-3)
    assert load.rate / found.prefill_workers * found.prefill_s <= predict.MAX_UTILISATION
    assert found.total_s == pytest.approx(found.first_token_s + found.per_token_s * 399)


def test_more_requests_need_more_workers_and_bounds_more_still(llama: ModelCost) -> None:
    def workers(**changed: float) -> tuple[int, int]:
        load = Workload(**{"prompt_tokens": 8000, "answer_tokens": 200, "rate": 10.0} | changed)  # type: ignore[arg-type]
        found = disaggregated(deployed(llama), FULL, load)
        assert found.prefill_workers is not None
        assert found.decode_workers is not None
        return found.prefill_workers, found.decode_workers

    prefill, decode = workers()
    assert workers(rate=40.0) > (prefill, decode)
    assert workers(first_token_bound_s=0.31)[0] > prefill
    assert workers(per_token_bound_s=0.008)[1] > decode


def test_bounds_that_one_request_alone_exceeds_have_no_number_of_workers(llama: ModelCost) -> None:
    load = Workload(prompt_tokens=8000, answer_tokens=200, rate=1.0, first_token_bound_s=0.1)
    found = disaggregated(deployed(llama), FULL, load)
    assert found.prefill_workers is None
    assert found.workers is None
    assert _advice(deployed(llama), load).method is None


def test_no_arena_is_overbooked(llama: ModelCost) -> None:
    """On a GPU whose memory is nearly all weights, memory decides the number of workers."""
    small = dataclasses.replace(GPUS["H100-SXM"], memory_bytes=22_000_000_000)
    where = dataclasses.replace(deployed(llama), machine=small)
    load = Workload(prompt_tokens=8000, answer_tokens=500, rate=5.0)
    found = disaggregated(where, FULL, load)
    assert found.batch * found.sizes.arena <= where.arena_bytes()
    assert found.decode_workers is not None
    less = disaggregated(where, RDKV, load)
    assert less.decode_workers is not None
    assert less.decode_workers < found.decode_workers


def _advice(where: Deployment, load: Workload) -> Advice:
    apart = {name: disaggregated(where, plan, load) for name, plan in (("full", FULL), ("rdkv", RDKV))}
    return advise(apart, lambda least: together(where, FULL, load, least_workers=least))


def test_a_slow_link_and_long_prompts_want_compression(llama: ModelCost) -> None:
    advice = _advice(deployed(llama, gbits=1), Workload(prompt_tokens=65536, answer_tokens=256, rate=0.2))
    assert (advice.method, advice.compress) == ("rdkv", True)
    assert "compress with rdkv" in advice.reasons[0]


def test_short_prompts_want_neither(llama: ModelCost) -> None:
    advice = _advice(deployed(llama), Workload(prompt_tokens=300, answer_tokens=256, rate=2.0))
    assert (advice.method, advice.compress, advice.disaggregate) == ("full", False, False)
    assert all(reason.startswith("do not") for reason in advice.reasons)


def test_long_prompts_with_a_bound_on_tokens_want_disaggregation(llama: ModelCost) -> None:
    load = Workload(prompt_tokens=8192, answer_tokens=256, rate=50.0, per_token_bound_s=0.02)
    assert _advice(deployed(llama), load).disaggregate


def test_a_method_that_repeats_the_prompt_keeps_a_worker_busy_for_two_prompts(llama: ModelCost) -> None:
    load = Workload(prompt_tokens=8192, answer_tokens=256, rate=0.1)
    once, twice = (disaggregated(deployed(llama), plan_for(name), load) for name in ("keydiff", "kvzip"))
    assert twice.prefill_s == once.prefill_s
    assert twice.compress_s == pytest.approx(once.compress_s + once.prefill_s)
    short = Workload(prompt_tokens=1, answer_tokens=2, rate=0.1)
    assert disaggregated(deployed(llama), plan_for("kvzip"), short).compress_s == 0


def test_prompts_stop_streams_where_one_worker_does_both(llama: ModelCost) -> None:
    load = Workload(prompt_tokens=8192, answer_tokens=256, rate=1.0)
    apart, alone = disaggregated(deployed(llama), FULL, load), together(deployed(llama), FULL, load)
    assert alone.stall_s == apart.prefill_s
    assert alone.step_s > 1.3 * apart.step_s
    assert alone.transfer_s == 0


def test_weights_that_do_not_fit_are_refused(llama: ModelCost) -> None:
    big = dataclasses.replace(llama, num_parameters=40_000_000_000)
    with pytest.raises(ConfigurationError, match="the weights of"):
        disaggregated(deployed(big, "L4"), FULL, Workload(prompt_tokens=10, answer_tokens=10, rate=1.0))


def test_unknown_machines_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="H100-SXM"):
        find_machine("H1000")
    (tmp_path / "x.json").write_text('{"machine": {"name": "x"}}')
    with pytest.raises(ConfigurationError, match="is no file of kvferry calibrate machine"):
        find_machine(str(tmp_path / "x.json"))


def test_the_fit_finds_coefficients_and_none_below_zero() -> None:
    rows = [(1.0, float(n), float(n * n)) for n in (100, 500, 2000, 8000)]
    exact = [0.01 + 2e-5 * n + 3e-9 * n2 for _, n, n2 in rows]
    assert fit(rows, exact) == pytest.approx([0.01, 2e-5, 3e-9], rel=1e-6)
    falling = [1.0, 0.9, 0.8, 0.7]
    assert all(value >= 0 for value in fit(rows, falling))
    assert fit([(1.0, 5.0)], [0.0]) == [0.0, 0.0]


def test_a_link_faster_than_the_wires_ends_saves_nothing(llama: ModelCost) -> None:
    load = Workload(prompt_tokens=1024, answer_tokens=2, rate=1e-6)
    slow, fast, faster = (
        disaggregated(deployed(llama, gbits=gbits), FULL, load).transfer_s for gbits in (20.0, 100.0, 400.0)
    )
    assert fast == faster
    assert slow > 1.5 * fast
