"""Loss and gradients of one training step, computed in shards of rows.

On a CPU each shard runs in its own thread with single-threaded kernels, so that threads synchronize once per
step instead of once per operation. This matters on a machine that also does other work.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvferry.tools.recall.network import RecallNetwork
from kvferry.tools.recall.positions import draw_positions
from kvferry.tools.recall.recipe import Stage
from kvferry.tools.recall.vocabulary import PAD_ID

_STEP_TIMEOUT_S = 1800.0


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Losses in nats a token and the part of answer tokens predicted right, on one batch."""

    answer_loss: float
    lm_loss: float
    answer_accuracy: float


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a step predicts: inputs and wanted tokens int64 `[B, T]`, where each loss looks bool `[B, T]`.

    position_ids, int64 `[B, T]`, are the inputs' rotary positions.
    """

    inputs: Tensor
    wanted: Tensor
    answer: Tensor
    lm: Tensor
    position_ids: Tensor

    def to(self, device: torch.device) -> Target:
        return Target(**{k: v.to(device) for k, v in vars(self).items()})

    def shards(self, num_shards: int) -> list[Target]:
        parts = [v.chunk(num_shards) for v in vars(self).values()]
        return [Target(**dict(zip(vars(self), part, strict=True))) for part in zip(*parts, strict=True)]


def draw_target(
    token_ids: Tensor, is_answer: Tensor, *, stage: Stage, longest: int, generator: torch.Generator
) -> Target:
    """Choose what a step predicts in rows `[B, T + 1]`: answers, and a random part of the other tokens.

    Args:
        longest: positions of the stage's stretched rows stay below it.
    """
    inputs, wanted, answer = token_ids[:, :-1], token_ids[:, 1:], is_answer[:, 1:]
    drawn = torch.rand(wanted.shape, generator=generator) < stage.lm_fraction
    return Target(
        inputs=inputs,
        wanted=wanted,
        answer=answer,
        lm=drawn & ~answer & (wanted != PAD_ID),
        position_ids=draw_positions(inputs, share=stage.stretched, longest=longest, generator=generator),
    )


def true_positions(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Find the columns of the true entries of `[B, T]`, padded to the fullest row.

    Returns: positions int64 `[B, S]` and which of them are true entries, bool `[B, S]`.
    """
    counts = mask.sum(1)
    order = mask.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    positions = order[:, : int(counts.max())]
    return positions, torch.arange(positions.shape[1], device=mask.device) < counts[:, None]


class ShardedGradients:
    """Computes the network's gradients for a step; use one object for a whole run."""

    def __init__(self, network: RecallNetwork, *, num_shards: int = 1) -> None:
        self._network, self._num_shards = network, num_shards
        self._parameters = list(network.parameters())

    def backward(self, target: Target, *, lm_weight: float) -> StepResult:
        """Set every parameter's gradient of: mean answer loss + lm_weight * mean language-modelling loss."""
        num_answer, num_lm = int(target.answer.sum()), int(target.lm.sum())
        # Losses are summed per shard and divided by the whole batch's counts, so sharding changes no result.
        scales = 1 / max(1, num_answer), lm_weight / max(1, num_lm)
        shards = target.shards(self._num_shards)
        if len(shards) == 1:
            parts = [self._shard(shards[0], *scales)]
        else:
            with ThreadPoolExecutor(len(shards)) as pool:
                futures = [pool.submit(self._shard, shard, *scales) for shard in shards]
                parts = [f.result(timeout=_STEP_TIMEOUT_S) for f in futures]
        for i, parameter in enumerate(self._parameters):
            parameter.grad = torch.stack([gradients[i] for gradients, _ in parts]).sum(0)
        answer_loss, lm_loss, correct = (float(sum(sums[i] for _, sums in parts)) for i in range(3))
        return StepResult(
            answer_loss=answer_loss / max(1, num_answer),
            lm_loss=lm_loss / max(1, num_lm),
            answer_accuracy=correct / max(1, num_answer),
        )

    def _shard(
        self, target: Target, answer_scale: float, lm_scale: float
    ) -> tuple[tuple[Tensor, ...], tuple[float, float, float]]:
        """Compute a shard's gradients and sums: answer loss, language-model loss, right answer tokens."""
        positions, valid = true_positions(target.answer | target.lm)
        with torch.autocast(target.inputs.device.type, torch.bfloat16):
            hidden = self._network.hidden(target.inputs, positions, position_ids=target.position_ids)[valid]
            logits = F.linear(hidden, self._network.embed_tokens.weight).float()
        wanted = target.wanted.gather(1, positions)[valid]
        answer = target.answer.gather(1, positions)[valid]
        losses = F.cross_entropy(logits, wanted, reduction="none")
        answer_loss, lm_loss = losses[answer].sum(), losses[~answer].sum()
        gradients = torch.autograd.grad(answer_scale * answer_loss + lm_scale * lm_loss, self._parameters)
        correct = (logits.detach()[answer].argmax(-1) == wanted[answer]).sum()
        return gradients, (answer_loss.item(), lm_loss.item(), correct.item())
