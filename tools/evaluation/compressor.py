"""Compresses a captured prompt to what a contender may have, in bytes held or read.

If a method's bytes follow from its plan, the plan is solved for beforehand (`budgets.py`); if they are known
only once a prompt is packed, its budget is raised until the bytes held come close to the target. Answers no
question.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.plan import Budget, CompressionPlan
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.spec import ModelSpec
from kvferry.tools.evaluation.budgets import SIZES, kept_bytes, plan_for_target, read_bytes
from kvferry.tools.evaluation.experiment import Contender, Experiment
from kvferry.tools.oracle import CapturedPrompt, Continuation, OneProcessGenerator

_CLOSE = 0.98
"""A packed prompt that holds this share of its target is not packed again."""
_MAX_TRIES = 5


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of a compressed prompt: kept, read by one decode step, and of its full KV."""

    kept: int
    read: int
    full: int


class Compressor:
    """Compresses for the contenders of one experiment."""

    def __init__(self, model: LanguageModel, generator: OneProcessGenerator, experiment: Experiment) -> None:
        self._generator = generator
        self._match = experiment.match
        self._counted: ModelSpec = replace(model.spec, dtype=experiment.kv_dtype, checkpoint_dtype=None)

    def compress(
        self, captured: CapturedPrompt, contender: Contender, *, max_new_tokens: int
    ) -> Continuation | None:
        """Compress the prompt to the contender's target; None if the target cannot be met.

        Args: max_new_tokens: tokens that may follow, further questions among them.
        """
        if contender.target is None:
            return self._compress(captured, contender.plan, max_new_tokens)
        plan = plan_for_target(
            contender.plan,
            contender.target,
            match=self._match,
            spec=self._counted,
            num_tokens=len(captured.token_ids),
            max_new_tokens=max_new_tokens,
        )
        if contender.plan.representation.name != "rdkv" or self._match == "given":
            return None if plan is None else self._compress(captured, plan, max_new_tokens)
        size_bytes = contender.target.size_bytes(self._counted, len(captured.token_ids))
        least = 1 if plan is None else plan.budget.tokens
        assert least is not None
        return self._compress_packed(captured, contender.plan, size_bytes, least, max_new_tokens)

    def sizes(self, continuation: Continuation) -> Sizes:
        """Count the bytes that a compressed prompt holds and that a step reads."""
        resolved, came_to = continuation.resolved, self._prompt_bytes(continuation)
        return Sizes(
            kept=kept_bytes(self._counted, resolved, came_to),
            read=read_bytes(self._counted, resolved, came_to),
            full=self._counted.full_bytes(resolved.num_prompt_tokens),
        )

    def _compress(self, captured: CapturedPrompt, plan: CompressionPlan, max_new_tokens: int) -> Continuation:
        return self._generator.compress(captured, plan=plan, max_new_tokens=max_new_tokens)

    def _compress_packed(
        self,
        captured: CapturedPrompt,
        plan: CompressionPlan,
        target_bytes: int,
        least: int,
        max_new_tokens: int,
    ) -> Continuation | None:
        """Pack the prompt to at most target_bytes: within 2 % of it, or as near as a few tries come.

        Args: least: a budget in tokens whose bound stays within the target, or 1.
        """
        best: Continuation | None = None
        low, low_bytes, high = 0, 0, len(captured.token_ids)
        tokens = least
        for _ in range(_MAX_TRIES):
            candidate = self._compress(captured, replace(plan, budget=Budget(tokens=tokens)), max_new_tokens)
            held = SIZES[self._match](self._counted, candidate.resolved, self._prompt_bytes(candidate))
            if held <= target_bytes:
                best, low, low_bytes = candidate, tokens, held
                if held >= _CLOSE * target_bytes:
                    break
            else:
                high = tokens
            if high - low <= 1:
                break
            # Bytes grow about in proportion to the budget.
            guess = low * target_bytes // low_bytes if low_bytes else 1
            tokens = min(max(guess, low + 1), high - 1)
        return best

    def _prompt_bytes(self, continuation: Continuation) -> list[int | None]:
        """Return the bytes of each layer whose size depends on its content; None for others."""
        formats = make_formats(self._counted, continuation.resolved)
        layers = zip(formats, continuation.compressed, strict=True)
        return [fmt.prompt_bytes(tensors) for fmt, tensors in layers]
