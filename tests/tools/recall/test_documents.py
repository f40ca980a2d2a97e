"""Documents hold what they are said to hold."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.tools.recall import documents
from kvferry.tools.recall.documents import HELD_OUT_POOL, TRAINING_POOL, WIDE_POOL, Chain, Fact
from kvferry.tools.recall.vocabulary import HELD_OUT_ADJECTIVES, HELD_OUT_NOUNS, encode

seeds = st.integers(0, 10**6)


@given(seeds, st.integers(0, 100))
def test_facts_have_distinct_keys_and_distinct_values(seed: int, num_facts: int) -> None:
    facts = documents.draw_facts(random.Random(seed), TRAINING_POOL, num_facts, several=0.5, max_values=3)
    assert len({f.key for f in facts}) == len(facts) == num_facts
    assert all(len(set(f.values)) == len(f.values) >= 1 for f in facts)
    assert all(encode(s) for f in facts for s in f.statements(random.Random(0)))


@given(seeds)
def test_hard_facts_share_words(seed: int) -> None:
    rng = random.Random(seed)
    grid = documents.hard_grid(rng, TRAINING_POOL, 16)
    facts = documents.draw_facts(rng, grid, 16)
    assert len({f.entity.split()[0] for f in facts}) <= 5
    assert len({f.entity.split()[1] for f in facts}) <= 5
    assert len({f.attribute for f in facts}) <= 4


@given(seeds)
def test_absent_fact_is_absent(seed: int) -> None:
    rng = random.Random(seed)
    facts = documents.draw_facts(rng, documents.hard_grid(rng, TRAINING_POOL, 30), 30)
    absent = documents.absent_fact(rng, TRAINING_POOL, facts)
    assert absent is not None
    assert absent.key not in {f.key for f in facts}
    assert absent.values == ()


@given(seeds, st.integers(1, 8))
def test_chains_lead_from_every_variable_to_its_value(seed: int, num_chains: int) -> None:
    chains = documents.draw_chains(random.Random(seed), num_chains)
    names = [v for c in chains for v in c.variables]
    assert len(set(names)) == len(names)
    assert len(chains[0].variables) == 3
    for chain in chains:
        assigned = dict(s.removeprefix("set ").removesuffix(" .").split(" = ") for s in chain.statements())
        for hops, variable in enumerate(chain.variables):
            steps = [variable]
            while steps[-1] in assigned:
                steps.append(assigned[steps[-1]])
            assert chain.trace(hops) == " = ".join(steps[1:])
            assert len(steps) == hops + 2


@given(seeds, st.integers(3, 6))
def test_the_frequent_word_is_said_at_least_twice_as_often(seed: int, num_words: int) -> None:
    word, sentences = documents.draw_sayings(random.Random(seed), num_words)
    (first, most), (_, second) = Counter(s.split()[2] for s in sentences).most_common(2)
    assert first == word
    assert most >= 2 * second


@given(seeds, st.integers(0, 500))
def test_filler_is_as_long_as_asked_or_a_little_shorter(seed: int, num_words: int) -> None:
    sentences = documents.fill(random.Random(seed), num_words)
    total = sum(len(s.split()) for s in sentences)
    assert num_words - 12 <= total <= max(0, num_words)


@given(seeds, st.lists(st.integers(0, 9), max_size=5))
def test_interleaving_keeps_everything_and_each_lists_order(seed: int, lengths: list[int]) -> None:
    lists = [[f"{i} {j}" for j in range(n)] for i, n in enumerate(lengths)]
    merged = documents.interleave(random.Random(seed), *lists)
    assert len(merged) == sum(lengths)
    for i, original in enumerate(lists):
        assert [s for s in merged if s.startswith(f"{i} ")] == original


@pytest.mark.parametrize("also", [True, False])
def test_a_second_value_says_so_only_when_asked_to(also: bool) -> None:
    fact = Fact(attribute="pin", entity="red barn", values=("1 2 3 4", "5 6 7 8"))
    first, second = fact.statements(random.Random(1), also=also)
    assert "1 2 3 4" in first
    assert "5 6 7 8" in second
    assert ("also" in second.split()) is also


def test_held_out_entities_are_disjoint_from_trained_ones() -> None:
    assert set(HELD_OUT_POOL.adjectives) == HELD_OUT_ADJECTIVES
    assert set(HELD_OUT_POOL.nouns) == HELD_OUT_NOUNS
    for pool in (TRAINING_POOL, WIDE_POOL):
        assert not set(pool.adjectives + pool.nouns) & (HELD_OUT_ADJECTIVES | HELD_OUT_NOUNS)
    assert set(WIDE_POOL.adjectives) > set(TRAINING_POOL.adjectives)
    assert set(WIDE_POOL.nouns) > set(TRAINING_POOL.nouns)
    assert set(documents.TRAINING_FACT_TEMPLATES) > set(documents.FACT_TEMPLATES)
    assert not set(documents.TRAINING_FACT_TEMPLATES) & set(documents.HELD_OUT_FACT_TEMPLATES)


def test_a_trace_ends_at_the_value() -> None:
    chain = Chain(variables=("x", "y", "z"), value="4 2")
    assert chain.trace(0) == "4 2"
    assert chain.trace(2) == "y = x = 4 2"
