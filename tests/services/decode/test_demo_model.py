"""The demo model through all of decode: transformers' tokens for "full", the oracle's for any method."""

import pytest
import torch
from kvtest.decode import oracle_ids
from transformers import AutoModelForCausalLM

from kvferry.shared.model.loading import load_model
from kvferry.shared.model.tokenizer import ChatTokenizer

FACTS = "the {0} castle has a pin . the pin of the {0} castle is {1} {2} . "
QUESTION = "what is the pin of the red castle ?"


@pytest.fixture(scope="module")
def models(demo_model_dir):
    """Two copies: one for the engine's thread, one for prefill and the oracle."""
    return load_model("demo", device="cpu"), load_model("demo", device="cpu")


@pytest.fixture(scope="module")
def tokenizer(demo_model_dir):
    return ChatTokenizer.load(demo_model_dir)


@pytest.fixture
def demo_request(models, tokenizer, request_of):
    def make(filler, **params):
        words = ("old", "green", "white", "small", "dark")
        facts = FACTS.format("red", 4, 2) + "".join(
            FACTS.format(words[i % 5], i % 10, i // 10 % 10) for i in range(filler)
        )
        prompt = tokenizer.render([{"role": "user", "content": facts + QUESTION}])
        return request_of(
            prompt, model_fingerprint=models[0].spec.fingerprint, **({"max_tokens": 12} | params)
        )

    return make


def greedy_by_transformers(demo_model_dir, request):
    model = AutoModelForCausalLM.from_pretrained(demo_model_dir, dtype=torch.float32)
    prompt = torch.tensor([request.prompt_token_ids])
    with torch.inference_mode():
        output = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=request.sampling.max_tokens,
            do_sample=False, eos_token_id=None if request.sampling.ignore_eos else 6, pad_token_id=0,
        )  # fmt: skip
    return output[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("ignore_eos", [True, False])
async def test_greedy_tokens_of_full_equal_transformers(
    harness, models, demo_model_dir, demo_request, ignore_eos
):
    request = demo_request(6, max_tokens=16, ignore_eos=ignore_eos)
    made = await harness(model=models[0], prefill_model=models[1], arena_bytes=64 << 20)
    assert await made.tokens(request) == greedy_by_transformers(demo_model_dir, request)


async def test_a_batch_of_every_method_equals_each_alone(harness, models, demo_request):
    cases = [
        {"filler": 3},
        {"filler": 30, "method": "rocketkv", "tokens": 64},
        {"filler": 30, "method": "snapkv", "tokens": 100},
        {"filler": 0, "max_tokens": 3},
        {"filler": 20, "method": "rocketkv", "tokens": 48, "temperature": 0.9, "seed": 3},
        {"filler": 10, "temperature": 1.0, "seed": 4, "frequency_penalty": 0.5},
        {"filler": 25, "method": "rocketkv", "tokens": 32, "max_tokens": 20},
        {"filler": 8, "ignore_eos": False, "max_tokens": 30},
        {"filler": 8, "method": "exact-topk", "tokens": 40},
        {"filler": 12, "method": "quest", "tokens": 48, "max_tokens": 16},
        {"filler": 10, "method": "sparq", "tokens": 48},
        {"filler": 6, "method": "streamingllm", "tokens": 60},
        {"filler": 8, "method": "h2o", "tokens": 80},
        {"filler": 9, "method": "pyramidkv", "tokens": 72},
        {"filler": 5, "method": "random", "tokens": 70},
        {"filler": 12, "method": "pyramidkv", "tokens": 48, "attention": "quest"},
    ]
    requests = [demo_request(request_id=str(i), **case) for i, case in enumerate(cases)]
    expected = [oracle_ids(models[1], request) for request in requests]
    made = await harness(
        model=models[0], prefill_model=models[1], arena_bytes=64 << 20, max_batch_size=len(cases)
    )
    alone = [await made.tokens(request) for request in requests]
    together = await made.together(requests)
    assert alone == expected
    assert [[token.token_id for token in tokens] for tokens in together] == expected
    assert await made.arena_is_free()


async def test_logprobs_beside_others_differ_from_those_alone_by_rounding_at_most(
    harness, models, demo_request
):
    """A matrix product's order of summation depends on the number of its rows."""
    methods = ({"method": "full"}, {"method": "rdkv", "tokens": 64}, {"method": "rocketkv", "tokens": 64})
    requests = [
        demo_request(filler, request_id=f"{filler} {case['method']}", logprobs=0, ignore_eos=True, **case)
        for filler in (10, 21)
        for case in methods
    ]
    made = await harness(model=models[0], prefill_model=models[1], arena_bytes=64 << 20, max_batch_size=8)
    alone = [tokens for request in requests for tokens in await made.together([request])]
    together = await made.together(requests)
    worst = 0.0
    for mine, theirs in zip(alone, together, strict=True):
        assert [token.token_id for token in mine] == [token.token_id for token in theirs]
        worst = max(worst, *(abs(a.logprob - b.logprob) for a, b in zip(mine, theirs, strict=True)))
    assert worst < 1e-4, worst
