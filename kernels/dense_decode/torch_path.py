"""Dense decode attention by torch's fused SDPA; used on the CPU and for calls without a Triton kernel."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def dense_decode(queries: Tensor, keys: Tensor, values: Tensor, *, scaling: float) -> Tensor:
    """As `reference.dense_decode`, in the dtype of the inputs, accumulated in float32 by SDPA.

    The G heads of a group become SDPA's query positions: they share one KV head's rows and need no mask, so
    no KV row is repeated G times.
    """
    batched = (queries.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0))
    return scaled_dot_product_attention(*batched, scale=scaling).squeeze(0)
