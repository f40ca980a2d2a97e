"""RDKV's compression of one layer: weights, allocation, packing (Algorithm 1).

Called by prefill between two layers of a prompt: full K and V in, packed bytes out. Weights say how much a V
token or a K channel matters to attention (section 3.1); they come from the question's last queries.

Legend: H_kv KV heads, G query heads per KV head, W queries of the window, T prompt tokens, D head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from kvferry.kernels.column_sums import window_scores
from kvferry.kernels.packed.layer import PackedLayer
from kvferry.kernels.packed.layout import packed_bound
from kvferry.kernels.packed.packing import Packing, begin_packing
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import (
    DRAFT_KERNEL_SIZE,
    DRAFT_TOKENS,
    MOST_DRAFT_TOKENS,
    Allowed,
    Between,
    ParamValue,
    Part,
    read_params,
)
from kvferry.shared.compression.rdkv.allocation import LayerAllocation, allocate
from kvferry.shared.compression.rdkv.epsilon import WIDTHS, EpsilonTable, find_table
from kvferry.shared.errors import InvalidRequest

ChannelWeights = Literal["norms", "mean_squares"]
_PER_DEVIATION = 0.125
"""So small that nearly all bits go to many tokens of few bits. With 1, few tokens take most bits, and on the
demo model (n = 20, 2.5 % of the bytes, questions after compression) the four tasks have 100, 60, 70 and 40 %
in place of 100, 95, 95 and 90 %."""

_QUESTIONS_SHARE = 0.03
"""The weight of the question's attention beside the draft's: it finds what the answer needs after the draft.
With less, that is hardly found; with more, what the draft attends to loses bits of K, which all retained
tokens share (benchmarks/results/eval/README.md)."""

RDKV_PARAMS: Allowed = {
    "epsilon_table": str,
    "window": Between(1, 1024),
    "kernel_size": Between(1, 255, odd=True),
    "channel_weights": get_args(ChannelWeights),
    "widths": str,
    "rebudget_tokens": Between(0, 1 << 20),
    "with_attention": bool,
    DRAFT_TOKENS: Between(0, MOST_DRAFT_TOKENS),
    DRAFT_KERNEL_SIZE: Between(1, 255, odd=True),
}
RDKV_DEFAULTS: Mapping[str, ParamValue] = {"with_attention": False, DRAFT_TOKENS: 0, DRAFT_KERNEL_SIZE: 5}
"""See `LayerFormat.defaults`."""


@dataclass(frozen=True, kw_only=True)
class RdkvSettings:
    """RDKV's parameters, with the paper's defaults.

    Attributes:
        budget_tokens: B_tok per KV head: the bits of K and V of this many tokens in full precision.
        table: the distortion of each width.
        window: the most queries that the weights use.
        kernel_size: kernel of the average pooling of token weights.
        draft_kernel_size: the same of the weights that a draft's queries give (`draft_weights`).
        channel_weights: the formula of the channel weights, see `channel_weights`.
        with_attention: where a scorer's scores weigh the tokens, whether the window's attention does, too
            (`joint_weights`). Without scores it alone does, as in the paper.
        widths: the widths that tokens and channels may have.
    """

    budget_tokens: int
    table: EpsilonTable
    window: int = 32
    kernel_size: int = 5
    draft_kernel_size: int = 5
    channel_weights: ChannelWeights = "norms"
    with_attention: bool = False
    widths: tuple[int, ...] = WIDTHS


def allocate_layer(
    settings: RdkvSettings, inputs: LayerInputs, scores: Tensor | None = None
) -> LayerAllocation:
    """Allocate the bits of one layer's tokens and channels. The window is `LayerInputs.observing`.

    Deviation: the paper has no draft. A draft's tokens get no bits; only their attention to the prompt
    counts. The queries that weigh the channels are theirs and the prompt's last.

    Args: scores: float32 `[H_kv, T]`, standardised; they weigh the tokens in place of the window's attention
        or together with it. None: the attention alone does.
    """
    observed = queries = inputs.observing(settings.window).queries
    if inputs.ahead is not None:
        observed = torch.cat([inputs.queries[:, :, -1:], inputs.ahead.queries], 2)
    if scores is not None and not settings.with_attention:
        weights = score_weights(scores)
    else:
        weights = pooled(inputs.window_sums(settings.window), settings.kernel_size)
        if inputs.ahead is not None:
            drafted = token_weights(
                observed,
                torch.cat([inputs.keys, inputs.ahead.keys], 1),
                scaling=inputs.scaling,
                kernel_size=settings.draft_kernel_size,
                num_ahead=inputs.ahead.keys.shape[1],
            )
            weights = draft_weights(drafted / observed.shape[2], weights / queries.shape[2])
        if scores is not None:
            weights = joint_weights(weights, scores)
    return allocate(
        weights,
        channel_weights(observed, inputs.keys, variant=settings.channel_weights),
        budget_tokens=settings.budget_tokens,
        table=settings.table,
        widths=settings.widths,
    )


def compress_layer_rdkv(
    settings: RdkvSettings, inputs: LayerInputs, scores: Tensor | None = None
) -> PackedLayer:
    """Do what `begin_layer_rdkv` does, and wait for the layer. Raises: as `Packing.finish`."""
    packing = begin_layer_rdkv(settings, inputs, scores)
    return packing.finish(packing.tensors)


def begin_layer_rdkv(settings: RdkvSettings, inputs: LayerInputs, scores: Tensor | None = None) -> Packing:
    """Allocate bits to one layer and pack it; see `begin_packing`.

    Args: scores: as in `allocate_layer`.
    Raises: ValueError: weights are not finite, or K or V of a retained token, in float16 if they are stored
        at 16 bits. In Triton, `finish` of the result raises it.
    """
    return begin_allocated(settings, inputs, allocate_layer(settings, inputs, scores))


def begin_allocated(settings: RdkvSettings, inputs: LayerInputs, bits: LayerAllocation) -> Packing:
    """Do what `begin_layer_rdkv` does, with given widths."""
    num_kv_heads, num_tokens, head_dim = inputs.keys.shape
    bound = packed_bound(
        num_tokens=num_tokens,
        budget_tokens=settings.budget_tokens,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )
    return begin_packing(inputs.keys, inputs.values, bits.keys, bits.values, usable=bits.usable, bound=bound)


def rdkv_settings(part: Part, *, budget_tokens: int, fingerprint: str = "") -> RdkvSettings:
    """Read RDKV's settings from the `representation` part of a plan.

    Args: fingerprint: of the served model, as in `find_table`.
    Raises: InvalidRequest: a parameter is unknown, missing or out of range.
    """
    params = read_params("format 'rdkv'", {**RDKV_DEFAULTS, **part.params}, RDKV_PARAMS)
    return RdkvSettings(
        budget_tokens=budget_tokens,
        table=find_table(params["epsilon_table"], fingerprint=fingerprint),
        window=params["window"],
        kernel_size=params["kernel_size"],
        draft_kernel_size=params[DRAFT_KERNEL_SIZE],
        channel_weights=params["channel_weights"],
        with_attention=params["with_attention"],
        widths=_widths(params["widths"]),
    )


def _widths(text: str) -> tuple[int, ...]:
    chosen = [entry.strip() for entry in text.split(",")]
    widths = tuple(width for width in WIDTHS if str(width) in chosen)
    if len(widths) != len(chosen) or widths == (0,):
        raise InvalidRequest(
            f"widths of format 'rdkv' is {text!r}; it must be some of {','.join(map(str, WIDTHS))}, "
            "each once, one above 0 among them",
            param="kv_compression.widths",
        )
    return widths


def token_weights(
    queries: Tensor, keys: Tensor, *, scaling: float, kernel_size: int = 5, num_ahead: int = 0
) -> Tensor:
    """Compute `w_t = sum_{g, tau} a_{tau, t}` (Eq. 2) over all T columns, `pooled`. No token is protected.

    Args:
        queries: post-RoPE `[H_kv, G, W, D]`, the prompt's last W <= T queries.
        keys: post-RoPE `[H_kv, T, D]`.
        scaling: the softmax scale.
        kernel_size: odd; 1 means no pooling.
        num_ahead: how many of the last queries and keys are of a draft's tokens, which are not weighed.

    Returns: float32 `[H_kv, T - num_ahead]`.
    """
    sums = window_scores(queries, keys, scaling=scaling)[:, : keys.shape[1] - num_ahead]
    return pooled(sums, kernel_size)


def pooled(sums: Tensor, kernel_size: int) -> Tensor:
    """Average-pool column sums `[H_kv, T]` with stride 1.

    Pooling pads by reflection; if T <= kernel_size // 2 that is not possible, and the sums stay as they are.
    """
    assert kernel_size % 2 == 1, kernel_size
    padding = kernel_size // 2
    if sums.shape[1] <= padding:
        return sums
    padded = F.pad(sums[:, None], (padding, padding), mode="reflect")
    return F.avg_pool1d(padded, kernel_size, stride=1)[:, 0]


def draft_weights(drafted: Tensor, attention: Tensor) -> Tensor:
    """Compute `w_t = d_t + 0.03 a_t`: what the draft's queries attend to, and what the question's do.

    Args: drafted, attention: float32 `[H_kv, T]` from `token_weights`, divided by the number of queries.
    Returns: float32 `[H_kv, T]`.
    """
    return drafted + _QUESTIONS_SHARE * attention


def score_weights(scores: Tensor) -> Tensor:
    """Compute `w_t = exp(s_t / 8)` of standardised scores; +inf weighs as much as the highest other score.

    Deviation: the paper weighs tokens by the attention of the prompt's last queries, which know the question.
    With the scores of a method that does not, the same allocation serves questions that come later.

    Args: scores: float32 `[H_kv, T]`, +inf where a token is protected.
    Returns: float32 `[H_kv, T]`.
    """
    protected = scores == torch.inf
    highest = scores.masked_fill(protected, -torch.inf).amax(dim=1, keepdim=True)
    others = scores.where(~protected, highest.nan_to_num(neginf=0.0))
    return (others * _PER_DEVIATION).exp()


def joint_weights(attention: Tensor, scores: Tensor) -> Tensor:
    """Compute `w_t = max(a_t, a_(r))`, where r is the rank of `s_t` among its head's scores and `a_(r)` the
    r-th largest of its attention weights. The scores have another unit, so only their order counts.

    Deviation: the paper weighs by attention alone. That drops tokens that the question does not name but that
    lead to its answer, such as the first of two assignments over which a variable is traced.

    Args:
        attention: float32 `[H_kv, T]` from `token_weights`.
        scores: float32 `[H_kv, T]`, +inf where a token is protected; of equal ones the first ranks higher.
    Returns: float32 `[H_kv, T]`.
    """
    order = scores.sort(dim=1, descending=True, stable=True).indices
    ranked = attention.sort(dim=1, descending=True).values
    return torch.maximum(attention, torch.empty_like(attention).scatter_(1, order, ranked))


def channel_weights(queries: Tensor, keys: Tensor, *, variant: ChannelWeights = "norms") -> Tensor:
    """Compute `w_c = |Q_c| |K_c| / sqrt(D)` (Eq. 4): one norm over group and window, one over all T tokens.

    Args:
        queries: post-RoPE `[H_kv, G, W, D]`.
        keys: post-RoPE `[H_kv, T, D]`.
        variant: "norms" as in the paper; "mean_squares" as in the authors' code, `mean(Q_c^2) mean(K_c^2)`:
            the square of the paper's weight, up to a factor that all channels share.

    Returns: float32 `[H_kv, D]`.
    """
    q, k = queries.float(), keys.float()
    if variant == "mean_squares":
        return q.square().mean(dim=(1, 2)) * k.square().mean(dim=1)
    norms = q.square().sum(dim=(1, 2)).sqrt() * k.square().sum(dim=1).sqrt()
    return norms / math.sqrt(keys.shape[2])
