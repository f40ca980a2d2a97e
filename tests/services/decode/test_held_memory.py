"""What a sequence holds while it runs is what is counted, packed, evicting or repacked."""

import dataclasses

import pytest
from kvtest.decode import PromptCache


@pytest.mark.parametrize("method", ["rdkv", "adakv", "snapkv-think", "snapkv-kivi"])
async def test_a_packed_sequence_counts_its_packed_bytes_and_its_new_rows(
    harness, request_of, ticket_of, method
):
    made = await harness()
    request = request_of([i % 50 for i in range(100)], method=method, tokens=30, max_tokens=6)
    _, events = await made.run(request)
    layers = PromptCache(made.shipper.model, request).layers
    # all that travels but the packed layers' layout
    packed = [tensor.nbytes for layer in layers for name, tensor in layer.items() if name != "layout"]
    rows = 2 * 2 * 5 * 2 * 8 * 4  # layers, K and V, rows, heads, head_dim, bytes
    assert events[-1].cache_bytes == sum(packed) + rows
    stream, ticket = await ticket_of(made.service, request)
    assert events[-1].cache_bytes <= ticket.reserved_bytes
    await stream.aclose()


@pytest.mark.parametrize("method", ["h2o", "d2o"])
async def test_a_cache_that_evicts_stays_at_its_size_over_a_thousand_tokens(
    harness, request_of, small_model, method
):
    spec = dataclasses.replace(small_model().spec, max_model_len=1200)
    made = await harness(model=small_model(spec), prefill_model=small_model(spec))
    request = request_of([i * 7 % 50 for i in range(100)], method=method, tokens=20, max_tokens=1001)
    held = []

    def look(token_ids):
        caches = made.service._engine._running[0].caches
        held.append([t.shape for c in caches for t in c.regions.values()])
        rows = [c.regions[name][:, :-1] for c in caches for name in ("keys", "values")]
        assert all(tensor.isfinite().all() for tensor in rows)

    made.model.before_step = look
    _, events = await made.run(request, timeout_s=240)
    assert events[-1].num_tokens == 1001
    assert len(held) == 1000
    assert all(shapes == held[0] for shapes in held)
    measured = PromptCache(small_model(spec), request).measured
    rows = [layer.rows for layer in measured.layers]
    assert sum(rows) == 2 * 20
    # per head: K, V, scores, positions of S + 1 rows; D2O's threshold
    row_bytes, beside = 2 * 8 * 4 + 4 + 4, (4 if method == "d2o" else 0)
    assert events[-1].cache_bytes == 2 * sum((s + 1) * row_bytes + beside for s in rows)
    assert await made.arena_is_free()


REBUDGETED = {"method": "rdkv", "tokens": 5, "overrides": {"rebudget_tokens": 32, "window": 5}}


async def test_generated_tokens_that_are_packed_take_less_memory(harness, request_of, ticket_of):
    made = await harness()
    prompt = [i * 7 % 50 for i in range(150)]
    request = request_of(prompt, **REBUDGETED, max_tokens=70)
    rows_alone = request_of(prompt, **REBUDGETED | {"overrides": {"rebudget_tokens": 0}}, max_tokens=70)
    reserved = []
    for wanted in (request, rows_alone):
        stream, ticket = await ticket_of(made.service, wanted)
        reserved.append(ticket.reserved_bytes)
        await stream.aclose()
    _, events = await made.run(request, timeout_s=120)
    _, unpacked = await made.run(rows_alone, timeout_s=120)
    assert events[-1].num_tokens == unpacked[-1].num_tokens == 70
    # 64 of 69 rows are packed, with 5 / 150 of their bits, and scales
    row = 2 * 2 * 2 * 8 * 4  # layers, K and V, heads, head_dim, bytes
    assert unpacked[-1].cache_bytes - events[-1].cache_bytes > 64 * row // 2
    assert reserved[1] > reserved[0]
    assert events[-1].cache_bytes <= reserved[0]
    assert await made.arena_is_free()
