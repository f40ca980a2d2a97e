"""Over the real stack a short request overtakes a long one, and both answer as one process does."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.text import TextAssembler
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.sampling.params import SamplingParams
from kvferry.tools.oracle import OneProcessGenerator

LONG_WORDS, SHORT_WORDS = 6000, 60
MAX_TOKENS = 8
WAIT_S = 120.0


def test_a_short_requests_answer_begins_before_that_of_a_long_one_in_mid_pass(
    stack: Any, make_document: Callable[..., Any], tokenizer: ChatTokenizer, demo_model_dir: Path
) -> None:
    prompts = {}
    for seed, (name, num_words) in enumerate((("long", LONG_WORDS), ("short", SHORT_WORDS))):
        document = make_document(seed, num_words=num_words, num_facts=4)
        content = f"{document.text} {document.questions[0][0]}"
        prompts[name] = tokenizer.render([{"role": "user", "content": content}])
    events: list[str] = []

    def ask(name: str) -> str:
        body = {
            "model": "demo", "prompt": prompts[name], "max_tokens": MAX_TOKENS, "temperature": 0,
            "ignore_eos": True, "stream": True, "session_id": f"overtaking-{name}",
            "kv_compression": {"method": "rocketkv", "token_budget": 64},
        }  # fmt: skip
        text = ""
        with httpx.stream("POST", f"{stack.base_url}/v1/completions", json=body, timeout=240) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    choices = json.loads(line[6:])["choices"]
                    text += "".join(choice["text"] for choice in choices)
                    if text and name not in events:
                        events.append(name)
        return text

    staged_before = stack.prefill_metric("kvferry_history_bytes", tier="memory")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, "long")
        deadline = time.monotonic() + WAIT_S
        # The first layer's rows are staged, so the long prompt is in mid-pass.
        while stack.prefill_metric("kvferry_history_bytes", tier="memory") == staged_before:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        answers = {"short": ask("short"), "long": running.result()}
    assert events == ["short", "long"]

    model = load_model(str(demo_model_dir), name="demo", device="cpu", dtype="float32", max_model_len=0)
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    plan = plan_for("rocketkv", budget=Budget(tokens=64))
    for name, ids in prompts.items():
        assembler = TextAssembler(tokenizer)
        generated = OneProcessGenerator(model).generate(ids, plan=plan, sampling=sampling)
        assert answers[name] == "".join(assembler.push(token.token_id).token_text for token in generated)
