"""The sampler draws from exactly the distribution that its parameters define, the same on every replay."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.shared.errors import InvalidRequest, KvferryError
from kvferry.shared.sampling.params import SamplingParams, ThinkingBudget
from kvferry.shared.sampling.sampler import SequenceSampler


def make_sampler(prompt=(0,), vocab_size=8, **params):
    return SequenceSampler(SamplingParams(max_tokens=100, **params), prompt, vocab_size)


def draw_many(logits, count, **params):
    """Independent draws: one token of each of `count` seeds."""
    return [
        make_sampler(vocab_size=len(logits), seed=seed, **params).sample(logits).token_id
        for seed in range(count)
    ]


def expected_probabilities(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Plain Python, from the definitions."""
    weights = [math.exp(x / temperature) for x in logits]
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    if top_k:
        order = order[:top_k]
    total, kept, reached = sum(weights[i] for i in order), [], 0.0
    for i in order:
        if kept and reached >= top_p * total:
            break
        kept.append(i)
        reached += weights[i]
    kept = [i for i in kept if weights[i] >= min_p * weights[order[0]]]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(weights))]


LOGITS = torch.tensor([0.3, -1.0, 2.0, 0.3, 1.1, -4.0, 0.0, 1.1])


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_p": 0.7},
        {"top_p": 0.01},
        {"min_p": 0.3},
        {"top_k": 5, "top_p": 0.8, "min_p": 0.2, "temperature": 1.3},
    ],
    ids=str,
)
def test_draws_follow_the_exact_probabilities(params):
    count = 3000
    drawn = np.bincount(draw_many(LOGITS, count, **params), minlength=8)
    expected = np.array(expected_probabilities(LOGITS.tolist(), **params))
    assert (drawn[expected == 0] == 0).all()
    support = expected > 0
    chi_square = float((((drawn - count * expected) ** 2)[support] / (count * expected[support])).sum())
    # 7 degrees of freedom at most: 24.3 has probability 0.001; the seeds are fixed, so this cannot flake
    assert chi_square < 24.3


def test_token_indices_of_one_seed_are_independent_draws():
    sampler = make_sampler(vocab_size=2, seed=11)
    drawn = [sampler.sample(torch.zeros(2)).token_id for _ in range(2000)]
    pairs = np.bincount([2 * a + b for a, b in itertools.pairwise(drawn)], minlength=4)
    assert (abs(pairs - 500) < 100).all()


def test_greedy_takes_the_first_of_equals_and_ignores_the_seed():
    logits = torch.tensor([0.0, 3.0, 1.0, 3.0])
    assert {make_sampler(vocab_size=4, temperature=0, seed=s).sample(logits).token_id for s in range(5)} == {
        1
    }


@given(
    seed=st.integers(-(2**63), 2**64 - 1),
    split=st.integers(0, 6),
    temperature=st.sampled_from([0.0, 0.7, 2.0]),
)
def test_a_replay_from_any_point_continues_with_the_same_tokens(seed, split, temperature):
    params = {
        "seed": seed,
        "temperature": temperature,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.2,
        "repetition_penalty": 1.2,
        "logprobs": 2,
    }
    steps = torch.randn(7, 8, generator=torch.Generator().manual_seed(0))
    whole = make_sampler((1, 2), **params)
    tokens = [whole.sample(row) for row in steps]
    ids = [t.token_id for t in tokens]
    observing = make_sampler((1, 2), **params)
    for token_id in ids[:split]:
        observing.observe(token_id)
    assert [observing.sample(row) for row in steps[split:]] == tokens[split:]
    replayed = make_sampler((1, 2, *ids[:split]), first_index=split, **params)
    assert [replayed.sample(row) for row in steps[split:]] == tokens[split:]


def test_logprobs_are_of_the_raw_distribution():
    raw = LOGITS.double().log_softmax(0)
    sampler = make_sampler(
        (2,), logprobs=3, temperature=0.1, logit_bias={5: 100.0}, repetition_penalty=3.0, top_k=1
    )
    token = sampler.sample(LOGITS)
    assert (token.token_id, token.index) == (5, 0)
    assert token.logprob == pytest.approx(float(raw[5]))
    assert [i for i, _ in token.top_logprobs] == [2, 4, 7]
    assert [p for _, p in token.top_logprobs] == pytest.approx([float(raw[i]) for i in (2, 4, 7)])


def test_logprobs_zero_reports_the_token_alone_and_none_reports_nothing():
    assert make_sampler(logprobs=0).sample(LOGITS).top_logprobs == ()
    assert make_sampler(logprobs=0).sample(LOGITS).logprob is not None
    assert make_sampler().sample(LOGITS).logprob is None


def test_more_alternatives_than_tokens_reports_all_of_them():
    assert len(make_sampler(vocab_size=3, logprobs=20).sample(torch.zeros(3)).top_logprobs) == 3


def test_repetition_penalty_covers_prompt_and_completion_and_treats_signs_apart():
    logits = torch.tensor([2.0, 1.5, -1.0, -1.5])
    # prompt holds 0: 2.0 / 2 = 1.0 < 1.5, so 1 wins; then 1 is penalised too: 0.75 < 1.0, and so on
    sampler = make_sampler((0,), vocab_size=4, temperature=0, repetition_penalty=2.0)
    assert [sampler.sample(logits).token_id for _ in range(2)] == [1, 0]
    # negative logits are multiplied: -1.0 * 2 = -2.0 < -1.5
    sampler = make_sampler((2,), vocab_size=4, temperature=0, repetition_penalty=2.0)
    assert sampler.sample(torch.tensor([-9.0, -9.0, -1.0, -1.5])).token_id == 3


def test_presence_and_frequency_penalties_cover_the_completion_only():
    logits = torch.tensor([1.0, 0.0])
    sampler = make_sampler((0, 0, 0), vocab_size=2, temperature=0, frequency_penalty=0.4)
    # 1.0, 0.6, 0.2, then -0.2 is below 0
    assert [sampler.sample(logits).token_id for _ in range(5)] == [0, 0, 0, 1, 0]
    sampler = make_sampler((0,), vocab_size=2, temperature=0, presence_penalty=0.9)
    assert [sampler.sample(logits).token_id for _ in range(3)] == [0, 0, 0]
    sampler = make_sampler((0,), vocab_size=2, temperature=0, presence_penalty=1.1)
    assert [sampler.sample(logits).token_id for _ in range(3)] == [0, 1, 0]


def test_logit_bias_can_ban_and_force():
    assert set(draw_many(LOGITS, 50, logit_bias={2: -100.0, 4: 100.0})) == {4}


def test_a_tiny_temperature_is_almost_greedy_and_does_not_overflow():
    assert set(draw_many(LOGITS * 100, 20, temperature=1e-6)) == {2}


def test_tokens_of_no_probability_are_never_drawn():
    logits = torch.full((6,), -math.inf)
    logits[[1, 4]] = 0.0
    assert set(draw_many(logits, 200)) == {1, 4}


@pytest.mark.parametrize(
    "logits",
    [torch.tensor([0.0, math.nan]), torch.tensor([math.inf, 0.0]), torch.full((2,), -math.inf)],
    ids=["nan", "inf", "nothing"],
)
def test_invalid_logits_are_a_named_error(logits):
    with pytest.raises(KvferryError, match="logits for token 0") as caught:
        make_sampler(vocab_size=2, temperature=0).sample(logits)
    assert caught.value.reason == "invalid_logits"


def test_half_precision_logits_are_left_as_they_are():
    logits = LOGITS.half()
    before = logits.clone()
    make_sampler(logit_bias={1: 5.0}, repetition_penalty=2.0).sample(logits)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("kwargs", [{"prompt": (0, 8)}, {"prompt": (-1,)}, {"logit_bias": {8: 1.0}}], ids=str)
def test_ids_outside_the_vocabulary_are_refused(kwargs):
    with pytest.raises(InvalidRequest, match="token ids are 0 to 7"):
        make_sampler(**kwargs)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"frequency_penalty": 0.5, "min_tokens": 3}])
def test_delivered_tokens_are_drawn_again_and_the_rest_is_as_it_was(params):
    undisturbed = make_sampler(seed=3, **params)
    drawn = [undisturbed.sample(LOGITS * (1 + index)).token_id for index in range(9)]
    replay = make_sampler(seed=3, delivered=tuple(drawn[:5]), **params)
    wrong = LOGITS.flip(0) * 3  # as another worker's logits never are
    again = [replay.sample(wrong if index < 5 else LOGITS * (1 + index)).token_id for index in range(9)]
    assert again == drawn


def test_a_delivered_token_outside_the_vocabulary_is_refused():
    with pytest.raises(InvalidRequest, match="a delivered token is 8"):
        make_sampler(delivered=(8,))


OPEN, END = 4, 5
THINKS = torch.tensor([0.0, 0.0, 3.0, 0.0, -9.0, -9.0, 0.0, 0.0])
"""Logits of a model that neither opens nor ends a thought by itself."""


def thinking(max_tokens, *, is_open=True):
    return ThinkingBudget(max_tokens=max_tokens, open_id=OPEN, end_id=END, is_open=is_open)


def drawn_by(sampler, *, says=(), count=9):
    """The ids drawn where the model says these by itself: index to id."""
    says = dict(says)
    return [
        sampler.sample(THINKS.index_fill(0, torch.tensor(says.get(index, 2)), 99.0)).token_id
        for index in range(sampler.next_index, count)
    ]


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_thought_ends_after_its_budget_and_not_before(budget):
    sampler = make_sampler(thinking=thinking(budget), temperature=0.0)
    assert drawn_by(sampler) == [2] * budget + [END] + [2] * (8 - budget)


def test_a_thought_that_the_model_opens_counts_from_there_and_all_thoughts_together():
    sampler = make_sampler(thinking=thinking(3, is_open=False), temperature=0.0)
    says = {1: OPEN, 4: END, 6: OPEN}
    assert drawn_by(sampler, says=says) == [2, OPEN, 2, 2, END, 2, OPEN, 2, END]
    assert (
        drawn_by(make_sampler(thinking=thinking(7), temperature=0.0), says={2: END}) == [2, 2, END] + [2] * 6
    )


def test_a_replay_ends_a_thought_where_it_would_have_ended():
    params = {"thinking": thinking(4), "temperature": 0.0}
    undisturbed = drawn_by(make_sampler(**params))
    again = make_sampler(prompt=(0, *undisturbed[:2]), first_index=2, **params)
    assert drawn_by(again) == undisturbed[2:]
    assert drawn_by(make_sampler(delivered=tuple(undisturbed[:6]), **params)) == undisturbed
