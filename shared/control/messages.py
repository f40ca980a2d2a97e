"""The control messages between router, prefill and decode, which the calls of `calls.py` carry.

Between processes they travel as the messages of the same names in `proto/control.proto`, converted by
`codec.py`; in one process they are passed as they are. A new field needs a line here and one in
`control.proto`. Times are in seconds, sizes in bytes.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

from kvferry.shared.compression.plan import CompressionPlan, ResolvedPlan
from kvferry.shared.model.question import Question
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.sampling.params import SampledToken, SamplingParams

FinishReason = Literal["stop", "length"]
ReuseSource = Literal["session", "document", "prefix"]
"""Whose KV a request reuses: its session's, its document's, or another session's of the same API key."""
HistorySource = Literal["recompute", "fetch", "delta"]
"""How prefill got the session's KV: computed again, loaded from the history store, or loaded and shipped
without the rows that decode still retains."""
IMPLICIT_PREFIX = "implicit/"


@dataclass(frozen=True, kw_only=True)
class SessionKey:
    """A session of one API key. `owner` is a digest of the key, not the key."""

    owner: str
    session_id: str

    @property
    def is_implicit(self) -> bool:
        """Return whether this is a prompt without a session, stored for a while for others to reuse. Such
        records are the first to be evicted, have no generated tokens, and stay in memory."""
        return self.session_id.startswith(IMPLICIT_PREFIX)


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """Memory that a decode worker has reserved for one transfer.

    Attributes:
        endpoint: where to ship the blocks: `tcp://...`, `ipc://...` or `inproc://...`.
        transfer_id: random 64-bit number of the reservation.
        generation: 32-bit number; blocks of an older generation are dropped and counted.
        credit_bytes: payload bytes that may be in flight before the receiver grants more.
        lease_s: the reservation is freed if the transfer is not complete, and nothing is heard of the router,
            for this long.
        reserved_bytes: size of the reservation in the arena.
        plan: the request's plan as decode resolved it for this prompt, which prefill follows; None where no
            prompt is shipped.
        retained_transfer_id: the session's last transfer whose rows this worker retains and that need not be
            shipped again; 0 if there is none.
        retained_tokens: how many tokens of the new prompt, from its start, the retained rows belong to.
        retained_depth: how many transfers, up to and including that one, the retained rows came with.
        part_endpoints: of a worker of several ranks that each take the blocks of their own KV heads, those of
            the ranks after the first, which has `endpoint`; empty where that takes all heads. See "Parts" in
            `proto/BLOCKS.md`.
    """

    endpoint: str
    transfer_id: int
    generation: int
    credit_bytes: int
    lease_s: float
    reserved_bytes: int
    plan: ResolvedPlan | None = None
    retained_transfer_id: int = 0
    retained_tokens: int = 0
    retained_depth: int = 0
    part_endpoints: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TurnPrompt:
    """What both workers of a turn are told of its prompt.

    The router's `TurnRequest` is one, too, and hands on every field that a worker's request has by that name.

    Attributes:
        prompt_token_ids: the whole prompt, history included (penalties need it).
        owner: of the API key; owners take turns in each worker's line. Empty, at prefill: the session's.
        session: whose history prefill looks up and stages, and whose KV decode may have retained from its
            last turn and may retain for its next one; None: nothing is stored or retained.
        probe: a readiness probe; changes no counter of requests, tokens or bytes.
    """

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    owner: str = ""
    session: SessionKey | None = None
    probe: bool = False


@dataclass(frozen=True, kw_only=True)
class SharedStart:
    """The start of a request whose prompt another request has brought to the same decode worker.

    Attributes:
        request_id: of that request, which had `num_siblings` and is or was running there.
        first_token: as prefill sampled it for this request (`FirstToken.sibling_tokens`).
    """

    request_id: str
    first_token: SampledToken


@dataclass(frozen=True, kw_only=True)
class GenerateRequest(TurnPrompt):
    """Router to decode: reserve memory, wait for the transfer, then stream tokens.

    Attributes:
        store_history: ship the generated tokens' KV back to prefill at the end.
        num_siblings: how many requests will share this one's prompt, once it has arrived.
        shares: the prompt that another request has brought, which no transfer will bring again; the prompt,
            the plan and `max_tokens` are that request's.
    """

    request_id: str
    model_fingerprint: str
    plan: CompressionPlan
    store_history: bool = False
    num_siblings: int = 0
    shares: SharedStart | None = None


@dataclass(frozen=True, kw_only=True)
class TicketIssued:
    """First event of a Generate stream."""

    ticket: Ticket


@dataclass(frozen=True, kw_only=True)
class TransferAccepted:
    """All blocks are verified; the sequence has joined the running batch.

    Attributes:
        transfer_s: from the manifest's arrival to the last block's verification.
    """

    transfer_s: float


@dataclass(frozen=True, kw_only=True)
class TokenGenerated:
    """A token of a completion: prefill's after the first one, or decode's after those of prefill."""

    token: SampledToken


@dataclass(frozen=True, kw_only=True)
class GenerationFinished:
    """The completion has ended.

    Attributes:
        num_tokens: completion tokens, including the first and a final end-of-sequence token.
        cache_bytes: arena bytes in use by the sequence at its end.
    """

    finish_reason: FinishReason
    num_tokens: int
    cache_bytes: int


@dataclass(frozen=True, kw_only=True)
class HistoryReturned:
    """Prefill has acknowledged the generated tokens' KV. The last event if `store_history` was set.

    Attributes:
        num_tokens: tokens whose KV was returned: all but the last, which has no KV yet. 0 if the return
            failed; the session's next request then runs these tokens again.
    """

    num_tokens: int


GenerateEvent = TicketIssued | TransferAccepted | TokenGenerated | GenerationFinished | HistoryReturned


@dataclass(frozen=True, kw_only=True)
class EventOfCall:
    """An event of one call of Generate, by the id that the call was sealed with."""

    call_id: str
    event: GenerateEvent


@dataclass(frozen=True, kw_only=True)
class EventsOfCalls:
    """What calls of Generate would have sent since the message before. Part of the protocol over gRPC alone.

    Attributes:
        events: each call's in order.
        ended: calls that send nothing more.
    """

    events: tuple[EventOfCall, ...] = ()
    ended: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PrefillPrompt(TurnPrompt):
    """What prefill alone is told of a turn's prompt.

    Attributes:
        document: whose history a new session may start from; of the same owner.
        retained_bins: how many equal stretches of the prompt to report the retained fraction of; 0 for none,
            at most 512.
        has_history: the session has had requests before, so missing history counts as a miss.
        max_reused_tokens: use stored KV of at most so many of the prompt's first tokens; None: of all. Which
            rows some methods select depends on this number, so a turn that resumes keeps to its first one.
        priority: orders the waiting prompts of one owner, the smallest first.
        prompt_logprobs: report the prompt's own tokens with this many alternatives each, at most 20; every
            token is then run, so there is no session. None reports none.
        retained_as: of an implicit session, the session of the `GenerateRequest`, under which decode retains
            the rows; None where it retains none.
        siblings: of completions of the same prompt whose first tokens are sampled, too.
        question: where the prompt has it; None if the router does not know.
    """

    document: SessionKey | None = None
    retained_bins: int = 0
    has_history: bool = False
    max_reused_tokens: int | None = None
    priority: int = 0
    prompt_logprobs: int | None = None
    retained_as: SessionKey | None = None
    siblings: tuple[SamplingParams, ...] = ()
    question: Question | None = None


@dataclass(frozen=True, kw_only=True)
class PrefillRequest(PrefillPrompt):
    """Router to prefill: run the prompt, compress its KV, ship it and return the first token."""

    request_id: str
    model_fingerprint: str
    ticket: Ticket


@dataclass(frozen=True, kw_only=True)
class RedirectRequest:
    """Router to prefill: the decode worker of a running request failed; ship everything to another's ticket.

    Attributes:
        request_id: of the running `PrefillRequest`.
    """

    request_id: str
    ticket: Ticket


@dataclass(frozen=True, kw_only=True)
class FirstToken:
    """First event of a Prefill stream: the token sampled from the logits of the full prompt. Those of a draft
    follow (`TokenGenerated`); decode goes on from the last.

    Attributes:
        method: the method in effect ("full" if the budget covers the prompt).
        reused_tokens: prompt tokens whose KV came from history.
        reuse_source: whose history that was.
        full_bytes: size of the whole prompt's KV without compression (`ModelSpec.full_bytes`).
        queue_s: time spent waiting for the engine.
        history_source: how prefill got the session's KV; None if there was none.
        history_tier: the slowest tier that KV was loaded from; "" if none was.
        prompt_logprobs: the prompt's tokens from the second on, if the request asked for them; `index` is
            the position.
        sibling_tokens: the first tokens of the request's `siblings`, in their order.
        epsilon_table: another model's distortion table that was used, as of `stand_in`; "" if none was.
    """

    token: SampledToken
    method: str
    reused_tokens: int
    full_bytes: int
    queue_s: float
    reuse_source: ReuseSource = "session"
    history_source: HistorySource | None = None
    history_tier: str = ""
    prompt_logprobs: tuple[SampledToken, ...] = ()
    sibling_tokens: tuple[SampledToken, ...] = ()
    epsilon_table: str = ""


@dataclass(frozen=True, kw_only=True)
class TransferDone:
    """Last event of a Prefill stream: decode has acknowledged every block.

    Attributes:
        bytes_by_kind: payload bytes on the wire: codes, scales, rows, index, state, manifest.
        transfer_s: from sending the first block to the last acknowledgement.
        delta_bytes: bytes of the rows shipped, if only those were that decode does not retain; None if all
            were.
        prefill_s: the forward pass, including a draft and compression.
        compress_s: compression alone.
        retained_fractions: of each of the request's `retained_bins` stretches of the prompt, the fraction of
            rows retained over the KV heads, for each layer with rows in turn; empty if none were requested.
    """

    bytes_by_kind: dict[str, int]
    transfer_s: float
    delta_bytes: int | None = None
    prefill_s: float = 0.0
    compress_s: float = 0.0
    retained_fractions: tuple[float, ...] = ()


PrefillEvent = TokenGenerated | FirstToken | TransferDone


@dataclass(frozen=True, kw_only=True)
class CommitTurnRequest:
    """Router to prefill at a turn's end: publish the staged history as the session's record, atomically.

    Attributes:
        token_ids: prompt and completion. KV exists for the prompt and for what decode returned.
        pin: whether the record is to stay in memory longer than the owner's others.
    """

    request_id: str
    session: SessionKey
    token_ids: tuple[int, ...]
    pin: bool = False


@dataclass(frozen=True, kw_only=True)
class PrefixRequest:
    """Router to prefill: how much of a prompt the owner's records in memory have.

    Attributes:
        block_hashes: of the prompt, see `shared.history.records.block_hashes`.
    """

    owner: str
    block_hashes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class HistoryInfo:
    """What is stored of a session.

    Attributes:
        num_tokens: tokens with KV.
        tier: where it is stored: "memory", "disk", "redis", "retained" (a decode worker's arena), or "none".
    """

    num_tokens: int
    size_bytes: int
    tier: str = "memory"


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """A worker's identity and load, polled by the router for placement and readiness.

    Attributes:
        instance_id: random, new at every start; a change means that the worker restarted.
        ready: the engine has recently done work or passed its own probe, and the worker takes new turns.
        draining: the worker is to end: it takes no new turns, and those that run may still end.
        running, waiting: numbers of requests.
        free_bytes, total_bytes: of decode's arena (retained KV counts as free) or prefill's history store.
        kernel_paths: the implementation in use of each kernel, by the kernel's name.
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
    methods: tuple[str, ...] = ()
    kernel_paths: dict[str, str] = field(default_factory=dict)
    draining: bool = False


calling_router: ContextVar[str] = ContextVar("calling_router", default="")
"""The name of the router whose call a worker answers; empty where it gave none."""
