"""All Prometheus metrics, one class per role. A metric belongs to one role, so sums over services are right.

A service creates its own instance with its own registry and serves it at `/metrics`. Names have the prefix
`kvferry_`. Histograms are in seconds, with buckets from 1 ms (0.5 ms for steps).
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

LATENCY_BUCKETS_S = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75,
    1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0,
)  # fmt: skip
STEP_BUCKETS_S = (
    0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075,
    0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0,
)  # fmt: skip
RATIO_BUCKETS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0, 128.0)

CERTIFICATE_EXPIRY = "kvferry_certificate_expiry_timestamp_seconds"


class _Families:
    """Short constructors for metrics of one registry, without the client library's own collectors."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def _counter(self, name: str, doc: str, *labels: str) -> Counter:
        return Counter(f"kvferry_{name}", doc, labels, registry=self.registry)

    def _block_connections(self) -> Counter:
        return self._counter(
            "block_connections", "Connections over which blocks are sent, by transport", "transport"
        )

    def _gauge(self, name: str, doc: str, *labels: str) -> Gauge:
        return Gauge(f"kvferry_{name}", doc, labels, registry=self.registry)

    def _latency(self, name: str, doc: str, *labels: str) -> Histogram:
        return Histogram(f"kvferry_{name}", doc, labels, registry=self.registry, buckets=LATENCY_BUCKETS_S)

    def _steps(self, name: str, doc: str, *labels: str) -> Histogram:
        return Histogram(f"kvferry_{name}", doc, labels, registry=self.registry, buckets=STEP_BUCKETS_S)


def certificate_expiry(registry: CollectorRegistry, expires_at_s: float) -> None:
    """Have a service with a certificate report its expiry. The service reads its files at start."""
    gauge = Gauge(CERTIFICATE_EXPIRY, "Unix time at which the service's certificate ends", registry=registry)
    gauge.set(expires_at_s)


class RouterMetrics(_Families):
    """Latency, outcomes and tokens of clients' requests."""

    def __init__(self) -> None:
        super().__init__()
        by = ("model", "method")
        self.time_to_first_token = self._latency("time_to_first_token_seconds", "Arrival to first token", *by)
        self.inter_token_latency = self._steps("inter_token_latency_seconds", "Between two tokens", *by)
        self.e2e_request_latency = self._latency("e2e_request_latency_seconds", "Arrival to last token", *by)
        self.requests_running = self._gauge("requests_running", "Admitted requests", "model")
        self.requests_waiting = self._gauge(
            "requests_waiting", "Requests waiting for a session or a worker", "model"
        )
        self.request_success = self._counter("request_success", "Completions", "model", "finish_reason")
        self.request_failure = self._counter("request_failure", "Failed requests", "category")
        self.access_denied = self._counter(
            "access_denied",
            "Requests refused for their key, by the key's name in the key file",
            "reason",
            "key",
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of served requests", "model")
        self.session_store_events = self._counter(
            "session_store_events",
            "Sessions that Redis could not serve normally, by result",
            "event",
        )
        self.prompt_tokens_reused = self._counter(
            "prompt_tokens_reused", "Prompt tokens whose KV was not computed again", "model", "source"
        )
        self.generation_tokens = self._counter("generation_tokens", "Tokens delivered", "model", "method")
        self.recoveries = self._counter("recoveries", "Requests resumed after losing a worker", "role")
        self.ready = self._gauge("ready", "1 while /ready answers 200, else 0")


class PrefillMetrics(_Families):
    """Prompts, compressed and shipped bytes, stored history."""

    def __init__(self) -> None:
        super().__init__()
        by = ("model", "method")
        self.warm_up = self._gauge("prefill_warm_up_ratio", "The part of the warm-up that is done")
        self.prefill = self._latency("prefill_seconds", "One prompt's pass, including compression", *by)
        self.compress = self._latency("compress_seconds", "One prompt's compression", *by)
        self.pack = self._latency("pack_seconds", "One prompt's serialization into blocks", *by)
        self.transfer = self._latency(
            "transfer_seconds", "From the first block sent to the acknowledgement", *by
        )
        self.queue = self._latency("queue_seconds", "Waiting for the engine", "stage")
        self.history_load = self._latency("history_load_seconds", "Loading a turn's history", "model")
        self.history_store = self._latency("history_store_seconds", "Staging and committing history", "model")
        self.kv_full_bytes = self._counter(
            "kv_full_bytes", "Full KV of the shipped prompts, in the checkpoint's dtype", *by
        )
        self.kv_transfer_bytes = self._counter("kv_transfer_bytes", "Payload bytes shipped", *by, "kind")
        self.kv_delta_saved_bytes = self._counter(
            "kv_delta_saved_bytes", "Bytes of rows not shipped because decode retained them", *by
        )
        self.kv_resent_bytes = self._counter(
            "kv_resent_bytes", "Tensor bytes sent again after a lost connection", *by
        )
        self.kv_compression_ratio = Histogram(
            "kvferry_kv_compression_ratio", "Full bytes / shipped bytes", by, registry=self.registry,
            buckets=RATIO_BUCKETS,
        )  # fmt: skip
        self.prefill_tokens = self._counter("prefill_tokens", "Prompt tokens processed by the model", "model")
        self.block_connections = self._block_connections()
        self.transfer_failed = self._counter("transfer_failed", "Transfers that failed", "reason")
        self.history_bytes = self._gauge("history_bytes", "Stored history", "tier")
        self.history_reused_tokens = self._counter(
            "history_reused_tokens", "Prompt tokens whose KV came from history", "tier"
        )
        self.history_waiting = self._gauge(
            "history_waiting", "Committed turns that are not written to the tier yet", "tier"
        )
        self.history_store_failed = self._counter(
            "history_store_failed", "Commits that disk or Redis refused or missed", "reason"
        )
        self.history_choices = self._counter(
            "history_choices",
            "Turns with history: how they got it, and whether in the standing order or after a miss",
            "way",
            "reason",
        )
        self.history_miss = self._counter("history_miss", "Requested history that was not found", "reason")


class DecodeMetrics(_Families):
    """The arena, the running batch, reservations."""

    def __init__(self) -> None:
        super().__init__()
        self.warm_up = self._gauge("decode_warm_up_ratio", "The part of the warm-up that is done")
        self.decode_step = self._steps("decode_step_seconds", "One step of the running batch", "model")
        self.decode_steps = self._counter(
            "decode_steps", "Steps by path, and why they did not use a CUDA graph", "path", "reason"
        )
        self.captures = self._counter(
            "decode_captures", "Steps captured as a CUDA graph, by when: in the warm-up or under load", "when"
        )
        self.shadow_checks = self._counter(
            "decode_shadow_checks", "Steps that were repeated on the torch path, by what was found", "result"
        )
        self.admit = self._latency(
            "admission_seconds", "From the last block's verification to the first step", "model"
        )
        self.batch_size = self._gauge("decode_batch_size", "Sequences in the running batch", "model")
        self.decode_tokens = self._counter("decode_tokens", "Tokens generated by steps", "model", "method")
        self.preempted = self._counter(
            "decode_preempted", "Sequences swapped to the host because arena memory ran out", "model"
        )
        self.waiting = self._gauge("decode_waiting", "Requests that wait for arena memory")
        self.arena_bytes = self._gauge("arena_bytes", "Arena bytes by state; their sum is constant", "state")
        self.admission_rejected = self._counter("admission_rejected", "Reservations refused", "reason")
        self.receive_failed = self._counter(
            "receive_failed", "Incoming transfers that were refused or failed", "reason"
        )
        self.block_connections = self._block_connections()
        self.late_blocks = self._counter("late_blocks", "Blocks without a current reservation, dropped")
        self.leases_expired = self._counter("leases_expired", "Reservations whose lease ran out")
        self.history_returned_bytes = self._counter(
            "history_returned_bytes", "Payload bytes of generated KV returned to prefill", "model"
        )
