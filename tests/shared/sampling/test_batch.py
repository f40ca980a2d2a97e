"""A batch drawn where the model is gets the tokens that each completion's own sampler draws."""

from dataclasses import replace

import pytest
import torch

from kvferry.shared.sampling.params import SamplingParams, ThinkingBudget
from kvferry.shared.sampling.sampler import AHEAD_TOKENS, BatchSampler, SequenceSampler

VOCAB = 37
CPU = torch.device("cpu")
PARAMS = [
    SamplingParams(max_tokens=99, temperature=0.0),
    SamplingParams(max_tokens=99, temperature=0.7, seed=3),
    SamplingParams(max_tokens=99, temperature=1.3, top_p=0.6, seed=4, first_index=2),
    SamplingParams(max_tokens=99, temperature=1.0, top_k=5, min_p=0.1, seed=5),
    SamplingParams(max_tokens=99, temperature=0.0, repetition_penalty=1.5, logit_bias={7: 2.0, 8: -100.0}),
    SamplingParams(
        max_tokens=99, temperature=0.9, presence_penalty=0.7, frequency_penalty=0.4, top_k=1, seed=6
    ),
    SamplingParams(max_tokens=99, temperature=1e-6, top_p=1e-9, seed=-1),
    SamplingParams(
        max_tokens=99, thinking=ThinkingBudget(max_tokens=5, open_id=7, end_id=8, is_open=True), seed=7
    ),
]
CHOICES = [[0], [0, 1], [1, 2, 3], [0, 4], [0, 7], list(range(8))]


def placed_in(batch, samplers):
    for slot, sampler in enumerate(samplers):
        batch.place(slot, sampler)


def sample(batch, logits, active):
    batch.refill()
    return batch.sample(logits, torch.as_tensor(active), batch.flavour)


def logits_of(step):
    generator = torch.Generator().manual_seed(step)
    logits = torch.randn(len(PARAMS) + 1, VOCAB, generator=generator)
    return (logits * 2).round() / 2 if step % 3 == 0 else logits  # with equals among them


@pytest.mark.parametrize("chosen", CHOICES, ids=str)
def test_tokens_equal_those_of_each_alone(chosen):
    prompt = (1, 5, 9, 5)
    params = [PARAMS[i] for i in chosen]
    own, placed = ([SequenceSampler(p, prompt, VOCAB) for p in params] for _ in range(2))
    batch = BatchSampler(len(params) + 1, VOCAB, CPU)
    placed_in(batch, placed)
    active = torch.tensor([1] * len(params) + [0])
    for step in range(AHEAD_TOKENS + 5):
        logits = logits_of(step)[: len(params) + 1]
        tokens, valid = sample(batch, logits, active)
        expected = [sampler.sample(logits[i]).token_id for i, sampler in enumerate(own)]
        assert tokens[:-1].tolist() == expected
        assert valid.all()
        for sampler, token_id in zip(placed, expected, strict=True):
            sampler.observe(token_id)


def test_a_slot_that_is_not_active_remembers_nothing_of_what_is_drawn_for_it():
    params = [SamplingParams(max_tokens=9, temperature=0.0, frequency_penalty=2.0)] * 2
    batch = BatchSampler(2, VOCAB, CPU)
    placed_in(batch, [SequenceSampler(p, (1,), VOCAB) for p in params])
    logits = torch.linspace(0, 1, VOCAB).expand(2, VOCAB)
    drawn = [sample(batch, logits, [1, 0])[0].tolist() for _ in range(3)]
    assert drawn == [[36, 36], [35, 36], [34, 36]]


def test_logits_that_allow_no_token_are_told_and_touch_no_neighbour():
    params = [SamplingParams(max_tokens=9, temperature=1.0, top_p=0.9, seed=i) for i in range(4)]
    batch = BatchSampler(4, VOCAB, CPU)
    placed_in(batch, [SequenceSampler(p, (1,), VOCAB) for p in params])
    logits = torch.randn(4, VOCAB)
    logits[0, 3], logits[1, 4], logits[2] = torch.nan, torch.inf, -torch.inf
    tokens, valid = sample(batch, logits, [1] * 4)
    assert valid.tolist() == [False, False, False, True]
    assert ((tokens >= 0) & (tokens < VOCAB)).all()
    assert tokens[3] == SequenceSampler(params[3], (1,), VOCAB).sample(logits[3]).token_id


def test_another_batch_starts_from_its_own_state():
    params = PARAMS[5]
    batch = BatchSampler(1, VOCAB, CPU)
    for _ in range(2):
        sampler = SequenceSampler(params, (1, 2, 3), VOCAB)
        batch.place(0, sampler)
        alone = SequenceSampler(params, (1, 2, 3), VOCAB)
        for step in range(3):
            token = int(sample(batch, logits_of(step)[:1], [1])[0])
            assert token == alone.sample(logits_of(step)[0]).token_id
        batch.remove(0)


def test_a_completion_draws_the_same_tokens_whoever_joins_or_leaves_beside_it():
    own, beside = ([SequenceSampler(p, (1, 5), VOCAB) for p in PARAMS] for _ in range(2))
    batch = BatchSampler(len(PARAMS), VOCAB, CPU)
    slots = {}
    for step in range(2 * AHEAD_TOKENS + 7):
        joining = step // 20
        if step % 20 == 0 and joining < len(PARAMS):
            slots[joining] = min(set(range(len(PARAMS))) - set(slots.values()))
            batch.place(slots[joining], beside[joining])
        if step == 70:
            batch.remove(slots.pop(1))
        active = [int(slot in slots.values()) for slot in range(len(PARAMS))]
        logits = logits_of(step)[: len(PARAMS)]
        tokens, _ = sample(batch, logits, active)
        for i, slot in slots.items():
            assert tokens[slot] == own[i].sample(logits[slot]).token_id


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_no_end_is_drawn_before_min_tokens_and_neighbours_draw_as_alone(temperature):
    eos, stop = 36, 35
    own = SamplingParams(max_tokens=9, temperature=temperature, seed=2)
    params = [own, replace(own, min_tokens=3, stop_token_ids=(stop,)), replace(own, min_tokens=1)]
    placed, alone = ([SequenceSampler(p, (1,), VOCAB, eos_token_ids=(eos,)) for p in params] for _ in "ab")
    batch = BatchSampler(4, VOCAB, CPU)
    placed_in(batch, placed)
    logits = logits_of(1)[:4] / 4
    logits[:, eos], logits[:, stop], logits[:, 20] = 90.0, 80.0, 70.0
    drawn = []
    for step in range(5):
        tokens, valid = sample(batch, logits, [1, 1, 1, 0])
        drawn.append(tokens[:3].tolist())
        assert drawn[-1] == [sampler.sample(logits[0]).token_id for sampler in alone]
        for sampler, token in zip(placed, drawn[-1], strict=True):
            sampler.observe(token)
        assert valid.all()
        assert batch.needs_tokens == (step < 3)
    assert drawn == [[eos, 20, stop]] + [[eos, 20, eos]] * 2 + [[eos] * 3] * 2
