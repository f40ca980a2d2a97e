"""lm-eval's `local-completions` against a served demo model: the likelihoods that it reads from `echo` with
`logprobs` are a plain transformers forward's.

lm-eval runs in an environment of its own, which `make lm-eval` makes; LM_EVAL_COMMAND names its `lm_eval`
command, as `make test-all` does. Nothing is downloaded: the task is the file that is written here.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path

import pytest
import torch
from kvtest.documents import make_document
from kvtest.stack import serving
from transformers import AutoModelForCausalLM, AutoTokenizer

COMMAND = "LM_EVAL_COMMAND"
NUM_DOCUMENTS, NUM_CHOICES = 2, 4
TASK = """
task: pins
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: choices
doc_to_target: label
target_delimiter: " "
metric_list:
  - metric: acc
"""


def records() -> list[dict[str, object]]:
    """Questions about documents, in the demo model's chat format; the wrong choices are other facts."""
    made: list[dict[str, object]] = []
    for seed in range(NUM_DOCUMENTS):
        document, rng = make_document(seed, num_words=300), random.Random(seed)
        for question, answer in document.questions[:3]:
            wrong = [other for _, other in document.questions if other != answer][: NUM_CHOICES - 1]
            choices = rng.sample([answer, *wrong], NUM_CHOICES)
            context = f"<|bos|> <|user|> {document.text} {question} <|end|> <|assistant|>"
            made.append({"context": context, "choices": choices, "label": choices.index(answer)})
    return made


@pytest.mark.full
@pytest.mark.skipif(not os.environ.get(COMMAND), reason=f"{COMMAND} names no lm_eval command")
@pytest.mark.timeout(600)
def test_its_likelihoods_are_transformers_own(tmp_path: Path, demo_model_dir: Path) -> None:
    asked = records()
    (tmp_path / "pins.jsonl").write_text("".join(json.dumps(record) + "\n" for record in asked))
    (tmp_path / "pins.yaml").write_text(TASK.format(data=tmp_path / "pins.jsonl"))
    with serving("--in-process") as stack:
        url = f"{stack.base_url}/v1/completions"
        model = f"model=demo,base_url={url},tokenizer={demo_model_dir},max_length=8192"
        subprocess.run(
            [
                *(os.environ[COMMAND], "--model", "local-completions", "--model_args", model),
                *("--tasks", "pins", "--include_path", tmp_path, "--log_samples", "--output_path", tmp_path),
            ],
            check=True,
            timeout=500,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")},
        )
    (samples_path,) = tmp_path.rglob("samples_pins_*.jsonl")
    samples = [json.loads(line) for line in samples_path.read_text().splitlines()]
    assert len(samples) == len(asked)
    own = AutoModelForCausalLM.from_pretrained(demo_model_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(demo_model_dir)
    for sample in samples:
        doc = sample["doc"]
        for choice, (response,) in zip(doc["choices"], sample["resps"], strict=True):
            ids = tokenizer(f"{doc['context']} {choice}", return_tensors="pt").input_ids
            with torch.inference_mode():
                logprobs = own(ids).logits[0].double().log_softmax(-1)
            first = ids.shape[1] - len(choice.split())
            wanted = logprobs[range(first - 1, ids.shape[1] - 1), ids[0, first:]]
            assert float(response[0]) == pytest.approx(float(wanted.sum()), abs=2e-3)
            greedy = bool((logprobs[first - 1 : -1].argmax(-1) == ids[0, first:]).all())
            assert str(response[1]) == str(greedy)
    assert sum(sample["acc"] for sample in samples) >= 0.75 * len(samples)
