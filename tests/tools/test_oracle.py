"""A captured prompt, compressed afterwards, goes on as one-process generation does, token for token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kvtest.methods import PRESETS

from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.question import Question
from kvferry.shared.sampling.params import SamplingParams
from kvferry.tools.oracle import CapturedPrompt, OneProcessGenerator, OracleSession, step_together
from kvferry.tools.recall.tasks import TASKS

N = 12
SAMPLING = SamplingParams(max_tokens=N, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def generator(demo_model_dir: Path) -> OneProcessGenerator:
    return OneProcessGenerator(load_model(demo_model_dir, name="demo", device="cpu"))


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return TASKS["multi_key_8"].example(num_tokens=300, seed=3).prompt_token_ids


def greedy(generator: OneProcessGenerator, captured: CapturedPrompt, method: str) -> list[int]:
    budget = Budget(tokens=40) if PRESETS[method].takes_budget else None
    continuation = generator.compress(captured, plan=plan_for(method, budget=budget), max_new_tokens=N)
    assert captured.logits is not None
    tokens = [int(captured.logits.argmax())]
    while len(tokens) < N:
        tokens.append(int(continuation.step(tokens[-1]).argmax()))
    return tokens


@pytest.mark.parametrize("method", PRESETS)
def test_captured_prompt_gives_the_tokens_of_generate(
    generator: OneProcessGenerator, prompt: list[int], method: str
) -> None:
    budget = Budget(tokens=40) if PRESETS[method].takes_budget else None
    expected = generator.generate(prompt, plan=plan_for(method, budget=budget), sampling=SAMPLING)
    assert greedy(generator, generator.capture(prompt), method) == [t.token_id for t in expected]


@pytest.mark.parametrize("method", ["snapkv", "rdkv", "rdkv-draft", "think"])
def test_a_captured_prompt_with_a_question_gives_the_tokens_of_generate(
    generator: OneProcessGenerator, prompt: list[int], method: str
) -> None:
    question = Question(num_tokens=9, num_after=2)
    budget = Budget(tokens=12) if PRESETS[method].takes_budget else None
    plan = plan_for(method, budget=budget)
    expected = generator.generate(prompt, plan=plan, sampling=SAMPLING, question=question)
    captured = generator.capture(prompt, question=question)
    continuation = generator.compress(captured, plan=plan, max_new_tokens=N)
    tokens = [expected[0].token_id]
    while len(tokens) < N:
        tokens.append(int(continuation.step(tokens[-1]).argmax()))
    assert tokens == [token.token_id for token in expected]


def test_a_prefix_has_what_is_left_of_the_question(generator: OneProcessGenerator, prompt: list[int]) -> None:
    captured = generator.capture(prompt, question=Question(num_tokens=9, num_after=2))
    for num_dropped, left in ((1, Question(num_tokens=9, num_after=1)), (11, None)):
        prefix = captured.prefix(len(prompt) - num_dropped)
        assert {inputs.question for inputs in prefix.layers} == {left}


@pytest.mark.parametrize("method", PRESETS)
def test_second_turn_captured_after_the_first_equals_a_session(
    generator: OneProcessGenerator, prompt: list[int], method: str
) -> None:
    budget = Budget(tokens=40) if PRESETS[method].takes_budget else None
    session = OracleSession()
    generator.generate(
        prompt, plan=plan_for("full"), sampling=SamplingParams(max_tokens=1, temperature=0.0), session=session
    )
    question = TASKS["multi_key_8"].example(num_tokens=300, seed=4).prompt_token_ids[-12:]
    second = [*prompt, 100, 6, 4, *question]
    expected = generator.generate(
        second, plan=plan_for(method, budget=budget), sampling=SAMPLING, session=session
    )
    captured = generator.capture(second, earlier=generator.capture(prompt))
    assert captured.layers[0].queries.shape[2] == len(second) - len(prompt)
    assert greedy(generator, captured, method) == [t.token_id for t in expected]


def test_a_prefix_holds_what_its_own_prefill_computes(
    generator: OneProcessGenerator, prompt: list[int]
) -> None:
    prefix = generator.capture(prompt).prefix(251)
    own = generator.capture(prompt[:251])
    assert prefix.token_ids == own.token_ids
    for mine, other in zip(prefix.layers, own.layers, strict=True):
        for name in ("queries", "keys", "values"):
            torch.testing.assert_close(getattr(mine, name), getattr(other, name), rtol=1e-4, atol=1e-4)


def test_dense_steps_after_a_prefix_equal_prefilling_all(
    generator: OneProcessGenerator, prompt: list[int]
) -> None:
    captured = generator.capture(prompt)
    continuation = generator.compress(captured.prefix(280), plan=plan_for("full"), max_new_tokens=N)
    for token_id in prompt[280:]:
        logits = continuation.step(token_id, dense=True)
    torch.testing.assert_close(logits, captured.logits, rtol=1e-3, atol=1e-3)


def test_dense_steps_see_all_rows_where_the_method_selects(
    generator: OneProcessGenerator, prompt: list[int]
) -> None:
    captured = generator.capture(prompt)
    plan = plan_for("rocketkv", budget=Budget(tokens=8))
    sparse = generator.compress(captured, plan=plan, max_new_tokens=N)
    dense = sparse.fork()
    assert not torch.equal(sparse.step(prompt[-1]), dense.step(prompt[-1], dense=True))


def test_a_fork_grows_by_itself(generator: OneProcessGenerator, prompt: list[int]) -> None:
    plan = plan_for("rocketkv", budget=Budget(tokens=24))
    first = generator.compress(generator.capture(prompt), plan=plan, max_new_tokens=N)
    first.step(prompt[0])
    second = first.fork()
    expected = first.fork().step(7)
    for token_id in (9, 10, 11):
        first.step(token_id)
    assert torch.equal(second.step(7), expected)


def test_continuations_stepped_together_are_each_as_alone(
    generator: OneProcessGenerator, prompt: list[int]
) -> None:
    captured = generator.capture(prompt)
    plans = [plan_for("full"), *(plan_for("rocketkv", budget=Budget(tokens=t)) for t in (16, 48))]
    together = [generator.compress(captured, plan=plan, max_new_tokens=N) for plan in plans]
    together[1].step(5)  # positions differ within a batch
    alone = [continuation.fork() for continuation in together]
    for token_ids in ([7, 8, 9], [10, 11, 12]):
        rows = step_together(together, token_ids)
        for row, continuation, token_id in zip(rows, alone, token_ids, strict=True):
            torch.testing.assert_close(row, continuation.step(token_id), rtol=1e-3, atol=1e-3)
