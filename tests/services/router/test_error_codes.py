"""What an error's `code` is."""

from __future__ import annotations

import pytest

from kvferry.services.router.http.errors import error_body
from kvferry.shared.errors import InvalidRequest, KvferryError, Overloaded


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KvferryError("no finite maximum", reason="invalid_logits"), "invalid_logits"),
        (KvferryError("a bug"), "internal"),
        (Overloaded("busy", reason="queue_full"), "overloaded"),
        (InvalidRequest("max_tokens is 0", reason="anything"), None),
    ],
)
def test_an_error_of_the_server_has_its_reason_where_it_has_no_code(
    error: KvferryError, code: str | None
) -> None:
    assert error_body(error)["error"]["code"] == code
