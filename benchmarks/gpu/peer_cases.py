"""What one would run without kvferry on the same machine: transformers' `generate` with torch's attention."""

from __future__ import annotations

from typing import Any

import torch
from shapes import transformers_config
from timing import Clock

from kvferry.tools.kernel_cache.shapes import Shape

WAYS: dict[str, dict[str, str]] = {
    "dynamic cache, eager": {},
    # decode steps are compiled, into CUDA graphs where that works
    "static cache, compiled": {"cache_implementation": "static"},
}
TINY_WAYS = ("dynamic cache, eager",)
FEW, MANY = 4, 36
"""New tokens of two calls, whose difference is steps alone."""


class PeerBench:
    """Measures ways of transformers on one random model and one prompt. Args: num_tokens: of the prompt."""

    def __init__(self, shape: Shape, clock: Clock, num_tokens: int, seed: int) -> None:
        from transformers import AutoModelForCausalLM

        config = transformers_config(shape, max_model_len=num_tokens + MANY)
        make: Any = AutoModelForCausalLM.from_config
        with clock.device:
            self._model: Any = make(
                config, dtype=getattr(torch, shape.dtype), attn_implementation="sdpa"
            ).eval()
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(2, shape.vocab_size, (1, num_tokens), generator=generator)
        self._name, self._clock, self._ids = shape.name, clock, ids.to(clock.device)

    @torch.inference_mode()
    def measure(self, way: str) -> dict[str, Any]:
        """Return one row."""
        for number in (FEW, MANY) if self._clock.warms_up else ():
            self._seconds(way, number)
        few_s, many_s = self._seconds(way, FEW), self._seconds(way, MANY)
        return {
            "model": self._name, "way": way, "tokens": self._ids.shape[1],
            "ms_per_token": 1e3 * (many_s - few_s) / (MANY - FEW), "first_tokens_s": few_s,
        }  # fmt: skip

    def _seconds(self, way: str, number: int) -> float:
        return self._clock.elapsed_s(
            lambda: self._model.generate(
                self._ids, attention_mask=torch.ones_like(self._ids), max_new_tokens=number,
                min_new_tokens=number, do_sample=False, **WAYS[way],
            )
        )  # fmt: skip
