"""Which token completes a completion; prefill, which draws the first ones, and decode find the same one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.model.text import TextAssembler
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.sampling.params import SamplingParams


class Ending:
    """Follows one completion to its stop; its length is not looked at.

    Attributes: stop_token_ids: ids that end it, including the model's own unless they are ignored.

    Args:
        prompt_token_ids: its last `sampling.first_index` tokens are of the completion: a stop string may
            begin in them.
        tokenizer: asked for where there are stop strings.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        prompt_token_ids: Sequence[int],
        spec: ModelSpec,
        tokenizer: Callable[[], ChatTokenizer],
    ) -> None:
        model_ends = () if sampling.ignore_eos else spec.eos_token_ids
        self.stop_token_ids = frozenset((*model_ends, *sampling.stop_token_ids))
        self._assembler: TextAssembler | None = None
        if sampling.stop:
            self._assembler = TextAssembler(tokenizer(), sampling.stop, min_tokens=sampling.min_tokens)
            for token_id in prompt_token_ids[len(prompt_token_ids) - sampling.first_index :]:
                self._assembler.push(token_id)

    def stops(self, token_id: int) -> bool:
        """Take the next token. Return whether the completion ends with it."""
        stopped = self._assembler is not None and self._assembler.push(token_id).stopped
        return stopped or token_id in self.stop_token_ids
