"""Over the real stack a request that finds memory short is served with a smaller budget, and says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from kvtest.waiting import until

from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.text import TextAssembler
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.sampling.params import SamplingParams
from kvferry.tools.oracle import OneProcessGenerator

ARENA = "4MiB"
"""For 1,024 tokens of the demo model in full."""
BUDGET, FLOOR = 512, 48
MAX_TOKENS = 16


def test_the_answer_is_the_oracle_s_with_the_budget_that_it_reports(
    start_stack: Callable[..., Any],
    make_document: Callable[..., Any],
    tokenizer: ChatTokenizer,
    demo_model_dir: Path,
) -> None:
    document = make_document(3, num_words=900)
    ids = tokenizer.render([{"role": "user", "content": f"{document.text} {document.questions[0][0]}"}])
    body = {
        "model": "demo", "prompt": ids, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True,
        "kv_compression": {"method": "snapkv", "token_budget": BUDGET, "min_token_budget": FLOOR},
    }  # fmt: skip
    beside = {
        "model": "demo", "prompt": ids[:600], "max_tokens": 300, "temperature": 0, "ignore_eos": True,
        "stream": True, "kv_compression": {"method": "full"},
    }  # fmt: skip
    options = ("--arena-bytes", ARENA, "--elastic-budget", "--admission-wait-s", "0.05")
    with start_stack(*options) as stack:
        url = f"{stack.base_url}/v1/completions"
        for _ in range(20):  # until it comes before the other has ended
            with httpx.stream("POST", url, json=beside, timeout=240) as streaming:
                lines = streaming.iter_lines()
                next(line for line in lines if line.startswith("data: {"))
                response = httpx.post(url, json=body, timeout=240)
            if "smaller_token_budget" in response.json().get("kv", {}):
                break
        until(lambda: stack.decode_metric("kvferry_decode_batch_size") == 0)  # the other was cancelled
        alone = httpx.post(url, json=body, timeout=240)
    assert response.status_code == alone.status_code == 200, response.text
    granted = response.json()["kv"]["smaller_token_budget"]
    assert FLOOR <= granted < BUDGET
    assert "smaller_token_budget" not in alone.json()["kv"]
    model = load_model(str(demo_model_dir), name="demo", device="cpu", dtype="float32", max_model_len=0)
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    for answer, tokens in ((response, granted), (alone, BUDGET)):
        assembler = TextAssembler(tokenizer)
        plan = plan_for("snapkv", budget=Budget(tokens=tokens))
        generated = OneProcessGenerator(model).generate(ids, plan=plan, sampling=sampling)
        expected = "".join(assembler.push(token.token_id).token_text for token in generated)
        assert answer.json()["choices"][0]["text"] == expected
