"""What the leading rank of a prefill worker and the others tell one another about the prompts they ship.

Commands come in the order of the passes; `Abort` comes aside, also while a pass runs. Tensors of the prompt
are not among these: each rank ships its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.services.prefill.config import PrefillConfig
from kvferry.shared.cache.delta import RetainedChain, ShippedRows
from kvferry.shared.compression.plan import ResolvedPlan
from kvferry.shared.control.messages import Ticket
from kvferry.shared.errors import KvferryError
from kvferry.shared.wire.messages import Manifest, TransferKey


@dataclass(frozen=True, kw_only=True)
class Start:
    """Make the rank's block sender. Answered with None, or an error.

    Attributes: settings: the worker's, with the folder of its keys.
    """

    settings: PrefillConfig


@dataclass(frozen=True, kw_only=True)
class Ship:
    """Open the transfer of the rank's heads, of which a pass follows.

    Attributes:
        manifest: of all heads; its key names the transfer from now on.
        retained: rows that decode retains, of the rank's heads.
        num_bins: as of `KeptMap`; 0: none is wanted.
        with_positions: whether the positions of rows are wanted.
        timeout_s: how long the transfer may take in all.
    """

    ticket: Ticket
    manifest: Manifest
    plan: ResolvedPlan
    retained: RetainedChain | None
    num_bins: int
    with_positions: bool
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class Forget:
    """Nothing more is wanted of a transfer; it is aborted if it is not over."""

    key: TransferKey


@dataclass(frozen=True, kw_only=True)
class Abort:
    """Abort a transfer, if it is open."""

    key: TransferKey
    reason: str


@dataclass(frozen=True, kw_only=True)
class LayerSent:
    """Noted by a rank: its sender has a layer. Attributes: rows: of all layers, with the last of them."""

    key: TransferKey
    layer: int
    rows: ShippedRows | None


@dataclass(frozen=True, kw_only=True)
class PartAcknowledged:
    """Noted by a rank: decode has its heads. Attributes: as of `OutgoingTransfer`."""

    key: TransferKey
    transfer_s: float
    bytes_by_kind: Mapping[str, int]
    resent_bytes: int


@dataclass(frozen=True, kw_only=True)
class PartFailed:
    """Noted by a rank: its heads could not be compressed or shipped."""

    key: TransferKey
    error: KvferryError


@dataclass(frozen=True, kw_only=True)
class Connected:
    """Noted by a rank: its sender has connected to a decode worker. Attributes: transport: its name."""

    transport: str
