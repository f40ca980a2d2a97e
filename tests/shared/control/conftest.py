"""The fixtures of `kvtest.control`."""

from __future__ import annotations

from kvtest.control import decode as decode
from kvtest.control import decode_client as decode_client
from kvtest.control import prefill as prefill
from kvtest.control import prefill_client as prefill_client
from kvtest.control import server as server
