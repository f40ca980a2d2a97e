"""Grammars compiled over a byte-level vocabulary: what they allow, their bounds, and their errors."""

import ctypes
import json
import random
import re
import time
from types import SimpleNamespace

import llguidance
import pytest
import torch
from kvtest.grammars import COSTLY, ORDINARY
from kvtest.text_models import byte_level_tokenizer
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from kvferry.models import DEMO_MODEL
from kvferry.shared.errors import InvalidRequest, KvferryError
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.sampling import grammar as module
from kvferry.shared.sampling import grammar_child, grammar_source
from kvferry.shared.sampling.grammar import GrammarCompiler
from kvferry.shared.sampling.grammar_source import FREE_S, MAX_CHARACTERS, TOKEN_S
from kvferry.shared.sampling.masks import mask_rows
from kvferry.shared.sampling.params import Grammar, SamplingParams
from kvferry.shared.sampling.sampler import BatchSampler, SequenceSampler

RAW = byte_level_tokenizer()
ENDS = tuple(RAW.token_to_id(text) for text in ("<|endoftext|>", "<|im_end|>"))
VOCAB = RAW.get_vocab_size() + 3  # as padded models have


def compiler_of(vocab_size):
    tokenizer = ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=RAW), ENDS)
    return GrammarCompiler(lambda: tokenizer, vocab_size, ENDS)


@pytest.fixture(scope="module")
def compiler():
    return compiler_of(VOCAB)


async def check(grammar, tokenizer=None, vocab_size=VOCAB):
    """As a service does with a client's."""
    tokenizer = tokenizer or ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=RAW), ENDS)
    compiler = GrammarCompiler(lambda: tokenizer, vocab_size, ENDS)
    try:
        await compiler.check(grammar)
    finally:
        await compiler.close()


def regex(text):
    return Grammar(kind="regex", text=text)


def blocked_by(matcher):
    """What the matcher adds to the logits of its next token."""
    rows = mask_rows(1, VOCAB)
    rows.fill(float("nan"))
    matcher.block(rows[0])
    return torch.from_numpy(rows[0, :VOCAB])


def allowed_texts(matcher):
    ids = (blocked_by(matcher) == 0).nonzero()[:, 0].tolist()
    return {RAW.decode([token_id], skip_special_tokens=False) for token_id in ids}


def accepts(compiler, grammar, text):
    """Whether the grammar allows a text, and its end there."""
    matcher = compiler.matcher(grammar)
    for token_id in RAW.encode(text, add_special_tokens=False).ids:
        if blocked_by(matcher)[token_id] != 0:
            return False
        matcher.accept(token_id)
    return bool((blocked_by(matcher)[list(ENDS)] == 0).all())


def test_at_the_end_only_ends_are_allowed_and_padding_never_is(compiler):
    matcher = compiler.matcher(regex("(ab|cd)"))
    blocked = blocked_by(matcher)
    assert blocked.shape == (VOCAB,)
    assert blocked.dtype == torch.float32
    assert set(blocked.tolist()) == {0.0, -torch.inf}
    assert allowed_texts(matcher) <= {"a", "ab", "c", "cd"}
    assert blocked[-3:].isneginf().all()
    for token_id in RAW.encode("cd", add_special_tokens=False).ids:
        matcher.accept(token_id)
    assert allowed_texts(matcher) == {"<|endoftext|>", "<|im_end|>"}
    matcher.accept(ENDS[0])
    with pytest.raises(KvferryError) as refused:
        matcher.accept(5)
    assert refused.value.reason == "grammar_mismatch"


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (regex(r"\d{2}/[a-c]+\\x"), "12/abc\\x", "12/abcx"),
        (regex(r"^[^\d\s]\w?$"), "ab", "1"),
        (regex(r"\d"), "7", "\u0667"),
        (regex("é→.(?:你好)?"), "é→x你好", "é→x你"),
        (Grammar(kind="choice", text=json.dumps(['a "b"\n', "ü"])), 'a "b"\n', "a"),
        (Grammar(kind="grammar", text='start: "a" B\nB: /[0-9]+/'), "a12", "a"),
        (Grammar(kind="grammar", text='root ::= "a" b\nb ::= [0-9]+'), "a12", "a"),
        (Grammar(kind="json_schema", text='{"type": "object"}'), '{"a": [1, null]}', "[1]"),
        (Grammar(kind="json_schema", text='{"const": 5}'), "5", "6"),
        (Grammar(kind="json_schema", text='{"type": "array"}'), "[\n  1\n]", "[" + " " * 60 + "1]"),
    ],
)
async def test_each_kind_allows_its_texts_and_no_others(compiler, grammar, right, wrong):
    await check(grammar)
    assert accepts(compiler, grammar, right)
    assert not accepts(compiler, grammar, wrong)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (regex("("), "unclosed group"),
        (regex("(?=a)b"), "look-around"),
        (regex("x" * (MAX_CHARACTERS + 1)), "262145 characters; there may be 262144"),
        (Grammar(kind="json_schema", text="{"), "line 1"),
        (Grammar(kind="json_schema", text='{"type": "bogus"}'), "Invalid type: bogus"),
        (Grammar(kind="json_schema", text='{"not": {"type": "null"}}'), 'Unimplemented keys: ["not"]'),
        (Grammar(kind="grammar", text="start: x"), 'unknown name: "x"'),
    ],
)
async def test_what_cannot_be_followed_is_refused_in_words(compiler, grammar, message):
    with pytest.raises(InvalidRequest) as refused:
        await check(grammar)
    with pytest.raises(InvalidRequest, match=re.escape(refused.value.message)):
        compiler.matcher(grammar)
    assert message in refused.value.message
    assert len(refused.value.message) < 400
    assert "\n" not in refused.value.message


async def test_a_tokenizer_of_whole_words_is_refused_in_words():
    words = ChatTokenizer.load(DEMO_MODEL)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="tokenizer has no structured output"):
            await check(regex("a"), words, 704)


def test_compiled_grammars_are_shared_by_key_and_their_matchers_are_not(compiler, monkeypatch):
    one, other = compiler.matcher(regex("ab+c?")), compiler.matcher(regex("ab+c?"))
    one.accept(RAW.token_to_id("a"))
    assert "b" in allowed_texts(one)
    assert "b" not in allowed_texts(other)
    monkeypatch.setattr(module, "compiled", lambda *grammar: pytest.fail("it is compiled already"))
    again = compiler_of(VOCAB)
    assert allowed_texts(again.matcher(regex("ab+c?"))) == allowed_texts(other)
    assert compiler.matcher(None) is None


def number(**bounds):
    return Grammar(kind="json_schema", text=json.dumps({"anyOf": [{"type": "number", **bounds}]}))


@pytest.mark.parametrize(
    ("bounds", "right", "wrong"),
    [
        ({"exclusiveMinimum": 15, "maximum": 15.75}, ("15.75", "15.01"), ("15", "15.0", "15.76")),
        ({"minimum": -24.5, "exclusiveMaximum": -24}, ("-24.5", "-24.01"), ("-24", "-24.0", "-24.6")),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, ("0.01", "0.9"), ("0", "1", "1.0")),
        ({"exclusiveMinimum": 0}, ("0.01", "7"), ("0", "0.0", "-1")),
    ],
)
def test_a_number_stays_within_its_bounds(compiler, bounds, right, wrong):
    assert all(accepts(compiler, number(**bounds), text) for text in right)
    assert not any(accepts(compiler, number(**bounds), text) for text in wrong)


def test_names_and_values_that_look_like_bounds_stay(compiler):
    schema = {"const": {"exclusiveMinimum": 3, "maximum": 4}}
    assert accepts(
        compiler, Grammar(kind="json_schema", text=json.dumps(schema)), json.dumps(schema["const"])
    )


def draw(sampler, steps, logits):
    drawn = []
    for step in range(steps):
        drawn.append(sampler.sample(logits[step]).token_id)
        if drawn[-1] in ENDS:
            break
    return drawn


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_a_replay_goes_on_where_the_delivered_tokens_end(compiler, temperature):
    schema = Grammar(
        kind="json_schema", text='{"type": "array", "items": {"type": "integer"}, "minItems": 3}'
    )
    logits = torch.randn(200, VOCAB, generator=torch.Generator().manual_seed(5)) * 3
    params = SamplingParams(max_tokens=200, temperature=temperature, seed=4, grammar=schema)
    whole = draw(SequenceSampler(params, (1, 2), VOCAB, matcher=compiler.matcher(schema)), 200, logits)
    for num in (1, len(whole) // 2, len(whole) - 1):
        replayed = SamplingParams(
            max_tokens=200, temperature=temperature, seed=4, grammar=schema, first_index=num
        )
        matcher = compiler.matcher(schema)
        sampler = SequenceSampler(replayed, (1, 2, *whole[:num]), VOCAB, matcher=matcher)
        assert draw(sampler, 200, logits[num:]) == whole[num:]


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_a_batch_draws_what_each_draws_alone_and_neighbours_are_untouched(compiler, temperature):
    grammars = [None, regex("[a-f]{30,40}"), None, Grammar(kind="json_schema", text='{"minItems": 9}')]
    params = [
        SamplingParams(max_tokens=99, temperature=temperature, seed=i, grammar=grammar)
        for i, grammar in enumerate(grammars)
    ]

    def samplers(of=params):
        return [SequenceSampler(p, (1,), VOCAB, matcher=compiler.matcher(p.grammar)) for p in of]

    plain = [SamplingParams(max_tokens=99, temperature=temperature, seed=i) for i in range(4)]
    alone, unmasked, placed = samplers(), samplers(plain), samplers()
    batch = BatchSampler(4, VOCAB, torch.device("cpu"))
    for slot, sampler in enumerate(placed):
        batch.place(slot, sampler)
    assert batch.needs_tokens
    for step in range(20):
        logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(step)) * 2
        logits[:, list(ENDS)] -= 50
        batch.refill()
        tokens, valid = batch.sample(logits, torch.ones(4, dtype=torch.int64), batch.flavour)
        assert valid.all()
        assert tokens.tolist() == [each.sample(logits[i]).token_id for i, each in enumerate(alone)]
        free = [each.sample(logits[i]).token_id for i, each in enumerate(unmasked)]
        assert tokens[[0, 2]].tolist() == [free[0], free[2]]
        for sampler, token in zip(placed, tokens.tolist(), strict=True):
            sampler.observe(token)
    batch.remove(1)
    batch.remove(3)
    assert not batch.needs_tokens
    assert not batch.flavour.masks


def test_a_grammar_that_ends_in_a_dead_end_fails_its_own_sequence(compiler):
    grammar = regex("ab")
    sampler = SequenceSampler(
        SamplingParams(max_tokens=9, temperature=0.0, grammar=grammar, logit_bias={}),
        (1,),
        VOCAB,
        matcher=compiler.matcher(grammar),
    )
    with pytest.raises(KvferryError) as refused:
        sampler.sample(torch.full((VOCAB,), -torch.inf))
    assert refused.value.reason == "invalid_logits"
    with pytest.raises(KvferryError) as refused:
        sampler.observe(ENDS[0])
    assert refused.value.reason == "grammar_mismatch"
    assert sampler.refusal().reason == "grammar_limit"


@pytest.mark.parametrize("is_special", [True, False])
def test_a_grammar_may_spell_an_added_token(is_special):
    """As text: a token that other servers would draw for it is none of the grammar's."""
    raw = byte_level_tokenizer()
    raw.add_tokens([AddedToken("<tool_call>", special=is_special, normalized=False)])
    tokenizer = ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=raw), ENDS)
    compiler = GrammarCompiler(lambda: tokenizer, raw.get_vocab_size(), ENDS)
    mark = raw.token_to_id("<tool_call>")
    schema = {
        "type": "object",
        "properties": {"<tool_call>": {"const": "<tool_call>"}},
        "required": ["<tool_call>"],
        "additionalProperties": False,
    }
    for grammar in (
        Grammar(kind="choice", text='["<tool_call>"]'),
        regex("<tool_call>"),
        Grammar(kind="json_schema", text=json.dumps(schema)),
        Grammar(kind="lark", text='start: "<tool_call>"'),
    ):
        matcher, text = compiler.matcher(grammar), b""
        while (blocked := blocked_by(matcher))[list(ENDS)].isinf().all():
            assert blocked[mark].isinf()
            token_id = int((blocked == 0).nonzero()[0])
            matcher.accept(token_id)
            text += raw.decode([token_id], skip_special_tokens=False).encode()
            assert len(text) < 200
        assert b"<tool_call>" in text
    by_id = compiler.matcher(Grammar(kind="lark", text=f'start: <[{mark}]> "a"'))
    assert blocked_by(by_id)[mark] == 0
    by_id.accept(mark)
    assert tokenizer.special_parts("a<tool_call>b") == ["a", mark, "b"]


@pytest.mark.parametrize("more", range(34))
def test_vocabularies_of_all_sizes_are_masked(more):
    """Also of multiples of 32, as most models have: llguidance's mask has a word more then."""
    vocab_size = RAW.get_vocab_size() + more
    sampler = SequenceSampler(
        SamplingParams(max_tokens=9, temperature=0.0, grammar=regex("(ab|cd)")),
        [1],
        vocab_size,
        matcher=compiler_of(vocab_size).matcher(regex("(ab|cd)")),
    )
    batch = BatchSampler(1, vocab_size, torch.device("cpu"))
    batch.place(0, sampler)
    batch.refill()
    logits = torch.zeros(1, vocab_size)
    tokens, valid = batch.sample(logits, torch.ones(1, dtype=torch.int64), batch.flavour)
    assert valid.all()
    assert tokens.tolist() == [sampler.sample(logits[0]).token_id]
    assert RAW.id_to_token(int(tokens)) in ("a", "ab", "c", "cd")


def follow(matcher, texts):
    for text in texts:
        blocked_by(matcher)
        matcher.accept(RAW.token_to_id(text))


def test_a_grammar_whose_masks_take_too_long_is_ended_by_name(compiler):
    matcher = compiler.matcher(COSTLY)
    begin_s = time.thread_time()
    with pytest.raises(InvalidRequest, match="more than 20 ms of a processor for each token") as refused:
        follow(matcher, "z" * 100)
    assert refused.value.reason == "grammar_limit"
    one_mask_s = 1.0
    assert time.thread_time() - begin_s < FREE_S + 100 * TOKEN_S + one_mask_s
    for _ in range(2):  # and stays so, at no cost
        with pytest.raises(InvalidRequest):
            blocked_by(matcher)


class Clock:
    """Goes on by so much whenever it is asked."""

    def __init__(self, step_s=0.0):
        self.now_s, self.step_s, self.num_asked = 0.0, step_s, 0

    def __call__(self):
        self.num_asked += 1
        self.now_s += self.step_s
        return self.now_s


@pytest.fixture
def clocks(monkeypatch):
    """The one on the wall and the thread's own."""
    wall, own = Clock(), Clock()
    monkeypatch.setattr(grammar_source, "time", SimpleNamespace(perf_counter=wall, thread_time=own))
    return wall, own


def test_what_is_not_used_of_the_time_is_not_saved_up(compiler, clocks):
    matcher = compiler.matcher(regex("[a-z]*"))
    follow(matcher, "a" * 200)
    for clock in clocks:
        clock.step_s = 0.1
    with pytest.raises(InvalidRequest, match="cannot be followed"):
        follow(matcher, "aaa")


def test_only_a_call_that_is_not_short_makes_the_threads_own_time_asked_for(compiler, clocks):
    wall, own = clocks
    matcher = compiler.matcher(regex("[a-z]*"))
    follow(matcher, "a" * 20)
    assert (wall.num_asked, own.num_asked) == (80, 0)
    wall.step_s = 10.0  # others had the processor
    follow(matcher, "a" * 20)
    assert (wall.num_asked, own.num_asked) == (82, 78)
    own.step_s = FREE_S
    with pytest.raises(InvalidRequest, match="cannot be followed"):
        follow(matcher, "aa")


def seen(number):
    """A grammar for which every text of so many characters is a state of its own."""
    return regex(f"(?s:.*)a(?s:.{{{number}}})")


def chances(seed, count=400):
    return random.Random(seed).choices("abcd", k=count)


def test_one_that_has_exhausted_the_states_fails_none_that_begins_later(compiler, monkeypatch):
    monkeypatch.setattr(grammar_source, "_MAX_LEXER_STATES", 2000)
    follow(compiler.matcher(seen(60), "other"), "ab")
    with pytest.raises(InvalidRequest, match="too many states") as refused:
        follow(compiler.matcher(seen(60)), chances(0))
    assert refused.value.reason == "grammar_limit"
    for owner in ("", "other"):
        follow(compiler.matcher(seen(60), owner), "abcd")


class _Heap(ctypes.Structure):
    """C's `struct mallinfo2`."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "mapped", "usmblks")),
        *((name, ctypes.c_size_t) for name in ("fsmblks", "used", "free", "keepcost")),
    ]


def heap_bytes():
    call = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if call is None:
        pytest.skip("this C library does not say what is allocated")
    call.restype = _Heap
    heap = call()
    return heap.used + heap.mapped


def test_what_following_has_made_is_not_cached(compiler):
    blocked_by(compiler.matcher(seen(61)))
    begin_bytes = heap_bytes()
    matcher = compiler.matcher(seen(61))
    follow(matcher, chances(0, 4000))
    assert heap_bytes() - begin_bytes > 4 << 20
    del matcher
    assert heap_bytes() - begin_bytes < 1 << 20


@pytest.fixture(scope="module")
def many_tokens():
    """llguidance's tokens of a vocabulary as large as a real model's: words, with and without a space."""
    chance, vocabulary = random.Random(5), dict(RAW.get_vocab())
    while len(vocabulary) < 150_000:
        word = "".join(chance.choices("etaoinshrdlcumwfgypbvkjxqz", range(26, 0, -1), k=chance.randint(2, 9)))
        for text in (word, "\u0120" + word, word.capitalize(), "\u0120" + word.capitalize()):
            vocabulary.setdefault(text, len(vocabulary))
    data = json.loads(RAW.to_str())
    data["model"]["vocab"] = vocabulary
    return llguidance.LLTokenizer(json.dumps(data), len(vocabulary), list(ENDS))


def test_ordinary_grammars_are_followed_within_their_time_at_a_large_vocabulary(many_tokens):
    for name, grammar in ORDINARY.items():
        assert grammar_child._try(many_tokens, grammar.kind, grammar.text) is None, name


def test_a_costly_grammar_is_refused_before_anybody_follows_it(many_tokens):
    costly = COSTLY.text.replace("/[a-y]+/", "s")
    assert "cannot be followed" in (grammar_child._try(many_tokens, "lark", costly) or "")
    assert grammar_child._try(many_tokens, "lark", COSTLY.text) is None  # it shows later


def test_few_grammars_are_cached(compiler):
    for number in range(module._MAX_COMPILED + 9):
        compiler.matcher(regex(f"cached{number}"))
    assert len(compiler._compiled_over._compiled) == module._MAX_COMPILED
