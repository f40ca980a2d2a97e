"""The fixtures of `kvtest.router` and `kvtest.session_routers`."""

from __future__ import annotations

from kvtest.router import _quiet_logs as _quiet_logs
from kvtest.router import base_url as base_url
from kvtest.router import stack as stack
from kvtest.router import start_stack as start_stack
from kvtest.router import tokenizer as tokenizer
from kvtest.session_routers import router as router
