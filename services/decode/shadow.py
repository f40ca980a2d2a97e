"""Repeats one sequence's step eagerly on the torch path, to decide whether a kernel can be trusted.

Asked after a step whose logits are not finite, and every Nth step with `--shadow-check N`. In every layer the
kernel's attention is compared with torch's, so that a wrong kernel is named. Only sequences whose rows are
the whole of their state can be repeated: the step writes the row that it wrote before.

The engine asks between steps, when no step that touches the sequence is in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from kvferry.kernels import dispatch
from kvferry.kernels.case import TOLERANCES
from kvferry.kernels.decode_batch import CachedRows
from kvferry.kernels.hsa import page_extremes
from kvferry.kernels.hsa.batch import SparseRows
from kvferry.kernels.packed_hsa.batch import SparsePackedRows
from kvferry.kernels.quarantine import Reason, is_quarantined, quarantine
from kvferry.kernels.softmax import Scaling
from kvferry.services.decode.attention import KERNELS
from kvferry.services.decode.step import StepInput
from kvferry.shared.compression.formats.interface import LayerCache
from kvferry.shared.model.interface import DecodeAttention, LanguageModel

LOGITS_TOLERANCES = {torch.float32: 1e-2, torch.float16: 5e-2, torch.bfloat16: 1e-1}
"""Norm of the difference of a step's logits, relative to torch's."""
Opinion = Literal["same", "kernel_wrong", "model_wrong"]
"""model_wrong: torch's logits are not finite either."""


class ShadowStep:
    """Repeats a step of one sequence. Args: given: the sequence before the step."""

    def __init__(self, model: LanguageModel, given: StepInput) -> None:
        self._model, self._given = model, given
        found = [cache.batched(given.num_appended) for cache in given.caches]
        self._rows = [rows for rows in found if type(rows) in KERNELS and rows is not None]
        self.is_possible = len(self._rows) == len(found) and not model.spec.state_layers

    @property
    def ops(self) -> list[str]:
        """The kernels that the sequence's steps use now."""
        ops = sorted({KERNELS[type(rows)].op for rows in self._rows})
        return [op for op in ops if dispatch.planned_path(op, self._model.device) != "torch"]

    @property
    def has_kernels(self) -> bool:
        """True if a kernel may have run in the step, even one that was quarantined during it."""
        return bool(self.ops) or any(is_quarantined(KERNELS[type(rows)].op) for rows in self._rows)

    def judge(self, logits: Tensor | None) -> tuple[Opinion, Tensor]:
        """Repeat the step; quarantine the kernels that differ.

        Args: logits: float32 `[V]` of the step; None if they were not finite.
        Returns: torch's logits, on the host. If they are the ones to be used, the sequence's rows are torch's
            too; otherwise they are as the step left them.
        """
        assert self.is_possible, "a sequence with another state cannot be repeated"
        restore = [_saved(rows) for rows in self._rows]
        if logits is None:
            for rows in self._rows:
                _repair(rows)
        with dispatch.torch_only():
            expected = self._run(self._attend_in_torch)
        if not bool(expected.isfinite().all()):
            return "model_wrong", expected
        if logits is not None:
            tolerance = LOGITS_TOLERANCES[self._model.dtype]
            if float((logits - expected).norm()) <= tolerance * float(expected.norm()):
                for undo in restore:
                    undo()
                return "same", expected
        used = self.ops
        self._run(self._attend_and_compare)
        if used == self.ops:
            # no kernel is wrong by itself now, so none of them is trusted
            reason: Reason = "nan" if logits is None else "wrong_result"
            for op in used:
                quarantine(op, reason, "a step's logits differ from torch's, each layer's attention does not")
        return "kernel_wrong", expected

    def _run(self, attend: DecodeAttention) -> Tensor:
        device, given = self._model.device, self._given
        token_ids = torch.tensor([given.token_id], device=device)
        positions = torch.tensor([given.position], device=device)
        return self._model.decode(token_ids, positions, attention=attend)[0].float().cpu()

    def _attend_in_torch(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: Scaling
    ) -> Tensor:
        cache: LayerCache = self._given.caches[layer]
        one = queries[0], keys[0], values[0]
        return cache.append_and_attend(*one, num_appended=self._given.num_appended, scaling=scaling)[None]

    def _attend_and_compare(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: Scaling
    ) -> Tensor:
        """Attend with the kernel, then with torch, whose rows stay."""
        op = KERNELS[type(self._rows[layer])].op
        result = None
        if not is_quarantined(op):
            result = self._attend_in_torch(layer, queries, keys, values, scaling)
        with dispatch.torch_only():
            expected = self._attend_in_torch(layer, queries, keys, values, scaling)
        if result is not None:
            error = float(
                (result.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-6)
            )
            if not error <= TOLERANCES[self._model.dtype]:
                reason: Reason = "wrong_result" if bool(result.isfinite().all()) else "nan"
                quarantine(op, reason, f"layer {layer}: the error is {error:.2e} relative to torch")
        return expected


def _saved(rows: CachedRows) -> Callable[[], None]:
    """Remember what a step writes. Returns a function that writes it again."""
    places = [rows.keys.select(1, rows.length), rows.values.select(1, rows.length)]
    if isinstance(rows, SparseRows) and rows.page_size > 1:
        page = rows.length // rows.page_size
        places += [rows.page_max.select(1, page), rows.page_min.select(1, page)]
    if isinstance(rows, SparsePackedRows):
        for h, head in enumerate(rows.packed.heads):
            page = (head.counts.num_tokens + rows.length) // rows.page_size
            places += [rows.pages.highest[h, page], rows.pages.lowest[h, page]]
    copies = [place.clone() for place in places]

    def undo() -> None:
        for place, copy in zip(places, copies, strict=True):
            place.copy_(copy)

    return undo


def _repair(rows: CachedRows) -> None:
    """Take a key that is not finite out of its page's extremes."""
    if isinstance(rows, SparseRows) and rows.page_size > 1:
        page = rows.length // rows.page_size
        begin = page * rows.page_size
        if begin < rows.length:
            pages = slice(page, page + 1)
            page_extremes(
                rows.keys[:, begin : rows.length],
                rows.page_max[:, pages],
                rows.page_min[:, pages],
                length=rows.length - begin,
                page_size=rows.page_size,
            )
