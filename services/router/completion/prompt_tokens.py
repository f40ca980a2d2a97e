"""The prompt's own tokens in an answer: OpenAI's `echo` with `logprobs`, and vLLM's `prompt_logprobs`.

Made from prefill's report, which follows the first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import TypedDict

from kvferry.services.router.completion.choice import TokenLogprob
from kvferry.shared.model.text import TextAssembler
from kvferry.shared.sampling.params import SampledToken


class PromptLogprob(TypedDict):
    logprob: float
    decoded_token: str


@dataclass(frozen=True, kw_only=True)
class PromptTokens:
    """A prompt's tokens as text with their log-probabilities.

    Attributes:
        entries: one a token, its text's place counted in the tokens' texts. The first has no log-probability.
        by_id: for each token its own log-probability and its alternatives', by token id; None for the first.
    """

    entries: tuple[TokenLogprob, ...]
    by_id: tuple[dict[str, PromptLogprob] | None, ...]


def prompt_tokens(
    token_ids: Sequence[int], reported: Sequence[SampledToken], assembler: TextAssembler, *, num_listed: int
) -> PromptTokens:
    """Decode a prompt token by token.

    Args:
        reported: every token after the first.
        assembler: a new one, without stop strings.
        num_listed: how many alternatives each entry has.
    """
    assert len(reported) == len(token_ids) - 1, "prefill reports every token after the first"
    entries: list[TokenLogprob] = []
    by_id: list[dict[str, PromptLogprob] | None] = []
    offset = 0
    for token_id, token in zip(token_ids, (None, *reported), strict=True):
        # Alternatives are decoded in the token's place, so before the token itself is taken.
        top = tuple(
            (other, assembler.token_text(other), value)
            for other, value in (token.top_logprobs if token is not None else ())
        )
        text = assembler.push(token_id).token_text
        logprob = token.logprob if token is not None else None
        listed = tuple(TokenLogprob(text=its, logprob=value) for _, its, value in top[:num_listed])
        entries.append(TokenLogprob(text=text, logprob=logprob, offset=offset, top=listed))
        offset += len(text)
        if logprob is None:
            by_id.append(None)
            continue
        own = {str(token_id): PromptLogprob(logprob=logprob, decoded_token=text)}
        others = {str(o): PromptLogprob(logprob=value, decoded_token=its) for o, its, value in top}
        by_id.append(own | {name: its for name, its in others.items() if name not in own})
    return PromptTokens(entries=tuple(entries), by_id=tuple(by_id))
