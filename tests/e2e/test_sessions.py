"""Multi-turn conversations over the real stack: only new tokens are run, both ways of continuing agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kvtest.answers import assistant, chat, chat_body, said, user
from kvtest.lanes import some
from kvtest.methods import PRESETS

from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.question import find_question
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.sampling.params import SamplingParams
from kvferry.tools.oracle import OneProcessGenerator, OracleSession

MAX_TOKENS = 16
BUDGET = 128


def ask(stack: Any, messages: list[dict[str, str]], session_id: str, **fields: object) -> dict[str, Any]:
    compression = {"method": "rocketkv", "token_budget": BUDGET}
    fields = {"max_tokens": MAX_TOKENS, "kv_compression": compression, **fields}
    return chat(stack.base_url, chat_body(messages, session_id, **fields))


def test_turn_two_runs_only_its_new_tokens_whichever_way_the_client_continues(
    stack: Any, make_document: Callable[..., Any]
) -> None:
    document = make_document(11, num_words=900, num_facts=8)
    first = user(f"{document.text} {document.questions[0][0]}")
    second = user(document.questions[1][0])

    run_before = stack.prefill_metric("kvferry_prefill_tokens_total")
    answer_append = ask(stack, [first], "e2e-append")
    first_run = stack.prefill_metric("kvferry_prefill_tokens_total") - run_before
    assert first_run == answer_append["usage"]["prompt_tokens"]
    answer_replace = ask(stack, [first], "e2e-replace")
    assert answer_append["choices"] == answer_replace["choices"]

    run_before = stack.prefill_metric("kvferry_prefill_tokens_total")
    appended = ask(stack, [second], "e2e-append")
    append_run = stack.prefill_metric("kvferry_prefill_tokens_total") - run_before
    resent = ask(stack, [first, assistant(said(answer_replace)), second], "e2e-replace")
    resend_run = stack.prefill_metric("kvferry_prefill_tokens_total") - run_before - append_run

    assert appended["choices"] == resent["choices"]
    assert appended["usage"] == resent["usage"]
    # all KV of turn one is there but the last emitted token's
    known = answer_append["usage"]["prompt_tokens"] + answer_append["usage"]["completion_tokens"] - 1
    for answer, tokens_run in ((appended, append_run), (resent, resend_run)):
        assert answer["kv"]["reused_tokens"] == known
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == known
        assert tokens_run == answer["usage"]["prompt_tokens"] - known
        assert tokens_run < 40


@pytest.mark.parametrize(
    "method",
    some(
        PRESETS,
        *("full", "snapkv", "rocketkv", "d2o", "adakv", "streamingllm", "compactor-rdkv", "rdkv-hsa"),
        *("rdkv-draft", "rocketkv-kivi", "kvzip"),
    ),
)
def test_every_turn_equals_the_one_process_conversation(
    method: str, stack: Any, make_document: Callable[..., Any], tokenizer: ChatTokenizer, demo_model_dir: Any
) -> None:
    model = load_model(str(demo_model_dir), name="demo", device="cpu", dtype="float32", max_model_len=0)
    generator, oracle = OneProcessGenerator(model), OracleSession()
    budget = Budget(tokens=BUDGET) if PRESETS[method].takes_budget else None
    document = make_document(5, num_words=600, num_facts=6)
    compression: dict[str, object] = {"method": method}
    if budget is not None:
        compression["token_budget"] = BUDGET
    history: list[int] = []
    for turn in range(4):
        question = document.questions[turn][0]
        message = user(f"{document.text} {question}" if turn == 0 else question)
        answer = ask(stack, [message], f"e2e-oracle-{method}", kv_compression=compression)
        rendered = tokenizer.render([message])
        # later turns: the recorded tokens, the completion's end, then the new message without the bos token
        prompt = rendered if turn == 0 else history + rendered[1:]
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        tokens = generator.generate(
            prompt,
            plan=plan_for(method, budget=budget),
            sampling=SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0),
            session=oracle,
            question=find_question(tokenizer, [message], prompt),
        )
        ids = [token.token_id for token in tokens]
        assert said(answer) == tokenizer.decode(ids)
        assert answer["usage"]["completion_tokens"] == len(ids)
        end = model.spec.eos_token_ids[0]
        history = prompt + ids + ([] if ids[-1] == end else [end])
