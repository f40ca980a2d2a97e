"""The load follows from its options and seed: sizes, shares, arrivals, cancellations."""

from __future__ import annotations

import itertools
import random

import pytest

from kvferry.shared.errors import ConfigurationError
from kvferry.tools.bench.config import BenchConfig
from kvferry.tools.bench.load import Kind, make_load, parse_mix, shares, start_times
from kvferry.tools.bench.prompts import PromptMaker


@pytest.fixture(scope="module")
def prompts() -> PromptMaker:
    return PromptMaker("demo")


@pytest.mark.parametrize("num_tokens", [1, 2, 100, 1037])
def test_a_prompt_has_the_wanted_number_of_tokens(prompts: PromptMaker, num_tokens: int) -> None:
    text = prompts.text(num_tokens, random.Random(3))
    assert prompts.count(text) == num_tokens
    assert text == prompts.text(num_tokens, random.Random(3))
    assert num_tokens < 100 or text != prompts.text(num_tokens, random.Random(4))


def test_a_load_follows_from_its_seed_and_no_run_has_anothers_texts(prompts: PromptMaker) -> None:
    config = BenchConfig(mix="20:4@3,50:8", conversations=12, turns=2, documents=2, document_tokens=30)
    load = make_load(config, prompts, 0)
    assert load == make_load(config, prompts, 0)
    assert load.num_requests == 24
    assert [c.document for c in load.conversations] == [0, 1] * 6
    assert [prompts.count(text) for text in load.documents] == [30, 30]
    questions = [question for conversation in load.conversations for question in conversation.questions]
    assert sorted(question.kind.name for question in questions) == ["20:4"] * 18 + ["50:8"] * 6
    assert all(prompts.count(question.text) == question.kind.prompt_tokens for question in questions)
    others = {q.text for c in make_load(config, prompts, 1).conversations for q in c.questions}
    assert not others.intersection(question.text for question in questions)


def test_the_wanted_share_of_requests_is_cancelled_within_their_answers(prompts: PromptMaker) -> None:
    config = BenchConfig(mix="5:7", conversations=10, turns=3, cancel=0.3)
    questions = [q for c in make_load(config, prompts, 0).conversations for q in c.questions]
    cancelled = [q.cancel_after for q in questions if q.cancel_after is not None]
    assert len(cancelled) == 9
    assert all(1 <= number <= 7 for number in cancelled)


@pytest.mark.parametrize("number", [1, 2, 7, 100])
def test_shares_are_the_weights_to_the_nearest_whole_number(number: int) -> None:
    kinds = parse_mix("10:1@4,20:2@1,30:3@2.5")
    drawn = shares(kinds, number, random.Random(0))
    assert len(drawn) == number
    for kind in kinds:
        assert abs(drawn.count(kind) - kind.weight / 7.5 * number) < 1


def test_arrivals_have_the_wanted_rate() -> None:
    chance = random.Random(0)
    config = BenchConfig(conversations=4000, rate=8.0, burst=5)
    assert set(start_times("closed", config, chance)) == {0.0}
    assert start_times("even", config, chance)[:3] == [0.0, 0.125, 0.25]
    poisson = start_times("poisson", config, chance)
    assert poisson == sorted(poisson)
    assert poisson[-1] == pytest.approx(4000 / 8, rel=0.1)
    # In a Poisson process the gaps' standard deviation is their mean.
    gaps = [later - earlier for earlier, later in itertools.pairwise(poisson)]
    mean = sum(gaps) / len(gaps)
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.1)
    bursts = start_times("bursts", config, chance)
    assert all(len(set(bursts[i : i + 5])) == 1 for i in range(0, 4000, 5))
    assert bursts[-1] == pytest.approx(4000 / 8, rel=0.15)


@pytest.mark.parametrize("text", ["", "5", "5:0", "0:5", "5:5@0", "5:5,", "a:b"])
def test_a_wrong_mix_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--mix is"):
        parse_mix(text)
    assert parse_mix("5:6") == (Kind(prompt_tokens=5, answer_tokens=6),)
