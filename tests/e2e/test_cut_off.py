"""A client that leaves in the midst of its answer: what was delivered is a turn, its KV is the history."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.question import find_question
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.sampling.params import SamplingParams
from kvferry.tools.oracle import OneProcessGenerator, OracleSession

BUDGET = 96
LONGEST = 3000


@pytest.mark.parametrize("method", ["full", "rocketkv"])
def test_the_turn_after_one_that_was_cut_off_continues_from_what_was_delivered(
    method: str, stack: Any, make_document: Callable[..., Any], tokenizer: ChatTokenizer, demo_model_dir: Any
) -> None:
    document = make_document(71, num_words=300, num_facts=4)
    messages = [{"role": "user", "content": f"{document.text} {document.questions[0][0]}"}]
    session_id = f"e2e-cut-off-{method}"
    budget = None if method == "full" else Budget(tokens=BUDGET)
    body = {
        "model": "demo",
        "session_id": session_id,
        "temperature": 0,
        "kv_compression": {"method": method} | ({"token_budget": BUDGET} if budget else {}),
    }
    endless = {"max_tokens": LONGEST, "logit_bias": {"6": -100}}
    with (
        httpx.Client(base_url=stack.base_url, timeout=240) as client,
        client.stream(
            "POST", "/v1/chat/completions", json={**body, **endless, "messages": messages, "stream": True}
        ) as response,
    ):
        lines = (line for line in response.iter_lines() if '"content":' in line)
        next(lines)  # the first one has the role alone
        delivered = "".join(
            json.loads(next(lines).removeprefix("data: "))["choices"][0]["delta"]["content"] for _ in range(5)
        )

    kept = stack.wait_kept(session_id)
    prompt = tokenizer.render(messages)
    num_delivered = kept["tokens"] - len(prompt)
    assert kept["turns"] == 1
    assert 5 <= num_delivered < LONGEST
    # the last token that was delivered has KV if decode was a step ahead when it heard of the end
    config = json.loads((demo_model_dir / "config.json").read_text())
    row_floats = 2 * config["num_key_value_heads"] * config["head_dim"]
    num_known = kept["history_bytes"] // (config["num_hidden_layers"] * row_floats * 4)
    assert num_known in {kept["tokens"] - 1, kept["tokens"]}

    question = {"role": "user", "content": document.questions[1][0]}
    run_before = stack.prefill_metric("kvferry_prefill_tokens_total")
    reply = httpx.post(
        f"{stack.base_url}/v1/chat/completions",
        json={**body, "messages": [question], "session_mode": "append", "max_tokens": 8},
        timeout=240,
    )
    answer = reply.raise_for_status().json()
    assert answer["kv"]["reused_tokens"] == num_known
    num_run = stack.prefill_metric("kvferry_prefill_tokens_total") - run_before
    assert num_run == answer["usage"]["prompt_tokens"] - num_known

    # One process: the same completion, of which the tokens that were delivered remain.
    model = load_model(str(demo_model_dir), name="demo", device="cpu", dtype="float32", max_model_len=0)
    generator, oracle, plan = OneProcessGenerator(model), OracleSession(), plan_for(method, budget=budget)
    end = model.spec.eos_token_ids[0]
    num_drawn = num_known - len(prompt) + 1
    sampling = SamplingParams(max_tokens=LONGEST, temperature=0.0, logit_bias={end: -100.0})
    drawn = generator.generate(
        prompt,
        plan=plan,
        sampling=sampling,
        session=oracle,
        question=find_question(tokenizer, messages, prompt),
        cut_off_after=num_drawn,
    )
    ids = [token.token_id for token in drawn]
    assert tokenizer.decode(ids).startswith(delivered)
    second = prompt + ids[:num_delivered] + [end] + tokenizer.render([question])[1:]
    assert answer["usage"]["prompt_tokens"] == len(second)
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    asked = find_question(tokenizer, [question], second)
    tokens = generator.generate(second, plan=plan, sampling=sampling, session=oracle, question=asked)
    expected = tokenizer.decode([token.token_id for token in tokens])
    assert answer["choices"][0]["message"]["content"] == expected
