"""Decode attention: its sizes for one layer of one prompt, its operations, and the kinds by name.

A kind is the `attention` part of a plan and of a resolved layer. Adding one is one class and one entry of
`ATTENTIONS`, or an entry point of another package (`interface.Method`). A resolved attention is a `Part` with
the kind's name and its integer sizes, so the wire and the control calls need no code for each kind. Formats
use one object for the layout of the arena (`specs`), for a prompt that has arrived (`build`), for decode's
steps (`append`, `attend`) and in the oracle. It stores sizes only; K, V and auxiliary tensors belong to the
caller.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvferry.kernels import hsa, packed_hsa
from kvferry.kernels.dense_decode import dense_decode
from kvferry.kernels.packed.layer import PackedLayer
from kvferry.kernels.softmax import Scaling, plain
from kvferry.kernels.trizone import trizone_decode_segments
from kvferry.shared.compression.interface import (
    LayerShape,
    Sizing,
    TensorSpec,
    installed_parts,
    with_installed,
)
from kvferry.shared.compression.plan import Allowed, Between, Part, look_up, read_params
from kvferry.shared.errors import InvalidRequest

_MAX_SIZE = 1 << 31
_AUXILIARY = "auxiliary_"


@dataclass(frozen=True, kw_only=True)
class CacheView:
    """One layer's KV as attention reads it.

    Attributes:
        keys, values: `[H_kv, cap, D]`, of which the first rows are in use; the others may contain anything.
            If the prompt is packed, they are of new tokens only.
        auxiliary: the tensors of `AttentionKind.specs`, in that order.
        packed: the packed prompt, then packed segments of new tokens; empty if the prompt is rows.
    """

    keys: Tensor
    values: Tensor
    auxiliary: tuple[Tensor, ...] = ()
    packed: Sequence[PackedLayer] = ()

    @classmethod
    def of(
        cls, shape: LayerShape, regions: Mapping[str, Tensor], packed: Sequence[PackedLayer] = ()
    ) -> CacheView:
        """Return a view of the regions of rows, and of those of `AttentionKind.regions`."""
        auxiliary = [tensor for name, tensor in regions.items() if name.startswith(_AUXILIARY)]
        keys, values = shape.rows_of(regions)
        return cls(keys=keys, values=values, auxiliary=tuple(auxiliary), packed=packed)


@dataclass(frozen=True, kw_only=True)
class AttentionKind(ABC):
    """Decode attention of one layer. A subclass is a frozen dataclass whose fields are integer sizes.

    Attributes:
        name: its name in plans and metrics.
        takes_any_softmax: whether it goes with soft-capping and sinks, too; estimates ignore them.
    """

    name: ClassVar[str]
    takes_any_softmax: ClassVar[bool] = True

    @classmethod
    @abstractmethod
    def sized(cls, *, cap: int, budget: int, head_dim: int, row_dim: int) -> AttentionKind:
        """Return this kind with its sizes for one layer.

        Args:
            cap: the prompt rows that attention chooses from.
            budget: t, the traffic of one decode step as a number of rows; what is read to choose rows counts.
            head_dim: d.
            row_dim: channels that a row stores: 2 d for K and V, d of a latent row.
        """

    def specs(self, shape: LayerShape, num_rows: int, *, packed: bool = False) -> tuple[TensorSpec, ...]:
        """Return the tensors stored beside `num_rows` tokens per KV head; if packed, with the new ones."""
        return ()

    def regions(self, shape: LayerShape, num_rows: int, *, packed: bool = False) -> dict[str, TensorSpec]:
        """Return the tensors of `specs` by the names of their regions."""
        specs = self.specs(shape, num_rows, packed=packed)
        names = map(f"{_AUXILIARY}{{}}".format, range(len(specs)))
        return dict(zip(names, specs, strict=True))

    def rebuilt(
        self, shape: LayerShape, keys: Tensor, values: Tensor, packed: Sequence[PackedLayer] = ()
    ) -> CacheView:
        """Return a view with new auxiliary tensors, built from every row and packed token. For the oracle."""
        num_packed = max(head.num_tokens for head in packed[0].layout.heads) if packed else 0
        specs = self.specs(shape, num_packed + keys.shape[1], packed=bool(packed))
        auxiliary = [torch.empty(spec.placed_shape, dtype=spec.dtype, device=keys.device) for spec in specs]
        view = CacheView(keys=keys, values=values, auxiliary=tuple(auxiliary), packed=packed)
        self.build_again(view, length=keys.shape[1])
        return view

    def build_again(self, cache: CacheView, *, length: int) -> None:
        """Fill the auxiliary tensors from the packed prompt, if there is one, and the first `length` rows."""
        self.build(cache, length=length)
        if cache.packed and cache.auxiliary:
            for position in range(length):
                key, value = cache.keys[:, position], cache.values[:, position]
                self.append(cache, key, value, position=position)

    def build(self, cache: CacheView, *, length: int) -> None:  # noqa: B027 (most kinds have nothing to build)
        """Fill the auxiliary tensors from the first `length` rows, or from the packed prompt."""

    def append(self, cache: CacheView, key: Tensor, value: Tensor, *, position: int) -> None:
        """Write key and value `[H_kv, D]` to row `position`, the first unused one; update `auxiliary`.

        Raises: IndexError, ValueError: there is no such row.
        """
        cache.keys[:, position] = key
        cache.values[:, position] = value

    @abstractmethod
    def attend(self, queries: Tensor, cache: CacheView, *, length: int, scaling: Scaling) -> Tensor:
        """Attend from one token to the packed tokens and the first `length` rows; its own row is the last.

        Args: queries: `[H_kv, G, D]`.
        Returns: `[H_kv, G, D]`.
        """

    @abstractmethod
    def read_bytes(self, shape: LayerShape, num_rows: int, packed_bytes: int | None = None) -> int:
        """Count the bytes that a step reads of a layer with `num_rows` tokens per KV head, in all KV heads.

        Bytes read to choose rows count too. This is what a fused kernel on the method's own layout reads; a
        torch path may read more.

        Args: packed_bytes: of the packed tokens, if they are packed.
        """


@dataclass(frozen=True, kw_only=True)
class Dense(AttentionKind):
    """Every row: `softmax(q K^T * scaling) V`."""

    name: ClassVar[str] = "dense"

    @classmethod
    def sized(cls, *, cap: int, budget: int, head_dim: int, row_dim: int) -> Dense:
        return cls()

    def attend(self, queries: Tensor, cache: CacheView, *, length: int, scaling: Scaling) -> Tensor:
        keys, values = cache.keys[:, :length], cache.values[:, :length]
        if cache.packed:
            return trizone_decode_segments(queries, cache.packed, keys, values, scaling=plain(scaling))
        return dense_decode(queries, keys, values, scaling=scaling)

    def read_bytes(self, shape: LayerShape, num_rows: int, packed_bytes: int | None = None) -> int:
        return shape.rows_bytes(num_rows) if packed_bytes is None else packed_bytes


@dataclass(frozen=True, kw_only=True)
class Choosing(AttentionKind):
    """A kind that attends to a fixed number of tokens, which it chooses at each step.

    Attributes:
        num_tokens: tokens attended exactly per KV head, including the newest.
    """

    num_tokens: int

    @cached_property
    def sizes(self) -> dict[str, Any]:
        """All fields, which are arguments of the kind's kernel."""
        return asdict(self)

    def _estimate_bytes(self, shape: LayerShape, num_rows: int, *, packed: bool) -> int:
        """Count the bytes read per KV head to choose the tokens."""
        return 0

    def read_bytes(self, shape: LayerShape, num_rows: int, packed_bytes: int | None = None) -> int:
        """Count the estimates and the chosen tokens. If there are no more tokens than that, all are read.

        Of packed bytes, the chosen tokens' average share is counted: a step's query decides which tokens
        are read, and their widths differ.
        """
        whole = shape.rows_bytes(num_rows) if packed_bytes is None else packed_bytes
        if num_rows <= self.num_tokens:
            return whole
        estimate = self._estimate_bytes(shape, num_rows, packed=packed_bytes is not None)
        return shape.num_kv_heads * estimate + whole * self.num_tokens // num_rows


@dataclass(frozen=True, kw_only=True)
class Paged(Choosing):
    """A kind that stores Kmax and Kmin of pages.

    Both are in one tensor `[2, H_kv, D, ceil(rows / P)]`. The pages of a channel are adjacent, because a step
    reads few channels. With P = 1 rows need no such tensor: each key is the extremes of its own page. Of a
    packed prompt they are codes of 8 bits, with each channel's range `[2, H_kv, D]` beside them.

    Attributes:
        page_size: P, the tokens that share one Kmax/Kmin pair.
    """

    page_size: int

    def specs(self, shape: LayerShape, num_rows: int, *, packed: bool = False) -> tuple[TensorSpec, ...]:
        size = (2, shape.num_kv_heads, shape.head_dim, hsa.num_pages(num_rows, self.page_size))
        if packed:
            codes = TensorSpec(shape=size, dtype=torch.uint8, aligned=True)
            return (codes, TensorSpec(shape=size[:3], dtype=torch.float32))
        if self.page_size == 1:
            return ()
        return (TensorSpec(shape=size, dtype=shape.dtype, aligned=True),)

    def extremes(self, cache: CacheView) -> tuple[Tensor, Tensor]:
        """Return Kmax and Kmin of rows, `[H_kv, ceil(cap / P), D]`."""
        if not cache.auxiliary:
            return cache.keys, cache.keys
        both = cache.auxiliary[0].mT[:, :, : hsa.num_pages(cache.keys.shape[1], self.page_size)]
        return both[0], both[1]

    def codes(self, cache: CacheView) -> packed_hsa.PageCodes:
        """Return the extremes of a packed prompt and the rows after it."""
        return packed_hsa.PageCodes(*cache.auxiliary[0].mT, *cache.auxiliary[1])

    def build(self, cache: CacheView, *, length: int) -> None:
        if cache.packed:
            packed_hsa.page_extremes(cache.packed[0], self.codes(cache), page_size=self.page_size)
        elif cache.auxiliary:
            hsa.page_extremes(cache.keys, *self.extremes(cache), length=length, page_size=self.page_size)

    def append(self, cache: CacheView, key: Tensor, value: Tensor, *, position: int) -> None:
        super().append(cache, key, value, position=position)
        page_size = self.page_size
        if cache.packed:
            codes = self.codes(cache)
            packed_hsa.append_key(cache.packed[0], codes, key, num_new=position, page_size=page_size)
        else:
            hsa.update_page_extremes(*self.extremes(cache), key, position=position, page_size=page_size)


@dataclass(frozen=True, kw_only=True)
class Hsa(Paged):
    """RocketKV's hybrid sparse attention (`kernels.hsa`, section 3.4), also over a packed prompt.

    Attributes:
        num_channels: k1, channels read for the estimate; `num_tokens` is k2.
    """

    name: ClassVar[str] = "hsa"
    num_channels: int

    @classmethod
    def sized(cls, *, cap: int, budget: int, head_dim: int, row_dim: int) -> Hsa:
        """Compute the sizes of RocketKV sections 3.4 and 3.6.

        `c2 = max(1, cap/t)`; `P = ceil(sqrt(c2))` if that is <= c2, else 1; `k1 = floor(d P t / cap)`
        channels, half as many of latent rows; `k2 = floor(t / 2)` tokens.
        """
        page_size = 1
        while page_size * page_size * budget < cap:
            page_size += 1
        if page_size * budget > cap:
            page_size = 1
        num_channels = min(max(row_dim * page_size * budget // (2 * cap), 1), head_dim)
        return cls(page_size=page_size, num_channels=num_channels, num_tokens=max(budget // 2, 1))

    def attend(self, queries: Tensor, cache: CacheView, *, length: int, scaling: Scaling) -> Tensor:
        if not cache.packed:
            tensors = cache.keys, cache.values, *self.extremes(cache)
            return hsa.attend(queries, *tensors, length=length, scaling=scaling, **self.sizes)
        return packed_hsa.attend(
            queries,
            cache.packed[0],
            cache.keys[:, :length],
            cache.values[:, :length],
            self.codes(cache),
            scaling=plain(scaling),
            **self.sizes,
        )

    def _estimate_bytes(self, shape: LayerShape, num_rows: int, *, packed: bool) -> int:
        """Count one of Kmax and Kmin for k1 channels of each page; of codes, also each channel's step."""
        pages = hsa.num_pages(num_rows, self.page_size)
        return self.num_channels * (pages + 4 if packed else pages * shape.dtype.itemsize)


ATTENTIONS: Mapping[str, type[AttentionKind]] = {
    "dense": Dense,
    "hsa": Hsa,
}
EVICTIONS: Mapping[str, str] = {"evict": "heavy_hitters", "merge": "accumulated_attention"}
"""Attentions that evict a row at each step (`formats/evicting.py`), each with the scorer that it requires:
the scorer divides the prompt's rows into the same zones as eviction does."""


def attentions() -> Mapping[str, type[AttentionKind]]:
    """Return all kinds by name.

    Raises: ConfigurationError: an installed method brings one whose name is taken.
    """
    return with_installed("attentions", ATTENTIONS, installed_parts("attention"))


def _attention_class(name: str) -> type[AttentionKind]:
    return ATTENTIONS.get(name) or look_up("attention", name, attentions())


def chooses_rows(part: Part) -> bool:
    """Say whether a plan's attention reads only some of the rows at each step."""
    return part.name != "dense" and part.name not in EVICTIONS


def check_attention(part: Part, *, scorer: Part | None) -> None:
    """Check the name and parameters of a plan's attention, and that the plan's scorer goes with it.

    Every kind except "dense" takes `dense_layers` (int, 0 by default): the number of first layers that attend
    densely.

    Raises: InvalidRequest: an unknown name, bad parameters, or another scorer than an eviction requires.
    """
    look_up("attention", part.name, {**attentions(), **EVICTIONS})
    wanted = EVICTIONS.get(part.name)
    if wanted is not None and (scorer is None or scorer.name != wanted):
        raise InvalidRequest(
            f"attention {part.name!r} goes with scorer {wanted!r}; the plan's scorer is "
            f"{'none' if scorer is None else repr(scorer.name)}",
            param="kv_compression",
        )
    takes_layers = bool(part.params) and part.name != "dense"
    allowed: Allowed = {"dense_layers": Between(0, _MAX_SIZE)} if takes_layers else {}
    read_params(f"attention {part.name!r}", part.params, allowed)


def size_attention(part: Part, sizing: Sizing, *, cap: int, packed_per_row: Fraction | None = None) -> Part:
    """Return the attention of one layer: the kind's name and its sizes.

    Half of a sparse attention's traffic reads estimates, the other half reads tokens. Packed tokens have
    fewer bytes than rows, so more of them are attended in proportion. Their page extremes are codes of 8
    bits, so twice as many channels are read.

    Args:
        part: a plan's attention, as `check_attention` accepts it.
        cap: as in `AttentionKind.sized`; of a packed layer, the most tokens that a head packs.
        packed_per_row: how many packed tokens take the bytes of one row; None if rows are not packed.
    """
    if part.name == "dense" or sizing.layer < int(part.params.get("dense_layers", 0)):
        return Part(name="dense")
    if part.name in EVICTIONS:
        return Part(name=part.name)
    kind = _attention_class(part.name).sized(
        cap=cap, budget=sizing.budget, head_dim=sizing.head_dim, row_dim=sizing.row_dim
    )
    sized = Part(name=part.name, params=asdict(kind))
    if packed_per_row is None:
        return sized
    attended = min(max(int(sizing.budget * packed_per_row / 2), 1), cap)
    channels = min(2 * int(sized.params["num_channels"]), sizing.head_dim)
    return replace(sized, params={**sized.params, "num_tokens": attended, "num_channels": channels})


def make_attention(sized: Part) -> AttentionKind:
    """Make the attention that a resolved layer names.

    Raises: InvalidRequest: an unknown name, or sizes that do not belong to this kind.
    """
    kind = _attention_class(sized.name)
    allowed = {field.name: Between(1, _MAX_SIZE) for field in fields(kind)}
    return kind(**read_params(f"a layer's attention {sized.name!r}", sized.params, allowed))
