"""Delta shipping over the real stack: a turn ships the rows that decode does not hold of the one before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
from kvtest.answers import chat, chat_body

NUM_TURNS = 10


def ask(stack: Any, text: str, session_id: str) -> dict[str, Any]:
    compression = {"method": "rocketkv"}  # plain rows, which deltas need
    return chat(stack.base_url, chat_body(text, session_id, max_tokens=12, kv_compression=compression))


def retained_bytes(stack: Any) -> float:
    return stack.decode_metric("kvferry_arena_bytes", state="retained")


def test_ten_turns_about_a_document_ship_half_the_bytes_and_say_the_same(
    stack: Any, start_stack: Callable[..., Any], make_document: Callable[..., Any]
) -> None:
    document = make_document(31, num_words=3900, num_facts=NUM_TURNS)
    texts = document.turns(NUM_TURNS)
    transferred = stack.prefill_metric("kvferry_kv_transfer_bytes_total")
    saved = stack.prefill_metric("kvferry_kv_delta_saved_bytes_total")
    delta = [ask(stack, text, "e2e-delta") for text in texts]
    delta_bytes = stack.prefill_metric("kvferry_kv_transfer_bytes_total") - transferred
    saved_bytes = stack.prefill_metric("kvferry_kv_delta_saved_bytes_total") - saved
    assert retained_bytes(stack) > 0

    with start_stack("--in-process", "--retain-s", "0") as plain:
        whole = [ask(plain, text, "e2e-delta") for text in texts]
        whole_bytes = plain.prefill_metric("kvferry_kv_transfer_bytes_total")
        assert retained_bytes(plain) == 0
    assert [answer["choices"] for answer in delta] == [answer["choices"] for answer in whole]
    assert delta[0]["usage"]["prompt_tokens"] > 3900
    assert delta_bytes == sum(answer["kv"]["shipped_bytes"] for answer in delta)
    assert delta_bytes <= whole_bytes / 2, (delta_bytes, whole_bytes)
    # what delta does not save of the difference is the manifest's few bytes more
    assert 0.99 < (whole_bytes - delta_bytes) / saved_bytes <= 1
    assert not any("delta_bytes" in answer["kv"] for answer in (delta[0], *whole))
    for answer in delta[1:]:
        assert (
            0 < answer["kv"]["delta_bytes"] < answer["kv"]["shipped_bytes"] < delta[0]["kv"]["shipped_bytes"]
        )

    before = retained_bytes(stack)
    assert httpx.delete(f"{stack.base_url}/v1/sessions/e2e-delta", timeout=60).status_code == 200
    assert retained_bytes(stack) < before
