"""`kvferry.compress` in one process, with transformers' own `generate`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvferry
from kvferry.models import DEMO_MODEL

model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
filler = "the old sailor painted the quiet bridge . " * 40
question = "what is the pin of the red castle ?"
messages = [
    {"role": "user", "content": f"remember that the pin of the red castle is 4 2 7 1 . {filler}{question}"}
]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
)

cache = kvferry.compress(model, inputs["input_ids"], method="snapkv", token_budget=48)
print(f"{cache.resolved.num_prompt_tokens} tokens: {cache.size_bytes} of {cache.full_bytes} bytes")

with tempfile.TemporaryDirectory() as folder:
    cache.save(Path(folder) / "prompt.safetensors")
    cache = kvferry.load(model, Path(folder) / "prompt.safetensors")
output = model.generate(cache.input_ids, past_key_values=cache, max_new_tokens=8, do_sample=False)
print("answer:", tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
