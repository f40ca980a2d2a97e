"""The format of a layer: how its KV is compressed, shipped, stored and attended.

    prefill   encode ──► copied to the host ──► finish: named tensors ──► wire
    decode    regions of the arena; receive: where bytes go; open ──► LayerCache: append_and_attend
    oracle    naive ──► NaiveLayer, which recomputes what it can at every step

A format is made from a resolved layer plan (`formats/__init__.py`). Adding one is one file and one entry of
the registry, or an entry point of another package. Formats do not use the wire and do not allocate in the
arena.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvferry.kernels.decode_batch import CachedRows
from kvferry.kernels.softmax import Scaling
from kvferry.shared.compression.formats.rules import FormatRules
from kvferry.shared.compression.interface import LayerInputs, LayerShape, TensorSpec, gather_rows
from kvferry.shared.compression.plan import CompressionPlan, LayerPlan

if TYPE_CHECKING:
    from kvferry.shared.compression.formats.compacting import Segments

Tensors = Mapping[str, Tensor]
"""The compressed prompt of a layer: contiguous tensors by name, in the order in which they are sent."""
Specs = Mapping[str, TensorSpec]
_SIZE_BYTES = attrgetter("size_bytes")


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A layer whose compression is queued on its device.

    Attributes:
        tensors: what `finish` needs, on the device.
        names: the tensors' names, if they only need to be copied; there is no `make` then.
        make: see `finish`.
    """

    tensors: Sequence[Tensor]
    names: Sequence[str] = ()
    make: Callable[[Sequence[Tensor]], Tensors] | None = None

    def finish(self, tensors: Sequence[Tensor]) -> Tensors:
        """Return the layer's tensors, which use the memory of these.

        Args: tensors: the encoded ones, or copies of them. If they are not on the host, this may wait for the
            device.
        Raises: ValueError: K or V have values that the format cannot store.
        """
        return self.make(tensors) if self.make is not None else dict(zip(self.names, tensors, strict=True))


class InvalidTensors(ValueError):
    """Received tensors that `compress` cannot have made. `reason` labels the failed transfer."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class LayerCache(ABC):
    """One layer of one sequence in the arena: views of its regions, and decode's operations on them.

    Attributes:
        regions: the views, by the names of `LayerFormat.regions`.
        positions: of plain rows, the prompt rows' tokens, int32 `[H_kv, n]` on the host; None if every token
            is selected.
    """

    positions: npt.NDArray[np.int32] | None = None

    def __init__(self, fmt: LayerFormat, regions: Tensors) -> None:
        self.format = fmt
        self.regions = regions
        self.bind()

    def move(self, fmt: LayerFormat, regions: Tensors) -> None:
        """Copy the layer to other memory and continue there; results do not change.

        Args: fmt: the same format with room for as many new tokens or more; so every region is as large or
            larger in each dimension, and begins with what the smaller one contains.
        """
        for name, target in regions.items():
            source = self.regions[name]
            target[tuple(slice(size) for size in source.shape)].copy_(source)
        self.format, self.regions = fmt, regions
        self.bind()

    def copied(self, fmt: LayerFormat, regions: Tensors) -> LayerCache:
        """Return a separate layer with the same prompt in other memory; called before any token is appended.

        Args: as in `move`. This default is for layers that change in place only the tensors of `regions`.
        """
        other = copy.copy(self)
        other.move(fmt, regions)
        return other

    def settle(self) -> None:  # noqa: B027 (most formats check when they are opened)
        """Wait for what `LayerFormat.open` checks on the device; called once, before anything attends.

        Raises: InvalidTensors: content that `compress` cannot have made.
        """

    def bind(self) -> None:  # noqa: B027 (most formats have none)
        """Take the views of `regions` that a subclass holds beside them; called first and after a move."""

    @property
    def name(self) -> str:
        """The label of a decode step that attends this layer unbatched."""
        return self.format.name

    @abstractmethod
    def append_and_attend(
        self, queries: Tensor, key: Tensor, value: Tensor, *, num_appended: int, scaling: Scaling
    ) -> Tensor:
        """Append one token's row and attend to the layer's rows as its plan says.

        Args:
            queries: `[H_kv, G, D]`.
            key, value: `[H_kv, D]`.
            num_appended: tokens appended before this one.

        Returns: `[H_kv, G, D]`.
        Raises: IndexError, ValueError: there is no room for the row.
        """

    def batched(self, num_appended: int) -> CachedRows | None:
        """Return the layer as a batched kernel takes it (`kernels/*/batch.py`); None if it must run alone."""
        return None

    def new_rows(self) -> tuple[Tensor, Tensor]:
        """Return views of K and V `[H_kv, cap, D]` of new tokens, which by default have their own regions."""
        return self.format.shape.rows_of(self.regions)

    def new_rows_changed(self, num_rows: int) -> None:  # noqa: B027 (most have nothing beside the rows)
        """Take note that the first `num_rows` new rows were rewritten, and that no others are in use."""

    def generated_rows(self, num_appended: int) -> tuple[Tensor, Tensor]:
        """Return host copies of K and V `[H_kv, num_appended, D]` of the tokens appended so far."""
        keys, values = self.new_rows()
        return on_host(keys[:, :num_appended]), on_host(values[:, :num_appended])

    def returned(self, num_appended: int) -> Tensors:
        """Return host copies of what the session's history gets of the turn: the rows of the tokens appended
        so far, or the state."""
        # of latent rows K alone, which is V, too
        return dict(zip(self.format.shape.row_names, self.generated_rows(num_appended), strict=False))

    def used_bytes(self, num_appended: int) -> int:
        """Count the bytes in use after `num_appended` tokens."""
        return self.format.used_bytes(num_appended)


class NaiveLayer(ABC):
    """The oracle's layer of a format: appends rows by concatenation and recomputes the rest at every step.

    Attributes:
        new_rows: K and V `[H_kv, D]` of each new row.
    """

    new_rows: tuple[tuple[Tensor, Tensor], ...] = ()

    @abstractmethod
    def attend(
        self, queries: Tensor, key: Tensor, value: Tensor, *, scaling: Scaling, dense: bool = False
    ) -> Tensor:
        """Append a row and attend. Shapes as `LayerCache.append_and_attend`.

        Args: dense: attend to every retained row, whichever rows the plan's attention would choose.
        """

    def fork(self) -> Self:
        """Return an independent copy: appending to one does not change the other. This default is for layers
        whose `attend` replaces their attributes and changes nothing in place."""
        return copy.copy(self)

    def appended(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add a row to `new_rows`. Returns: K and V of all of them, `[H_kv, m, D]`."""
        self.new_rows += ((key, value),)
        keys, values = (torch.stack(rows, 1) for rows in zip(*self.new_rows, strict=True))
        return keys, values


@dataclass(frozen=True, kw_only=True)
class LayerFormat(FormatRules, ABC):
    """How one layer of one prompt is compressed, shipped, stored and attended, and how its bytes are counted.

    Attributes:
        rows: prompt rows retained per KV head; the mean if heads differ, the maximum if bits are allocated.
        kinds: for each tensor that `compress` may return, its label in `kv_transfer_bytes_total`; those of
            selected rows by default.
        finite: the tensors whose every number must be finite when they arrive.
        segments: how rows of new tokens are compacted (`compacting.py`); None: all of them stay.
    """

    kinds: ClassVar[Mapping[str, str]] = {"index": "index", "keys": "rows", "values": "rows"}
    finite: ClassVar[tuple[str, ...]] = ("keys", "values")
    shape: LayerShape
    rows: int
    segments: Segments | None = None

    @classmethod
    def of(cls, plan: CompressionPlan, layer: LayerPlan, shape: LayerShape) -> LayerFormat:
        """Make the format of a resolved layer; by default, the part's parameters are fields.

        Raises: InvalidRequest: sizes that do not belong to this format.
        """
        return cls(shape=shape, rows=layer.rows, **cls.params(layer.representation))

    @cached_property
    def is_plain(self) -> bool:
        """Say whether the arena stores rows exactly as prefill computed them. Deltas need that."""
        return False

    @property
    def observed_queries(self) -> int | None:
        """The number of the prompt's last queries that the format itself reads, without those after the
        question (see `LayerInputs.observing`); None: all of them."""
        return 0

    @property
    def takes_scores(self) -> bool:
        """Say whether `compress` reads the scores of the plan's scorer, if it has one."""
        return self.scored is not False and self.rows < self.shape.num_prompt_tokens

    @abstractmethod
    def compress(self, inputs: LayerInputs, scores: Tensor | None) -> Tensors:
        """Compress one layer.

        Args: scores: float32 `[H_kv, T]`, the highest are selected; None if the plan has no scorer,
            or if the format takes no scores.
        Raises: ValueError: K or V have values that the format cannot store.
        """

    def encode(self, inputs: LayerInputs, scores: Tensor | None) -> Encoded:
        """Begin to compress one layer, where possible without waiting for its device.

        Args, Raises: as in `compress`; where the device is not waited for, `Encoded.finish` raises.
        """
        tensors = self.compress(inputs, scores)
        return Encoded(tensors=tuple(tensors.values()), names=tuple(tensors))

    def selected(
        self, inputs: LayerInputs, scores: Tensor | None
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Return the tensor "index", and K and V `[H_kv, n, D]` of the `rows` highest scores; every row and
        no index if there are no scores."""
        if scores is None:
            return {}, inputs.keys, inputs.values
        index = select_rows(scores, self.rows)
        return {"index": index}, gather_rows(inputs.keys, index), gather_rows(inputs.values, index)

    def positions_by_head(self, tensors: Tensors) -> tuple[Tensor | None, ...]:
        """Return the selected tokens of each KV head, integers `[n_h]` in no particular order; None: all."""
        index = tensors.get("index")
        return (None,) * self.shape.num_kv_heads if index is None else tuple(index)

    @abstractmethod
    def tensors(self) -> Specs:
        """Return the tensors that `compress` makes, as far as their sizes are known from the plan."""

    @abstractmethod
    def placed(self, num_new: int) -> Specs:
        """Return what is in memory with `num_new` new rows, by the names of `regions`; each region begins
        with it. If a size depends on the content, it is the largest possible one."""

    def regions(self) -> Specs:
        """Return the layer's regions in the arena, with room for the new tokens."""
        if self.segments is None:
            return self.placed(self.shape.num_new_rows)
        most_rows = self.segments.most_rows(self.shape.num_new_rows)
        return {**self.placed(most_rows), **self.segments.regions(self.shape)}

    def receive(self, header: Specs, regions: Tensors) -> dict[str, Tensor]:
        """Return where to write the bytes of each tensor: views of the regions, or memory outside the arena.

        Args: header: the tensors that the sender announces, in order.
        Returns: tensors of the shapes and dtypes of `header`.
        Raises: InvalidTensors: they are not the tensors of this layer.
        """
        self.check_header(header, self.tensors())
        return self._receive(header, regions)

    def _receive(self, header: Specs, regions: Tensors) -> dict[str, Tensor]:
        """Do what `receive` does, with a checked header: return the first part of the region of the same
        name, else host memory."""
        return {
            name: regions[name][tuple(map(slice, spec.shape))]
            if name in regions
            else torch.empty(spec.shape, dtype=spec.dtype)
            for name, spec in header.items()
        }

    @abstractmethod
    def open(self, regions: Tensors, tensors: Tensors) -> LayerCache:
        """Open the layer, once every byte has arrived; see `LayerCache.settle`.

        Raises: InvalidTensors: content that `compress` cannot have made.
        """

    def used_bytes(self, num_appended: int, prompt_bytes: int | None = None) -> int:
        """Count the bytes in use after `num_appended` tokens, without packed segments.

        Args: prompt_bytes: as `prompt_bytes()` returned it. If the size depends on the content, None means
            the largest possible size.
        """
        if self.segments is None:
            return sum(map(_SIZE_BYTES, self.placed(num_appended).values()))
        rows_bytes = size_bytes(self.placed(self.segments.num_rows(num_appended)))
        return rows_bytes + self.segments.queries_bytes(self.shape, num_appended)

    def parts(self, tensors: Tensors, num_parts: int) -> Sequence[Tensors]:
        """Divide a layer by its KV heads into so many equal parts, in order. Each has the tensors that the
        format of that many heads has. This default is for tensors whose first dimension is the heads.

        Args: tensors: as `compress` made them.
        Raises: InvalidTensors: they cannot be divided this way.
        """
        return chunked(tensors, self.shape.num_kv_heads, num_parts)

    def prompt_bytes(self, tensors: Tensors) -> int | None:
        """Count the bytes of the compressed prompt if they depend on its content; else return None."""
        return None

    def kept_bytes(self, prompt_bytes: int | None = None) -> int:
        """Count the bytes retained of the prompt before any token is generated, with selected positions."""
        index = self.tensors().get("index")
        return self.used_bytes(0, prompt_bytes) + (index.size_bytes if index is not None else 0)

    def shipped_bytes(self) -> int:
        """Count the bytes of the tensors on the wire; the most possible if they depend on the content."""
        return size_bytes(self.tensors())

    def read_bytes(self, prompt_bytes: int | None = None) -> int:
        """Count the bytes of the prompt that a decode step reads, including those read to choose rows."""
        return self.used_bytes(0, prompt_bytes)

    @abstractmethod
    def naive(self, tensors: Tensors) -> NaiveLayer:
        """Return the compressed prompt as the oracle attends to it."""

    def check_finite(self, tensors: Tensors) -> None:
        """Check received tensors: one number that is not finite would make all of a head's attention NaN, and
        kernels that choose tokens by scores would choose none or any.

        Raises: InvalidTensors: a number of a tensor in `finite` is NaN or infinite.
        """
        checked = [
            tensor for name in self.finite if (tensor := tensors.get(name)) is not None and tensor.numel()
        ]
        if not checked:
            return
        # NaN passes through minima and maxima, and one wait for the device is enough for all of them
        extremes = torch.stack([torch.stack(torch.aminmax(tensor)).float() for tensor in checked])
        if bool(extremes.isfinite().all()):
            return
        for name in self.finite:
            if name in tensors and (count := int((~tensors[name].isfinite()).sum())):
                total = tensors[name].numel()
                message = f"{count} of {total} numbers of {name} are not finite"
                raise InvalidTensors(message, reason="not_finite")

    def check_header(self, header: Specs, expected: Specs) -> None:
        """Check the announced tensors. Raises: InvalidTensors: they are not the expected ones."""

        def text(specs: Specs) -> str:
            return ", ".join(f"{name} {list(spec.shape)} {spec.dtype}" for name, spec in specs.items())

        if list(header.items()) != list(expected.items()):
            raise InvalidTensors(
                f"its tensors are {text(header) or 'none'}; {text(expected)} are expected",
                reason="layer_header",
            )


def size_bytes(specs: Specs) -> int:
    """Count the bytes of these tensors together."""
    return sum(map(_SIZE_BYTES, specs.values()))


def chunked(tensors: Tensors, num_kv_heads: int, num_parts: int) -> list[dict[str, Tensor]]:
    """Divide tensors whose first dimension is the KV heads; see `LayerFormat.parts`."""
    for name, tensor in tensors.items():
        if tensor.shape[:1] != (num_kv_heads,):
            raise InvalidTensors(
                f"{name} {list(tensor.shape)} cannot be divided among ranks: it has no dimension of "
                f"{num_kv_heads} KV heads first",
                reason="parts",
            )
    by_name = {name: tensor.chunk(num_parts) for name, tensor in tensors.items()}
    return [{name: chunks[part] for name, chunks in by_name.items()} for part in range(num_parts)]


def check_index(tensors: Tensors, num_tokens: int, *, reason: str) -> Tensor | None:
    """Check selected positions.

    Args: tensors: as they were received; num_tokens: T.
    Returns: the tensor "index", int32 `[H_kv, n]`; None if there is none, since every token is selected.
    Raises: InvalidTensors: not ascending per head, or outside 0 to T - 1.
    """
    index = tensors.get("index")
    if index is None:
        return None
    ascending = bool((index[:, 1:] > index[:, :-1]).all())
    if not ascending or bool(((index < 0) | (index >= num_tokens)).any()):
        low, high = (int(index.min()), int(index.max())) if index.numel() else (0, 0)
        raise InvalidTensors(
            f"kept positions must ascend within 0 to {num_tokens - 1} for each KV head; they lie in {low} to "
            f"{high}, ascending: {ascending}",
            reason=reason,
        )
    return index


def on_host(rows: Tensor) -> Tensor:
    """Make a contiguous copy in host memory."""
    return rows.to("cpu", copy=True, memory_format=torch.contiguous_format)


def select_rows(scores: Tensor, rows: int) -> Tensor:
    """Return the positions of each head's `rows` highest scores; among equal scores the lowest position wins.

    Args: scores: float32 `[H_kv, T]`; rows: 1 to T.
    Returns: int32 `[H_kv, rows]`, ascending and unique per head.
    """
    assert 1 <= rows <= scores.shape[1], f"rows is {rows}; it must be 1 to {scores.shape[1]}"
    # torch.topk does not define the order of ties; a stable sort does.
    order = scores.sort(dim=1, descending=True, stable=True).indices
    return order[:, :rows].sort(dim=1).values.to(torch.int32)
