"""Delta shipping: which rows decode retains from a session's last turns, and which must be sent.

Prefill leaves retained rows out of a layer's tensors, and decode finds them in the arena. Both derive them
from the layer's positions, so the rows need not be named on the wire.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvferry.shared.compression.formats.interface import (
    InvalidTensors,
    LayerCache,
    LayerFormat,
    Specs,
    Tensors,
    check_index,
    chunked,
)
from kvferry.shared.compression.interface import TensorSpec
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.wire.messages import MAX_RETAINED_SELECTIONS

Positions = npt.NDArray[np.int32]
RowNumbers = npt.NDArray[np.int64]
HeadPositions = tuple[Positions | None, ...]
"""Positions of each KV head, int32 `[n_h]`; None: all tokens."""
NO_TOKEN = np.int32(2**31 - 1)
"""The position where there is no row: larger than any token's."""
NEW_ROWS = "new_rows"
"""A tensor of a delta: int32 `[H_kv]`, how many rows of each head are sent."""
ENTRY_BYTES = 1024
"""What a selection takes besides its positions: its objects, and its session's name."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RetainedRows:
    """Retained rows of one transfer: each layer's prompt rows, then the rows of the tokens generated after.

    Attributes:
        transfer_id: of the transfer that brought them.
        num_prompt_tokens: T of that transfer's prompt.
        num_tokens: the number of first tokens whose rows are the same in the new prompt.
        layers: selected positions, int32 `[H_kv, n]`, ascending, below T; None if all T tokens were selected.
            Heads that have lost rows have NO_TOKEN after the others.
        is_shrunk: whether rows that the session's next selection also has are left out.
    """

    transfer_id: int
    num_prompt_tokens: int
    num_tokens: int
    layers: Sequence[Positions | None]
    is_shrunk: bool = False

    @property
    def size_bytes(self) -> int:
        """The bytes of the positions."""
        return sum(layer.nbytes for layer in self.layers if layer is not None)

    def of_heads(self, first: int, number: int) -> RetainedRows:
        """Return the rows of `number` heads from `first` on."""
        heads = slice(first, first + number)
        layers = [None if positions is None else positions[heads] for positions in self.layers]
        return replace(self, layers=tuple(layers))

    def positions(self, layer: int, num_kv_heads: int) -> Positions:
        """Return the positions of the prompt's rows, int32 `[H_kv, n]`."""
        kept = self.layers[layer]
        return all_positions(num_kv_heads, self.num_prompt_tokens) if kept is None else kept

    def left(self, newer: RetainedRows) -> tuple[RetainedRows, list[RowNumbers]]:
        """Remove the prompt's rows that the session's next selection also has.

        Args: newer: the next selection, whose prompt begins with this one's.
        Returns: what is left, and the numbers that its rows had, int64 `[H_kv, m]` of each layer.
        """
        layers: list[Positions] = []
        numbers: list[RowNumbers] = []
        for layer, given in enumerate(zip(self.layers, newer.layers, strict=True)):
            num_heads = max([len(positions) for positions in given if positions is not None], default=1)
            mine = self.positions(layer, num_heads)
            kept = np.ones((num_heads, self.num_prompt_tokens + 1), np.bool_)
            kept[:, self.num_prompt_tokens] = False  # all later tokens, and NO_TOKEN
            others = np.minimum(newer.positions(layer, num_heads), self.num_prompt_tokens)
            np.put_along_axis(kept, others, False, 1)
            is_left = np.take_along_axis(kept, np.minimum(mine, self.num_prompt_tokens), 1)
            counts = is_left.sum(1)
            order = np.argsort(~is_left, axis=1, kind="stable")[:, : counts.max()]
            is_row = np.arange(order.shape[1]) < counts[:, None]
            layers.append(np.where(is_row, np.take_along_axis(mine, order, 1), NO_TOKEN))
            numbers.append(order)
        return replace(self, layers=tuple(layers), is_shrunk=True), numbers

    def is_extended_by(self, num_tokens: int) -> bool:
        """Return whether a prompt that shares `num_tokens` tokens begins with this whole prompt; the rows of
        both are then retained together."""
        return num_tokens >= self.num_prompt_tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class RetainedChain:
    """A session's retained rows: those of its last transfers, where each prompt extends the one before.

        the newest      prompt ████████████████████ generated ███    selections[0]
        the one before  prompt █████████████                         selections[1]: its generated tokens are
        ...                                                          in the newer one's prompt

    Attributes:
        selections: newest first, at least one, at most MAX_RETAINED_SELECTIONS.
    """

    selections: tuple[RetainedRows, ...]

    @property
    def transfer_id(self) -> int:
        """The id of the newest transfer."""
        return self.selections[0].transfer_id

    @property
    def num_tokens(self) -> int:
        """The number of first tokens whose rows are the same in the new prompt."""
        return self.selections[0].num_tokens

    @property
    def depth(self) -> int:
        return len(self.selections)

    def first(self, depth: int, num_tokens: int) -> RetainedChain:
        """Return the newest `depth` selections, for a prompt that shares at most `num_tokens` tokens."""
        newest, *older = self.selections[:depth]
        limited = (
            replace(newest, num_tokens=min(num_tokens, newest.num_tokens)),
            *(
                replace(selection, num_tokens=min(num_tokens, selection.num_prompt_tokens))
                for selection in older
            ),
        )
        return RetainedChain(selections=limited)

    def of_heads(self, first: int, number: int) -> RetainedChain:
        """See `RetainedRows.of_heads`."""
        return RetainedChain(selections=tuple(rows.of_heads(first, number) for rows in self.selections))

    def find(self, layer: int, positions: Positions) -> tuple[RowNumbers, RowNumbers]:
        """Find the retained rows of these tokens.

        Args: positions: int32 `[H_kv, m]`.
        Returns: two int64 `[H_kv, m]`: the selection, -1 if the row is not retained, and the row's number in
            that selection's layer.
        """
        num_heads, width = len(positions), max(selection.num_tokens for selection in self.selections)
        which = np.full((num_heads, width + 1), -1, np.int64)  # the last column: tokens after all selections
        rows = np.zeros((num_heads, width + 1), np.int64)
        for number in reversed(range(self.depth)):  # the newest one last: it overwrites
            retained = self.selections[number]
            kept, prompt = retained.positions(layer, num_heads), retained.num_prompt_tokens
            heads, numbers = np.nonzero(kept < retained.num_tokens)
            which[heads, kept[heads, numbers]] = number
            rows[heads, kept[heads, numbers]] = numbers
            which[:, prompt : retained.num_tokens] = number
            rows[:, prompt : retained.num_tokens] = kept.shape[1] + np.arange(
                max(0, retained.num_tokens - prompt)
            )
        tokens = np.minimum(positions, width).astype(np.int64)
        return np.take_along_axis(which, tokens, 1), np.take_along_axis(rows, tokens, 1)


def all_positions(num_kv_heads: int, num_tokens: int) -> Positions:
    """Return the positions of a layer with every token, int32 `[H_kv, T]`."""
    return np.broadcast_to(np.arange(num_tokens, dtype=np.int32), (num_kv_heads, num_tokens))


def head_positions(fmt: LayerFormat, tensors: Tensors) -> HeadPositions:
    """Return the positions that each KV head of a layer selected, on the host; see
    `LayerFormat.positions_by_head`."""
    heads = fmt.positions_by_head(tensors)
    return tuple([None if head is None else head.cpu().numpy().astype(np.int32) for head in heads])


def delta_tensors(tensors: Tensors, layer: int, retained: RetainedChain) -> dict[str, Tensor]:
    """Return the tensors to send of a layer of plain rows, for a worker that retains some of the rows."""
    num_kv_heads, num_rows, _ = tensors["keys"].shape
    index = {"index": tensors["index"]} if "index" in tensors else {}
    positions = (
        index["index"].cpu().numpy().astype(np.int32) if index else all_positions(num_kv_heads, num_rows)
    )
    is_new = torch.from_numpy(retained.find(layer, positions)[0] < 0)
    new_rows, on_device = is_new.sum(1, dtype=torch.int32), is_new.to(tensors["keys"].device)
    rows = {name: tensors[name][on_device] for name in ("keys", "values") if name in tensors}
    return {**index, NEW_ROWS: new_rows, **rows}


def delta_parts(fmt: LayerFormat, tensors: Tensors, num_parts: int) -> Sequence[Tensors]:
    """Divide a delta's tensors as `LayerFormat.parts` does; the heads' rows follow one another."""
    by_head = {name: tensor for name, tensor in tensors.items() if name in ("index", NEW_ROWS)}
    parts = chunked(by_head, fmt.shape.num_kv_heads, num_parts)
    counts = [int(part[NEW_ROWS].sum()) for part in parts]
    for name in fmt.shape.row_names:
        for part, rows in zip(parts, torch.split(tensors[name], counts), strict=True):
            part[name] = rows
    return parts


@dataclass(frozen=True, eq=False)
class DeltaLayer:
    """Decode's side of a delta of one layer of plain rows, with the `receive` and `open` of a `LayerFormat`.

    Attributes:
        format: the layer's, with `is_plain`.
        retained_rows: for each retained selection, the tensors `[H_kv, cap, D]` of its rows, in the order of
            `LayerShape.row_names`.
    """

    format: LayerFormat
    layer: int
    retained: RetainedChain
    retained_rows: Sequence[tuple[Tensor, ...]]

    def receive(self, header: Specs, regions: Tensors) -> dict[str, Tensor]:
        """See `LayerFormat.receive`: memory outside the arena, because few rows are sent."""
        shape, index = self.format.shape, self.format.tensors().get("index")
        expected = {} if index is None else {"index": index}
        expected[NEW_ROWS] = TensorSpec(shape=(shape.num_kv_heads,), dtype=torch.int32)
        sent = header["keys"].shape[0] if "keys" in header and header["keys"].shape else -1
        rows = TensorSpec(shape=(sent, shape.head_dim), dtype=shape.dtype)
        expected |= dict.fromkeys(shape.row_names, rows)
        self.format.check_header(header, expected)
        if not 0 <= sent <= self.format.rows * shape.num_kv_heads:
            raise InvalidTensors(
                f"{sent} rows are announced; the layer has {self.format.rows * shape.num_kv_heads}",
                reason="size",
            )
        return {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in header.items()}

    def find(self, tensors: Tensors) -> tuple[RowNumbers, RowNumbers]:
        """Find where the layer's rows are retained; see `RetainedChain.find`.

        Raises: InvalidTensors: the sender assumed retained rows that do not exist here ("retained_rows").
        """
        shape, rows = self.format.shape, self.format.rows
        index = check_index(tensors, shape.num_prompt_tokens, reason="index")
        positions = index.numpy() if index is not None else all_positions(shape.num_kv_heads, rows)
        which, numbers = self.retained.find(self.layer, positions)
        counts = (which < 0).sum(1, dtype=np.int32)
        if not np.array_equal(tensors[NEW_ROWS].numpy(), counts) or len(tensors["keys"]) != counts.sum():
            raise InvalidTensors(
                f"{tensors[NEW_ROWS].tolist()} rows of the heads are sent, {len(tensors['keys'])} in all; "
                f"this worker lacks {counts.tolist()}",
                reason="retained_rows",
            )
        return which, numbers

    def open(self, regions: Tensors, tensors: Tensors) -> LayerCache:
        """Copy the retained rows within the arena, write the received rows, and open the layer.

        Raises: InvalidTensors: as `find`, and content that `compress` cannot have made.
        """
        (which, numbers), shape, index = self.find(tensors), self.format.shape, tensors.get("index")
        targets = [regions[name] for name in shape.row_names]
        for selection, sources in enumerate(self.retained_rows):
            heads, slots = np.nonzero(which == selection)
            copied = torch.from_numpy(numbers[heads, slots])
            of_head, to_row = torch.from_numpy(heads), torch.from_numpy(slots)
            for source, target in zip(sources, targets, strict=True):
                target[of_head, to_row] = source[of_head, copied]
        of_head, to_row = (torch.from_numpy(indices) for indices in np.nonzero(which < 0))
        for name, target in zip(shape.row_names, targets, strict=True):
            target[of_head, to_row] = tensors[name].to(target.device)
        return self.format.open(regions, {} if index is None else {"index": index})


@dataclass(frozen=True, kw_only=True)
class PinnedRows:
    """A session's retained rows, of one rank's heads, that a transfer may leave out.

    Attributes:
        layers: for each selection of `chain`, each layer's tensors of rows `[H_kv, cap, D]` in the arena.
    """

    chain: RetainedChain
    layers: tuple[tuple[tuple[Tensor, ...], ...], ...]

    def first(self, depth: int, num_tokens: int) -> PinnedRows:
        """See `RetainedChain.first`."""
        return PinnedRows(chain=self.chain.first(depth, num_tokens), layers=self.layers[:depth])


_Chain = tuple[RetainedRows, ...]
"""A session's selections, newest first; each was shipped without rows that older ones have."""


@dataclass(kw_only=True)
class ShippedRows:
    """The rows of the layers shipped so far.

    Attributes:
        positions: for each layer, the selection of each KV head; empty if not wanted.
        saved_bytes: size of the rows that were left out because decode retains them.
    """

    positions: dict[int, HeadPositions] = field(default_factory=dict)
    saved_bytes: int = 0

    def add_heads(self, other: ShippedRows) -> None:
        """Add the next heads of the same layers."""
        for layer, heads in other.positions.items():
            self.positions[layer] += heads
        self.saved_bytes += other.saved_bytes

    def layers(self) -> tuple[Positions | None, ...]:
        """Return `RetainedRows.layers`, where every layer has plain rows."""
        layers = [self.positions[layer] for layer in sorted(self.positions)]
        return tuple(
            [np.stack(cast("list[Positions]", heads)) if heads[0] is not None else None for heads in layers]
        )


class ShippedSelections:
    """The last selections shipped for each session. Thread-safe.

    When they take too many bytes, the session that was shipped longest ago is removed first.

    Args:
        max_bytes: limit on the bytes of all selections; 0 stores none.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._chains: OrderedDict[SessionKey, _Chain] = OrderedDict()
        self._size_bytes = 0

    def put(self, session: SessionKey, selection: RetainedRows, *, retained: RetainedChain | None) -> None:
        """Record a transfer as the session's newest.

        Args: selection: its prompt's rows, `num_tokens` being all of them. retained: the rows that were left
            out of it. Their selections stay recorded if the prompt
            extends the newest one's prompt; all others of the session are removed.
        """
        with self._lock:
            if self._max_bytes == 0:
                return
            chain: _Chain = (selection,)
            if retained is not None and retained.selections[0].is_extended_by(retained.num_tokens):
                chain += self._from(session, retained.transfer_id)[: retained.depth]
                # The previous selection stays whole: decode may have given up the newest, and then has the
                # previous one's rows.
                if len(chain) > 2 and not chain[2].is_shrunk:
                    chain = (*chain[:2], chain[2].left(chain[1])[0], *chain[3:])
            self._forget(session)
            self._chains[session] = chain[:MAX_RETAINED_SELECTIONS]
            self._size_bytes += _size_bytes(self._chains[session])
            while self._size_bytes > self._max_bytes:
                self._forget(next(iter(self._chains)))

    def retained(
        self,
        session: SessionKey,
        *,
        transfer_id: int,
        num_tokens: int,
        depth: int,
        with_generated: bool = True,
    ) -> RetainedChain | None:
        """Return the rows that a decode worker retains of this transfer and earlier ones; None if unknown.

        Args:
            num_tokens: length of the prefix whose rows are still the same.
            depth: how many transfers' rows the worker retains.
            with_generated: whether the history also has decode's rows of generated tokens; otherwise those
                are not reused.
        """
        with self._lock:
            chain = self._from(session, transfer_id)[:depth]
        if chain and not with_generated:
            num_tokens = min(num_tokens, chain[0].num_prompt_tokens)
        if not chain or chain[0].is_shrunk or num_tokens == 0:
            return None
        # Of the newest transfer, decode also retains rows of generated tokens.
        newest = replace(chain[0], num_tokens=num_tokens)
        return RetainedChain(selections=(newest, *chain[1:])).first(depth, num_tokens)

    def drop(self, session: SessionKey) -> None:
        with self._lock:
            self._forget(session)

    def _from(self, session: SessionKey, transfer_id: int) -> _Chain:
        """Return the chain from this transfer on. Decode may not have retained the newer ones."""
        chain = self._chains.get(session, ())
        known = [selection.transfer_id for selection in chain]
        return chain[known.index(transfer_id) :] if transfer_id in known else ()

    def _forget(self, session: SessionKey) -> None:
        self._size_bytes -= _size_bytes(self._chains.pop(session, ()))


def _size_bytes(chain: _Chain) -> int:
    return sum(selection.size_bytes + ENTRY_BYTES for selection in chain)
