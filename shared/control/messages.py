"""The control messages as typed dataclasses: what router, prefill and decode say to one another.

`codec/` is the only code that turns them into protobuf and back (`proto/control.proto` mirrors this
file); in-process clients pass them as they are. Times are seconds, sizes bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvferry.shared.compression.plan import CompressionPlan
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.sampling.params import SampledToken, SamplingParams

FinishReason = Literal["stop", "length"]
ReuseSource = Literal["session", "document", "prefix"]
"""Whose KV a turn continues from: its session's, the document's it names, another session's of its key."""
HistoryWay = Literal["recompute", "fetch", "delta"]
"""How a turn came by its history: run again, loaded from where it is held, or loaded and shipped without the
rows that decode still holds."""


@dataclass(frozen=True, kw_only=True)
class SessionKey:
    """A session of one API key. `owner` is a digest of the key, never the key itself."""

    owner: str
    session_id: str


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """Decode's promise of memory for one transfer.

    Attributes:
        endpoint: where to ship the blocks: `tcp://...`, `ipc://...` or `inproc://...`.
        transfer_id: random u64, names the reservation.
        generation: u32; blocks of an older generation are dropped and counted.
        credit_bytes: payload bytes that may be in flight before the receiver grants more.
        lease_s: the reservation is freed if the transfer is not complete by then.
        reserved_bytes: arena bytes held.
        held_transfer_id: the transfer of which this worker still has the session's rows; they need not come
            again. 0 if there is none.
        held_tokens: how many tokens of the new prompt, from its start, are those of the rows held.
        held_depth: how many transfers' rows are held: that one's and those before it.
    """

    endpoint: str
    transfer_id: int
    generation: int
    credit_bytes: int
    lease_s: float
    reserved_bytes: int
    held_transfer_id: int = 0
    held_tokens: int = 0
    held_depth: int = 0


# ---- decode ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """Router to decode: reserve memory, await the transfer, then stream tokens.

    Attributes:
        prompt_token_ids: all of the prompt, history included (penalties need it).
        store_history: ship the generated tokens' KV back to prefill when the turn ends.
        probe: a readiness probe; moves no request, token or byte counter.
        session: whose rows may be held from its last turn, and are held after this one; None holds none.
    """

    request_id: str
    model_fingerprint: str
    prompt_token_ids: tuple[int, ...]
    plan: CompressionPlan
    sampling: SamplingParams
    store_history: bool = False
    probe: bool = False
    session: SessionKey | None = None


@dataclass(frozen=True, kw_only=True)
class TicketIssued:
    """First event of a Generate stream."""

    ticket: Ticket


@dataclass(frozen=True, kw_only=True)
class TransferAccepted:
    """All blocks verified; the sequence has joined the running batch.

    Attributes:
        transfer_s: from the manifest's arrival to the last block's verification.
    """

    transfer_s: float


@dataclass(frozen=True, kw_only=True)
class TokenGenerated:
    """A token of index >= 1 (prefill's answer brings token 0)."""

    token: SampledToken


@dataclass(frozen=True, kw_only=True)
class GenerationFinished:
    """No more tokens will come.

    Attributes:
        num_tokens: completion tokens, the first and a final end-of-sequence token counted.
        cache_bytes: arena bytes that the sequence used at its end.
    """

    finish_reason: FinishReason
    num_tokens: int
    cache_bytes: int


@dataclass(frozen=True, kw_only=True)
class HistoryReturned:
    """The generated tokens' KV has been acknowledged by prefill. Last event where `store_history` was set.

    Attributes:
        num_tokens: rows returned: completion tokens less the last, which has no KV yet. 0 if the return
        failed
            (the next turn then prefills these tokens again).
    """

    num_tokens: int


GenerateEvent = TicketIssued | TransferAccepted | TokenGenerated | GenerationFinished | HistoryReturned


# ---- prefill ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PrefillRequest:
    """Router to prefill: run the prompt, compress, ship to the ticket's endpoint, answer with the first
    token.

    Attributes:
        session: where history is looked up and staged; None keeps none.
        document: whose history the session may begin with; of the same owner.
        has_history: the session has had turns, so that history which is not there is a miss.
    """

    request_id: str
    model_fingerprint: str
    prompt_token_ids: tuple[int, ...]
    plan: CompressionPlan
    sampling: SamplingParams
    ticket: Ticket
    session: SessionKey | None = None
    probe: bool = False
    document: SessionKey | None = None
    kept_bins: int = 0
    has_history: bool = False


@dataclass(frozen=True, kw_only=True)
class FirstToken:
    """First event of a Prefill stream: the token sampled from prefill's own dense logits.

    Attributes:
        method: the method in effect ("full" where the budget covers the prompt).
        reused_tokens: prompt tokens whose KV came from history.
        reuse_source: whose history that was.
        full_bytes: what full KV of the whole prompt would be.
        prefill_s: the forward pass, compression included.
        compress_s: compression alone.
        queue_s: time spent waiting for the engine.
        kept: the fraction of rows kept in each of the request's `kept_bins` stretches of the prompt, over all
            layers and KV heads; empty where it asks for none.
        history_way: how the turn came by what was there before it; None where there was nothing.
        history_tier: the slowest tier that gave rows; "" where none did.
    """

    token: SampledToken
    method: str
    reused_tokens: int
    full_bytes: int
    prefill_s: float
    compress_s: float
    queue_s: float
    reuse_source: ReuseSource = "session"
    kept: tuple[float, ...] = ()
    history_way: HistoryWay | None = None
    history_tier: str = ""


@dataclass(frozen=True, kw_only=True)
class TransferDone:
    """Last event of a Prefill stream: decode has acknowledged every block.

    Attributes:
        bytes_by_kind: payload bytes on the wire: codes, scales, rows, index, state, manifest.
        transfer_s: from the first block's sending to the acknowledgement.
        delta_bytes: bytes of rows that decode did not hold, where it was spared those that it did; None where
            every row came.
    """

    bytes_by_kind: dict[str, int]
    transfer_s: float
    delta_bytes: int | None = None


PrefillEvent = FirstToken | TransferDone


@dataclass(frozen=True, kw_only=True)
class CommitTurnRequest:
    """Router to prefill at a turn's end: publish the staged history as the session's record, atomically.

    Attributes:
        token_ids: prompt and completion; KV exists for the prompt and for what decode returned.
    """

    request_id: str
    session: SessionKey
    token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class HistoryInfo:
    """What the history store holds of a session.

    Attributes:
        num_tokens: tokens with KV.
        tier: "memory", or "none" where nothing is held.
    """

    num_tokens: int
    size_bytes: int
    tier: str = "memory"


# ---- both ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """A worker's identity and load, polled by the router for placement and readiness.

    Attributes:
        instance_id: random, new at every start: a change tells that the worker restarted.
        ready: the engine has recently done work or passed its own probe.
        running, waiting: requests.
        free_bytes, total_bytes: decode: the arena, what is retained counted as free; prefill: the history
            store's bound.
        kernel_paths: the path that each of its kernels takes, by the op's name.
    """

    role: Literal["prefill", "decode"]
    instance_id: str
    protocol_version: int
    ready: bool
    running: int
    waiting: int
    free_bytes: int
    total_bytes: int
    model: ModelSpec
    methods: tuple[str, ...] = field(default_factory=tuple)
    kernel_paths: dict[str, str] = field(default_factory=dict)
