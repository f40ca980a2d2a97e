"""Delta shipping: which rows decode still holds of a session's last turns, and which are left to come.

Place in the request's path: prefill leaves held rows out of a layer's sections, decode finds them where they
lie. Both derive them from the layer's positions alone, so nothing on the wire names them. Holds no K or V.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

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

    def is_extended_by(self, num_tokens: int) -> bool:
        """Whether a prompt that shares so many tokens begins with all of this one's prompt: rows of both are
        then held side by side."""
        return num_tokens >= self.num_prompt_tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldSelections:
    """What is held of a session: rows of its last transfers, each of whose prompts extends the one before.

        the newest      prompt ████████████████████ generated ███    selections[0]
        the one before  prompt █████████████                         selections[1]: its generated tokens are
        ...                                                          in the newer one's prompt

    Attributes:
        selections: the newest first, at least one, at most `MAX_HELD_SELECTIONS`.
    """

    selections: tuple[HeldRows, ...]

    @property
    def transfer_id(self) -> int:
        """Of the newest."""
        return self.selections[0].transfer_id

    @property
    def num_tokens(self) -> int:
        """Tokens from the start whose rows are the same in the new prompt."""
        return self.selections[0].num_tokens

    @property
    def depth(self) -> int:
        return len(self.selections)

    def first(self, depth: int, num_tokens: int) -> HeldSelections:
        """The newest `depth` of them, for a prompt that shares `num_tokens` tokens at most."""
        newest, *older = self.selections[:depth]
        limited = (
            replace(newest, num_tokens=min(num_tokens, newest.num_tokens)),
            *(replace(its, num_tokens=min(num_tokens, its.num_prompt_tokens)) for its in older),
        )
        return HeldSelections(selections=limited)

    def find(self, layer: int, positions: Positions) -> tuple[RowNumbers, RowNumbers]:
        """Where the rows of these tokens lie: in which selection, -1 for none, and which of its layer's rows.

        Args: positions: int32 `[H_kv, m]`.
        Returns: two int64 `[H_kv, m]`.
        """
        num_heads, width = len(positions), max(its.num_tokens for its in self.selections)
        which = np.full((num_heads, width + 1), -1, np.int64)  # the last column: tokens beyond all
        rows = np.zeros((num_heads, width + 1), np.int64)
        for number in reversed(range(self.depth)):  # the newest one last: it overwrites
            held = self.selections[number]
            kept, prompt = held.layers[layer], held.num_prompt_tokens
            num_kept = prompt if kept is None else kept.shape[1]
            if kept is None:
                which[:, : min(prompt, held.num_tokens)] = number
                rows[:, : min(prompt, held.num_tokens)] = np.arange(min(prompt, held.num_tokens))
            else:
                heads, numbers = np.nonzero(kept < held.num_tokens)
                which[heads, kept[heads, numbers]] = number
                rows[heads, kept[heads, numbers]] = numbers
            which[:, prompt : held.num_tokens] = number
            rows[:, prompt : held.num_tokens] = num_kept + np.arange(max(0, held.num_tokens - prompt))
        tokens = np.minimum(positions, width).astype(np.int64)
        return np.take_along_axis(which, tokens, 1), np.take_along_axis(rows, tokens, 1)


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


def delta_sections(
    kept: CompressedLayer, layer: int, held: HeldSelections
) -> Iterator[tuple[Section, Tensor]]:
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
    is_new = torch.from_numpy(held.find(layer, positions)[0] < 0)
    yield Section.NEW_ROWS, is_new.sum(1, dtype=torch.int32)
    is_new = is_new.to(kept.keys.device)
    yield Section.KEYS, kept.keys[is_new]
    yield Section.VALUES, kept.values[is_new]
