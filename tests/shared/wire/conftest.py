"""The fixtures of `kvtest.wire`."""

from __future__ import annotations

from kvtest.wire import sink as sink
from kvtest.wire import wire as wire
