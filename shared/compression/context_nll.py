"""Estimates how hard a context is to predict from its token ids alone: NLL(c) of the calibrated curves.

The router computes it for each request that names a quality, and calibration for each of its contexts. It
does not run a model.

Deviation: Compactor (section 3.5) takes the mean NLL of the context under the model itself. Decode reserves a
sequence's memory before prefill has run a token, so the retention must be known earlier. This uses the code
length of an adaptive bigram code instead; curves are fitted and evaluated with the same estimate.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

CHUNK_TOKENS = 1024
"""The counts are reset after about this many tokens; otherwise a long context would have a lower NLL."""


def estimate_context_nll(token_ids: Sequence[int], *, vocab_size: int) -> float:
    """Nats per token of an adaptive bigram code, which learns each chunk's statistics from the tokens so far.

    `p(t | s) = (n(s, t) + p(t)) / (n(s) + 1)` with `p(t) = (n(t) + 1 / V) / (n + 1)`; n are counts of earlier
    tokens.

    Args: token_ids: at least one. vocab_size: V, greater than every id.
    """
    assert token_ids
    num_chunks = max(1, len(token_ids) // CHUNK_TOKENS)
    ends = [len(token_ids) * i // num_chunks for i in range(num_chunks + 1)]
    total = sum(_code_length(token_ids[start:end], vocab_size) for start, end in pairwise(ends))
    return total / len(token_ids)


def _code_length(token_ids: Sequence[int], vocab_size: int) -> float:
    single: Counter[int] = Counter()
    followed: Counter[int] = Counter()
    pairs: Counter[tuple[int, int]] = Counter()
    total, before = 0.0, -1
    for num_before, token_id in enumerate(token_ids):
        alone = (single[token_id] + 1 / vocab_size) / (num_before + 1)
        total -= math.log((pairs[before, token_id] + alone) / (followed[before] + 1))
        single[token_id] += 1
        followed[before] += 1
        pairs[before, token_id] += 1
        before = token_id
    return total
