"""What kvpress makes of prompts as its users run it, for `test_kvpress_peer.py`.

    ENV/bin/python kvpress_answers.py PROMPTS FOLDER RATIO PRESS... > LINES

Each press is around a forward pass of its own (`with press(model)`), positions go on at the prompt's length
as in kvpress's pipeline, and tokens are fed one by one through kvpress's own patch of attention. Presses are
expressions that end with @known or @unknown: whether the question is in the pass. Prints a JSON line for each
prompt and press: KL before each token of the answer, and the greedy answer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import kvpress  # pyright: ignore[reportMissingImports]
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

Model = Any


def served(
    model: Model, press: Any, prompt: Sequence[int], later: Sequence[int]
) -> tuple[Tensor, DynamicCache]:
    """Return the logits after a prompt whose first part a press compressed, and the cache."""
    cache = DynamicCache()
    torch.manual_seed(0)
    with press(model) if press is not None else nullcontext():
        logits = model(torch.tensor([prompt]), past_key_values=cache).logits[0, -1]
    for number, token in enumerate(later):
        logits = step(model, cache, token, len(prompt) + number)
    return logits, cache


def step(model: Model, cache: DynamicCache, token: int, position: int) -> Tensor:
    ids, positions = torch.tensor([[token]]), torch.tensor([[position]])
    return model(ids, past_key_values=cache, position_ids=positions).logits[0, -1]


def forced(model: Model, line: dict[str, Any], press: Any, num_pressed: int) -> Tensor:
    """Return float32 log-probabilities `[n, V]` before each token of the line's answer."""
    prompt, answer = line["prompt"], line["answer"]
    logits, cache = served(model, press, prompt[:num_pressed], prompt[num_pressed:])
    rows = [logits]
    for number, token in enumerate(answer[:-1]):
        rows.append(step(model, cache, token, len(prompt) + number))
    return torch.stack(rows).log_softmax(-1)


def greedy(model: Model, line: dict[str, Any], press: Any, num_pressed: int) -> list[int]:
    prompt = line["prompt"]
    logits, cache = served(model, press, prompt[:num_pressed], prompt[num_pressed:])
    answer = [int(logits.argmax())]
    while answer[-1] not in line["eos_token_ids"] and len(answer) < line["max_new_tokens"]:
        answer.append(int(step(model, cache, answer[-1], len(prompt) + len(answer) - 1).argmax()))
    return answer


def main(prompts: Path, folder: str, ratio: float, presses: Sequence[str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    for line in map(json.loads, prompts.read_text(encoding="utf-8").splitlines()):
        full = forced(model, line, None, len(line["prompt"]))
        for text in presses:
            expression, setting = text.split("@")
            press = eval(expression, vars(kvpress))
            press.compression_ratio = ratio
            num_pressed = len(line["prompt"]) if setting == "known" else line["num_document_tokens"]
            logprobs = forced(model, line, press, num_pressed)
            found = {
                "example": line["example"],
                "press": text,
                "kl": (full.exp() * (full - logprobs)).sum(-1).tolist(),
                "tokens": greedy(model, line, press, num_pressed),
            }
            sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.inference_mode():
        main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4:])
