"""Faults that `benchmarks/planted_faults.py` plants in the product's source, one at a time: small mistakes
that a programmer could make and that matter to a user. The tests must catch them.

The faults of `chaos/planted.py` are put into running processes; these are put into files of a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class PlantedFault:
    """One replacement in one file.

    Attributes:
        what: what is wrong with it.
        path: a file of the product, from the repository's root.
        old: a text that stands in it exactly once; `new` takes its place.
        near: tests that mirror the file, which are run first.
        known: whether it is of a kind that must be caught.
    """

    name: str
    what: str
    path: str
    old: str
    new: str
    near: tuple[str, ...]
    known: bool = False


def plant(repository: Path, fault: PlantedFault) -> None:
    """Replace the fault's text in a copy of the repository.

    Raises: ValueError: the text does not stand there exactly once.
    """
    path = repository / fault.path
    text = path.read_text(encoding="utf-8")
    if (count := text.count(fault.old)) != 1:
        raise ValueError(
            f"the text that planted fault {fault.name!r} replaces stands {count} times in {fault.path}; it "
            "must stand there exactly once"
        )
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")


_KNOWN = (
    PlantedFault(
        name="wrong-generation",
        what="Decode accepts a transfer for a reservation whose generation is another one.",
        path="services/decode/sequence.py",
        old="        if sequence is None or sequence.key != key:",
        new="        if sequence is None:",
        near=("tests/services/decode/test_refused_transfers.py", "tests/services/decode/test_lifecycle.py"),
        known=True,
    ),
    PlantedFault(
        name="skipped-checksum",
        what="The checksum of a block is not compared.",
        path="shared/wire/frames.py",
        old="    if digest.intdigest() != checksum:",
        new="    if digest.intdigest() != checksum and type_code != MessageType.BLOCK:",
        near=("tests/shared/wire/test_frames.py", "tests/shared/wire/test_failures.py"),
        known=True,
    ),
    PlantedFault(
        name="dropped-token",
        what="The router loses every thirty-second token of an answer.",
        path="services/router/turn/turn.py",
        old="""\
                                if not self._was_cut and event.index >= len(self.stats.token_ids):
                                    self.stats.token_ids.append(event.token_id)
                                    yield event
""",
        new="""\
                                if not self._was_cut and event.index >= len(self.stats.token_ids):
                                    self.stats.token_ids.append(event.token_id)
                                    if event.index % 32 != 31:
                                        yield event
""",
        near=("tests/services/router/test_turn.py", "tests/services/router/test_streams.py"),
        known=True,
    ),
    PlantedFault(
        name="leak",
        what="Decode does not free the arena bytes of every sixth sequence.",
        path="services/decode/memory.py",
        old="""\
            self._arena.free(allocation)
            self._freed.add(allocation.size_bytes)
""",
        new="""\
            if allocation.generation % 6:
                self._arena.free(allocation)
            self._freed.add(allocation.size_bytes)
""",
        near=("tests/services/decode/test_scheduler.py", "tests/services/decode/test_memory.py"),
        known=True,
    ),
    PlantedFault(
        name="wrong-page",
        what="Hybrid sparse attention in torch gives each page the score of the page before it.",
        path="kernels/hsa/torch_path.py",
        old="    scores = weights.sum(1)\n",
        new="    scores = weights.sum(1).roll(1, 1)\n",
        near=("tests/kernels/hsa", "tests/kernels/native/test_sparse.py"),
        known=True,
    ),
    PlantedFault(
        name="nan-neighbour",
        what="Dense attention in torch gives rows behind a sequence's last one a weight of zero: NaN passes.",
        path="kernels/dense_decode/batch.py",
        old="        return attend_rows(token.queries, *rows.append(token), scaling=token.scaling)",
        new="""\
        keys, values = rows.append(token)
        unused = rows.values[:, token.position + 1 :].sum(1, keepdim=True)
        return attend_rows(token.queries, keys, values, scaling=token.scaling) + 0.0 * unused""",
        near=(
            "tests/kernels/dense_decode",
            "tests/kernels/native/test_library.py",
            "tests/kernels/test_isolation.py",
        ),
        known=True,
    ),
    PlantedFault(
        name="unequal-oracle",
        what="Decode runs every token one position too far, unlike the one-process generator.",
        path="services/decode/sequence.py",
        old="        return self.resolved.num_prompt_tokens + self.num_tokens - 1",
        new="        return self.resolved.num_prompt_tokens + self.num_tokens",
        near=("tests/services/decode/test_demo_model.py", "tests/services/decode/test_service.py"),
        known=True,
    ),
    PlantedFault(
        name="over-budget",
        what="The rows of a layer are rounded up to a multiple of eight, beyond the budget.",
        path="shared/compression/resolve.py",
        old="""\
    read_params("uniform", params, {})
    return [rows] * num_layers
""",
        new="""\
    read_params("uniform", params, {})
    return [min(-(-rows // 8) * 8, num_tokens)] * num_layers
""",
        near=(
            "tests/shared/compression/test_resolve.py",
            "tests/shared/compression/test_layer_allocation.py",
        ),
        known=True,
    ),
    PlantedFault(
        name="foreign-key",
        what="A session is found by its id alone, so that any API key can read it.",
        path="services/router/sessions/store.py",
        old="""\
        entry = self._entries.get(key)
        return None if entry is None or self._is_expired(entry) else entry.record
""",
        new="""\
        found = (entry for other, entry in self._entries.items() if other.session_id == key.session_id)
        entry = next(found, None)
        return None if entry is None or self._is_expired(entry) else entry.record
""",
        near=("tests/services/router/test_session_store.py", "tests/services/router/test_session_turns.py"),
        known=True,
    ),
)

_OTHERS = (
    PlantedFault(
        name="endless-lease",
        what="A reservation whose transfer has begun and then stalls never expires.",
        path="services/decode/sequence.py",
        old="""\
                if now_s < sequence.lease_until_s or sequence.state not in _ARRIVING:
                    continue
""",
        new="""\
                if now_s < sequence.lease_until_s or sequence.state is not SequenceState.RESERVED:
                    continue
""",
        near=("tests/services/decode/test_lifecycle.py", "tests/services/decode/test_failure_matrix.py"),
    ),
    PlantedFault(
        name="late-renewal",
        what="A session's lease in Redis is renewed when it has long ended.",
        path="services/router/sessions/redis_store.py",
        old="            await asyncio.sleep(self._lease_s / 3)",
        new="            await asyncio.sleep(self._lease_s * 3)",
        near=("tests/services/router/test_redis_sessions.py",),
    ),
    PlantedFault(
        name="newest-evicted",
        what="History in memory evicts the session that was used last.",
        path="shared/history/records.py",
        old="        idle = [session for session in self._sessions if session not in self.busy]",
        new="        idle = [session for session in reversed(self._sessions) if session not in self.busy]",
        near=("tests/shared/history/test_store.py", "tests/shared/history/test_store_accounting.py"),
    ),
    PlantedFault(
        name="long-prefix",
        what="The common prefix of two token sequences is one token too long.",
        path="shared/history/records.py",
        old="            high = middle\n    return low\n",
        new="            high = middle\n    return low + 1\n",
        near=("tests/shared/history/test_store.py", "tests/shared/history/test_prefix_sharing.py"),
    ),
    PlantedFault(
        name="stale-row",
        what="A delta takes the retained row of the first token that differs.",
        path="shared/cache/delta.py",
        old="            heads, numbers = np.nonzero(kept < retained.num_tokens)",
        new="            heads, numbers = np.nonzero(kept <= retained.num_tokens)",
        near=("tests/shared/cache/test_delta.py", "tests/services/decode/test_delta_writer.py"),
    ),
    PlantedFault(
        name="truncated-codes",
        what="Quantised codes are cut off instead of rounded.",
        path="kernels/quantise.py",
        old="    codes = steps.round_()",
        new="    codes = steps.floor_()",
        near=("tests/kernels/quantise",),
    ),
    PlantedFault(
        name="heavy-merge",
        what="D2O's weights of a row that decode merges are not normalised.",
        path="shared/compression/d2o/eviction.py",
        old="            merged = (math.e * target.float() + weight * row.float()) / (math.e + weight)",
        new="            merged = (math.e * target.float() + weight * row.float()) / math.e",
        near=("tests/shared/compression/d2o",),
    ),
    PlantedFault(
        name="leverage-sign",
        what="Compactor's leverage makes a token's score lower.",
        path="shared/compression/scorers.py",
        old="            blend += self.leverage_weight",
        new="            blend -= self.leverage_weight",
        near=("tests/shared/compression/test_compactor.py",),
    ),
    PlantedFault(
        name="narrow-channels",
        what="RDKV divides the bits of K channels by all tokens instead of the retained ones.",
        path="shared/compression/rdkv/allocation.py",
        old="    key_budgets = (share * KEY_GROUP_TOKENS // kept.clamp(min=1))",
        new="    key_budgets = (share * KEY_GROUP_TOKENS // torch.full_like(kept, num_tokens))",
        near=("tests/shared/compression/rdkv",),
    ),
    PlantedFault(
        name="stale-page",
        what="The first row of a page is folded into what the memory had before.",
        path="kernels/hsa/__init__.py",
        old="    if position % page_size == 0:",
        new="    if position == 0:",
        near=("tests/kernels/hsa", "tests/baselines/test_quest.py"),
    ),
    PlantedFault(
        name="shown-stop",
        what="Text that may begin a stop string is delivered at once.",
        path="shared/model/text.py",
        old="        keep = max((_overlap(self._undelivered, s) for s in self._stop), default=0)",
        new="        keep = 0",
        near=("tests/shared/model/test_text.py",),
    ),
    PlantedFault(
        name="usage-of-one-choice",
        what="The usage of an answer with several choices has the tokens of the first one alone.",
        path="services/router/completion/completion.py",
        old="        return sum(len(choice.turn.stats.token_ids) for choice in self.choices)",
        new="        return sum(len(choice.turn.stats.token_ids) for choice in self.choices[:1])",
        near=("tests/services/router/test_completions.py",),
    ),
    PlantedFault(
        name="error-with-200",
        what="A stream that fails before its first token is answered with status 200.",
        path="services/router/api/completions.py",
        old="""\
            event = await self._next_event(timer)
            if isinstance(event, KvferryError):
                raise self._told(event)
""",
        new="""\
            event = await self._next_event(timer)
""",
        near=("tests/services/router/test_streams.py",),
    ),
    PlantedFault(
        name="no-retry-after",
        what="An answer with status 503 has no Retry-After.",
        path="services/router/http/errors.py",
        old="    if error.http_status in (409, 429, 503):",
        new="    if error.http_status in (409, 429):",
        near=("tests/services/router/test_operations.py", "tests/services/router/test_error_codes.py"),
    ),
    PlantedFault(
        name="own-rate-limit",
        what="Each router counts the limits of a key by itself.",
        path="services/router/app.py",
        old="    limits = KeyLimits(key_file, redis_url=config.history_redis)",
        new='    limits = KeyLimits(key_file, redis_url="")',
        near=("tests/services/router/test_access.py",),
    ),
    PlantedFault(
        name="unchecked-history",
        what="The checksum of rows that are read from disk or Redis is not compared.",
        path="shared/history/stored_format.py",
        old="    if _CHECKSUM.unpack_from(value, _CHUNK.size)[0] != _checksum(header, payload):",
        new="    if not _CHECKSUM.unpack_from(value, _CHUNK.size)[0]:",
        near=("tests/shared/history/test_disk.py",),
    ),
    PlantedFault(
        name="silent-abort",
        what="Prefill is not told to drop what a turn has staged whose client has left.",
        path="services/router/turn/turn.py",
        old="""\
            except (asyncio.CancelledError, GeneratorExit):
                self._discard(attempt)
                raise
""",
        new="""\
            except (asyncio.CancelledError, GeneratorExit):
                raise
""",
        near=("tests/services/router/test_turn.py", "tests/services/router/test_session_turns.py"),
    ),
    PlantedFault(
        name="ignored-cancellation",
        what="Decode runs an answer to its end though nobody reads it any more.",
        path="services/decode/engine.py",
        old="if each.cancelled or each.cut_off]",
        new="if each.cut_off]",
        near=("tests/services/decode/test_lifecycle.py", "tests/services/decode/test_completion.py"),
    ),
    PlantedFault(
        name="no-deadline",
        what="Decode is not told the request's deadline.",
        path="services/router/turn/attempt.py",
        old="        return self.decode.client.generate(request, timeout_s=self._remaining_s())",
        new="        return self.decode.client.generate(request, timeout_s=3600.0)",
        near=("tests/services/router/test_turn.py", "tests/services/router/test_streams.py"),
    ),
    PlantedFault(
        name="any-certificate",
        what="A worker answers control calls of any role that has a certificate.",
        path="shared/control/server.py",
        old="caller.encode() not in context.auth_context()",
        new="not context.auth_context()",
        near=("tests/shared/test_certs.py", "tests/shared/control"),
    ),
    PlantedFault(
        name="logged-secret",
        what="A secret in a logged dictionary is hidden only if its name is in lower case.",
        path="shared/process/logging.py",
        old="if str(k).lower() in _SECRET_KEYS",
        new="if k in _SECRET_KEYS",
        near=("tests/shared/test_logging.py",),
    ),
    PlantedFault(
        name="silent-metric",
        what="The metric of turns that went on after a lost worker stays zero.",
        path="services/router/turn/turn.py",
        old="            self._runner.metrics.recoveries.labels(role=role).inc()",
        new="            self._runner.metrics.recoveries.labels(role=role)",
        near=("tests/services/router/test_recovery.py", "tests/services/router/test_turn.py"),
    ),
    PlantedFault(
        name="wrong-call",
        what="The last piece of a tool call's arguments is streamed as part of the next call.",
        path="services/router/completion/choice.py",
        old="            index=len(self.calls) - 1,",
        new="            index=self._num_whole_calls,",
        near=("tests/services/router/test_completions.py", "tests/e2e/test_tools.py"),
    ),
    PlantedFault(
        name="no-fence",
        what="The first turn of a session replaces the record that another worker has written to Redis.",
        path="shared/history/redis_history.py",
        old="if fence ~= ARGV[1] then return 0 end",
        new="if ARGV[1] ~= '' and fence ~= ARGV[1] then return 0 end",
        near=("tests/shared/history/test_tiered.py", "tests/shared/history/test_redis_faults.py"),
    ),
    PlantedFault(
        name="quota-not-returned",
        what="What a deleted session took in Redis stays counted.",
        path="shared/history/redis_quota.py",
        old="    redis.call('HINCRBY', KEYS[1], '', -size)\n",
        new="",
        near=("tests/shared/history/test_tiered.py", "tests/shared/history/test_redis_client.py"),
    ),
    PlantedFault(
        name="ignored-seed",
        what="The seed of a request does not change what is drawn.",
        path="shared/sampling/sampler.py",
        old="_uniform(self.params.seed, at + i)",
        new="_uniform(0, at + i)",
        near=("tests/shared/sampling/test_sampler.py",),
    ),
    PlantedFault(
        name="short-nucleus",
        what="top_p leaves out the token with which the probabilities reach it.",
        path="shared/sampling/truncation.py",
        old="    inside = (reached - ordered < top_p * total)",
        new="    inside = (reached < top_p * total)",
        near=("tests/shared/sampling",),
    ),
    PlantedFault(
        name="head-mapping",
        what="In decode, query head h reads KV head h % H_kv instead of h // G.",
        path="shared/model/bridge.py",
        old="        queries = query[:, :, 0].view(query.shape[0], num_kv_heads, -1, query.shape[3])",
        new="""\
        queries = query[:, :, 0].view(query.shape[0], -1, num_kv_heads, query.shape[3]).transpose(1, 2)""",
        near=("tests/shared/model/test_bridge.py",),
    ),
    PlantedFault(
        name="wide-window",
        what="In decode, a layer with a sliding window attends to one row too many.",
        path="kernels/decode_batch.py",
        old="            return max(0, length - self.window)",
        new="            return max(0, length - self.window - 1)",
        near=("tests/kernels/dense_decode/test_windows.py", "tests/services/decode/test_windows.py"),
    ),
    PlantedFault(
        name="scaled-rope",
        what="Keys whose positions are undone stay multiplied by the square of the attention factor.",
        path="shared/model/rotary.py",
        old="        cos, sin = cos / norm, sign * sin / norm",
        new="        sin = sign * sin",
        near=("tests/shared/model/test_rotary.py",),
    ),
    PlantedFault(
        name="unfair-queue",
        what="The API key that was granted memory last is served first.",
        path="services/decode/memory.py",
        old="min(self._queues, key=lambda owner: self._last_granted.get(owner, 0))",
        new="max(self._queues, key=lambda owner: self._last_granted.get(owner, 0))",
        near=("tests/services/decode/test_scheduler.py",),
    ),
)

PLANTED_FAULTS: tuple[PlantedFault, ...] = (*_KNOWN, *_OTHERS)
MAX_MISSED = 1
"""Of the faults that are of no known kind; none of the others."""
