"""A prompt's transfer in parts: blocks of some KV heads each, straight to the rank of decode with these."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from kvferry.shared.cache.delta import NEW_ROWS, delta_parts
from kvferry.shared.compression.formats.interface import InvalidTensors, LayerFormat
from kvferry.shared.control.messages import Ticket
from kvferry.shared.errors import TransferFailed
from kvferry.shared.wire.messages import EndRecord, Manifest, NamedTensor, part_key
from kvferry.shared.wire.sender import BlockSender, OutgoingTransfer


class PartedTransfer:
    """The heads of one rank of prefill, or of all. Has what prefill uses of an `OutgoingTransfer`; see there.
    Each part is one, which is acknowledged by its own rank. If one fails, all do.

        prefill        | rank 0    | rank 1    |
        parts, decode  | 0   | 1   | 2   | 3   |

    Args:
        manifest: of all heads.
        formats: of the layers, of this rank's heads.
        rank, num_ranks: of prefill, where each ships its heads itself; decode has as many or a multiple.

    Raises: TransferFailed: the heads cannot be divided among so many ranks, or as `BlockSender.open`.
    """

    def __init__(
        self,
        sender: BlockSender,
        ticket: Ticket,
        manifest: Manifest,
        formats: Sequence[LayerFormat],
        *,
        timeout_s: float,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        endpoints = (ticket.endpoint, *ticket.part_endpoints)
        num_heads, left = divmod(manifest.num_kv_heads, len(endpoints))
        if left:
            raise TransferFailed(
                f"the ticket has endpoints of {len(endpoints)} ranks; the model's {manifest.num_kv_heads} KV "
                "heads must be a multiple of that",
                reason="parts",
            )
        num_own = len(endpoints) // num_ranks
        self._formats = formats
        self._parts: list[OutgoingTransfer] = []
        try:
            for number in range(rank * num_own, (rank + 1) * num_own):
                key = part_key(manifest.key, number * num_heads)
                self._parts.append(
                    sender.open(
                        replace(ticket, endpoint=endpoints[number], transfer_id=key.transfer_id),
                        replace(manifest, key=key, num_kv_heads=num_heads),
                        timeout_s=timeout_s,
                    )
                )
        except BaseException:
            self.abort("aborted")
            raise

    def send_layer(self, layer: int, tensors: Sequence[NamedTensor]) -> None:
        """See `OutgoingTransfer.send_layer`. Args: tensors: of all its heads, on the host."""
        kinds = {its.name: its.kind for its in tensors}
        whole = {its.name: its.tensor for its in tensors}
        fmt, number = self._formats[layer], len(self._parts)
        try:
            divided = delta_parts(fmt, whole, number) if NEW_ROWS in whole else fmt.parts(whole, number)
        except InvalidTensors as error:
            failed = TransferFailed(f"layer {layer}: {error}", reason=error.reason)
            self.abort(error.reason)
            raise failed from error
        for part, of_part in zip(self._parts, divided, strict=True):
            named = [NamedTensor(name=name, tensor=its, kind=kinds[name]) for name, its in of_part.items()]
            part.send_layer(layer, named)

    def finish(self, end: EndRecord) -> None:
        """See `OutgoingTransfer.finish`. The first rank's part has the first token."""
        for part in self._parts:
            part.finish(end)
            end = replace(end, first_token=None)

    def wait(self, timeout_s: float) -> float:
        """See `OutgoingTransfer.wait`: the seconds of the part that took longest."""
        deadline_s = time.monotonic() + timeout_s
        first = self._parts[0]
        first.wait_for(lambda: any(its.has_failed for its in self._parts) or self.is_over, timeout_s)
        try:
            in_order = sorted(self._parts, key=lambda its: not its.is_over)  # those that failed come first
            return max(its.wait(max(0.0, deadline_s - time.monotonic())) for its in in_order)
        except BaseException:
            self.abort("aborted")
            raise

    def abort(self, reason: str) -> None:
        """See `OutgoingTransfer.abort`."""
        for part in self._parts:
            part.abort(reason)

    def redirect(self, ticket: Ticket) -> None:
        """Parts are not sent again. Raises: TransferFailed ("resend")."""
        raise TransferFailed(
            f"a transfer of {len(self._parts)} parts ({self._parts[0].key}) cannot be sent to another worker",
            reason="resend",
        )

    @property
    def is_over(self) -> bool:
        return all(its.is_over for its in self._parts)

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """See `OutgoingTransfer.bytes_by_kind`: of all parts."""
        total: dict[str, int] = {}
        for part in self._parts:
            for kind, size_bytes in part.bytes_by_kind.items():
                total[kind] = total.get(kind, 0) + size_bytes
        return total

    @property
    def resent_bytes(self) -> int:
        return sum(its.resent_bytes for its in self._parts)
