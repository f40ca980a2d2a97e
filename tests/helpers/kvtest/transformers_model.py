"""transformers' own `generate`, and prompts and plans to compare with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from kvferry.shared.compression.plan import Budget, CompressionPlan
from kvferry.shared.compression.presets import plan_for, preset
from kvferry.shared.sampling.params import SamplingParams


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(8, 600, (num_tokens,), generator=generator).tolist()


class Reference:
    """transformers' own model."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        compressor = getattr(getattr(self._model, "hf_quantizer", None), "compressor", None)
        if compressor is not None:  # expands float4 and microscaling formats to bfloat16
            compressor.decompress_model(self._model)
            nn.Module.float(self._model)

    def tokens(self, prompt: list[int], num_tokens: int) -> list[int]:
        output = self._model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        return output[0, len(prompt) :].tolist()

    def answers(self, prompt: list[int], tokens: list[int], *, tie: float) -> bool:
        """Whether these are its tokens, up to the first place where two logits differ by at most `tie`."""
        expected = self.tokens(prompt, len(tokens))
        if tokens == expected:
            return True
        place = next(i for i, token in enumerate(tokens) if token != expected[i])
        with torch.inference_mode():
            logits = self._model(torch.tensor([[*prompt, *expected[:place]]])).logits[0, -1]
        return bool(abs(logits[expected[place]] - logits[tokens[place]]) <= tie)


def plan_of(method: str) -> CompressionPlan:
    return plan_for(method, budget=Budget(tokens=20) if preset(method).takes_budget else None)
