"""Checks of a packed layer that came over the wire, before anything attends to it.

Called by the decode worker's receiver, for each layer. In Triton one launch checks the whole layer, and the
host looks at what it found before the sequence is committed, so it waits for no layer.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvferry.kernels.dispatch import path_for
from kvferry.kernels.packed.key_words import half_tiles
from kvferry.kernels.packed.layer import PackedLayer
from kvferry.kernels.quarantine import attempt

BAD_CHANNELS, BAD_POSITIONS, BAD_SCALES, BAD_HALVES = 1, 2, 4, 8
"""The faults of a head, which are added up."""
_INDEX_FAULT = "{name} of head {head} must be distinct, ascending by width and below {limit}"
_SCALES_FAULT = "scales of head {head} must be finite and positive, and minima finite"
_HALVES_FAULT = "what head {head} keeps at 16 bits must be finite"


def begin_packed_check(packed: PackedLayer, num_prompt_tokens: int) -> Callable[[], None]:
    """Look for an index, scales or half floats that no packer writes, before anything attends to them.

    Returns: a function that refuses them. It waits for the device, and must be called before the layer is
        used.

    Raises: ValueError: a channel or a position is out of range, repeated or out of order, a scale is not
        finite and positive, or a minimum or a 16-bit value not finite. The returned function raises it; in
        torch this one does.
    """
    _ = packed.layout.entries  # computed now, not when a batch takes the layer

    def in_torch() -> Callable[[], None]:
        check_in_torch(packed, num_prompt_tokens)
        return lambda: None

    if path_for("packed_check", packed.buffer.device) == "torch" or not packed.buffer.numel():
        return in_torch()

    def launch() -> Callable[[], None]:
        # a CPU install has no Triton
        from kvferry.kernels.packed import check_kernel

        found = _HostRead(check_kernel.begin(packed, num_prompt_tokens))

        def refuse() -> None:
            _refuse(packed, num_prompt_tokens, check_kernel.faults(found.wait()).tolist())

        return refuse

    return attempt("packed_check", launch, in_torch)


def _refuse(packed: PackedLayer, num_prompt_tokens: int, found: Sequence[int]) -> None:
    """Raise the first fault, if any. Args: found: for each head, a sum of faults."""
    for fault, name, limit in (
        (BAD_CHANNELS, "channels", packed.layout.head_dim),
        (BAD_POSITIONS, "positions", num_prompt_tokens),
    ):
        for head, faults in enumerate(found):
            if faults & fault:
                raise ValueError(_INDEX_FAULT.format(name=name, head=head, limit=limit))
    for fault, message in ((BAD_SCALES, _SCALES_FAULT), (BAD_HALVES, _HALVES_FAULT)):
        for head, faults in enumerate(found):
            if faults & fault:
                raise ValueError(message.format(head=head))


def check_in_torch(packed: PackedLayer, num_prompt_tokens: int) -> None:
    """Run the checks in torch. Raises: ValueError: as the result of `begin_packed_check`."""
    names = ("channels", "positions", "key_scales", "key_minima", "value_scales", "value_minima", "values_16")
    of_heads = zip(*map(operator.attrgetter(*names), packed.heads), strict=True)
    channels, positions, key_scales, key_minima, value_scales, value_minima, halves = of_heads
    counts = operator.attrgetter("counts.channels", "counts.tokens")
    num_channels, num_tokens = zip(*map(counts, packed.heads), strict=True)
    _check_index("channels", channels, num_channels, packed.layout.head_dim)
    _check_index("positions", positions, num_tokens, num_prompt_tokens)
    _check_scales(key_scales, key_minima)
    _check_scales(value_scales, value_minima)
    bad = _first_head(~torch.cat(halves).isfinite().all(1), list(map(len, halves)))
    for h, head in enumerate(packed.heads):
        for tile in half_tiles(head.key_words, head.counts.channels, head.counts.num_tokens, max_blocks=64):
            if bad is None and not bool(tile.isfinite().all()):
                bad = h
    if bad is not None:
        raise ValueError(_HALVES_FAULT.format(head=bad))


def _check_index(name: str, parts: tuple[Tensor, ...], counts: Sequence[Sequence[int]], limit: int) -> None:
    """Require every head's part to be distinct, below limit, and ascending within each width."""
    sizes = list(map(len, parts))
    index = torch.cat(parts).long()
    # one range of numbers per head, so that all heads are compared at once
    numbers = torch.arange(len(parts)).repeat_interleave(torch.tensor(sizes)).to(index.device) * limit + index
    bad = (index < 0) | (index >= limit)
    order = numbers.sort(stable=True)
    bad[order.indices[1:]] |= order.values.diff() == 0
    falls = index.diff() <= 0
    start = 0
    for count in itertools.chain.from_iterable(counts):
        start += count
        # the first of the next width has no predecessor
        falls[max(start - 1, 0) : start] = False
    bad[1:] |= falls
    head = _first_head(bad, sizes)
    if head is not None:
        raise ValueError(_INDEX_FAULT.format(name=name, head=head, limit=limit))


def _check_scales(scales: tuple[Tensor, ...], minima: tuple[Tensor, ...]) -> None:
    """Require scales above 0, and finite scales and minima."""
    scale, minimum = (torch.cat([part.flatten() for part in parts]) for parts in (scales, minima))
    # float16 values: no code times a scale is beyond float32
    bad = ~((scale > 0) & scale.isfinite() & minimum.isfinite())
    head = _first_head(bad, [part.numel() for part in scales])
    if head is not None:
        raise ValueError(_SCALES_FAULT.format(head=head))


def _first_head(bad: Tensor, sizes: Sequence[int]) -> int | None:
    """Return the head of the first bad element; None if there is none. Args: sizes: elements of each head."""
    if not bool(bad.any()):
        return None
    stops = list(itertools.accumulate(sizes))
    return bisect.bisect_right(stops, int(bad.nonzero()[0]))


class _HostRead:
    """Begins to copy a tensor to the host. On a CPU there is nothing to copy.

    On CUDA the copy follows the current stream's work into pinned memory, and any thread may wait for it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._values = tensor
        self._arrived: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> Tensor:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.cpu()
