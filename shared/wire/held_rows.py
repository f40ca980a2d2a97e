"""Delta shipping: which rows decode still holds of a session's last turn, and which are left to come.

Place in the request's path: prefill leaves held rows out of a layer's sections, decode finds them where they
lie. Both derive them from the layer's positions alone, so nothing on the wire names them. Holds no K or V.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvferry.shared.cache.layout import TORCH_DTYPES
from kvferry.shared.compression.attention import state_sizes
from kvferry.shared.compression.interface import CompressedLayer
from kvferry.shared.compression.plan import ResolvedPlan
from kvferry.shared.compression.representation import packed_limits
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.wire.messages import Section
from kvferry.shared.wire.stored_sections import announced_sections

Positions = npt.NDArray[np.int32]
RowNumbers = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldRows:
    """Rows left of one transfer: of each layer the prompt's, then those of the tokens generated after it.

    Attributes:
        transfer_id: of the transfer that brought them.
        num_prompt_tokens: T of that transfer's prompt.
        num_tokens: tokens from the start whose rows are the same in the new prompt.
        layers: kept positions, int32 `[H_kv, n]`, ascending, below T; None where all T tokens were kept.
    """

    transfer_id: int
    num_prompt_tokens: int
    num_tokens: int
    layers: Sequence[Positions | None]

    def rows(self, layer: int, positions: Positions) -> RowNumbers:
        """Where the rows of these tokens lie among the layer's held ones; -1 where they are not held.

        Args: positions: int32 `[H_kv, m]`, ascending for each head.
        Returns: int64 `[H_kv, m]`.
        """
        kept = self.layers[layer]
        rows = positions.astype(np.int64)
        if kept is not None:
            num_kept = kept.shape[1]
            rows = np.where(positions >= self.num_prompt_tokens, rows - self.num_prompt_tokens + num_kept, -1)
            for head in range(len(rows) if num_kept else 0):
                at = np.searchsorted(kept[head], positions[head])
                found = kept[head][np.minimum(at, num_kept - 1)] == positions[head]
                rows[head][found] = at[found]
        rows[positions >= self.num_tokens] = -1
        return rows


def ships_rows_alone(spec: ModelSpec, resolved: ResolvedPlan) -> bool:
    """Whether every layer travels and stays as the rows that prefill computed, the same at each turn."""
    packed = packed_limits(
        resolved, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, dtype=TORCH_DTYPES[spec.dtype]
    )
    state = state_sizes(resolved, num_kv_heads=spec.num_kv_heads)
    return not (packed or state or announced_sections(spec, resolved))


def all_positions(num_kv_heads: int, num_tokens: int) -> Positions:
    """The positions of a layer that keeps every token, int32 `[H_kv, T]`."""
    return np.broadcast_to(np.arange(num_tokens, dtype=np.int32), (num_kv_heads, num_tokens))


def layer_positions(kept: CompressedLayer) -> Positions | None:
    """A compressed layer's positions on the host, as `HeldRows.layers` has them."""
    return None if kept.positions is None else kept.positions.cpu().numpy().astype(np.int32)


def delta_sections(kept: CompressedLayer, layer: int, held: HeldRows) -> Iterator[tuple[Section, Tensor]]:
    """A layer of rows as the sections to send to who holds some of them."""
    num_kv_heads, num_rows, _ = kept.keys.shape
    if num_rows == 0:
        return
    positions = layer_positions(kept)
    if kept.positions is not None:
        yield Section.INDEX, kept.positions
    else:
        positions = all_positions(num_kv_heads, num_rows)
    assert positions is not None
    is_new = torch.from_numpy(held.rows(layer, positions) < 0)
    yield Section.NEW_ROWS, is_new.sum(1, dtype=torch.int32)
    is_new = is_new.to(kept.keys.device)
    yield Section.KEYS, kept.keys[is_new]
    yield Section.VALUES, kept.values[is_new]
