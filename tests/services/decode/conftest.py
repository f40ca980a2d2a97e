"""The fixtures of `kvtest.decode`, `kvtest.clock`, `kvtest.parallel` and `kvtest.steps`."""

from __future__ import annotations

from kvtest.clock import no_engine_is_wedged as no_engine_is_wedged
from kvtest.decode import begin as begin
from kvtest.decode import harness as harness
from kvtest.decode import request_of as request_of
from kvtest.decode import small_model as small_model
from kvtest.decode import ticket_of as ticket_of
from kvtest.parallel import one as one
from kvtest.parallel import several as several
from kvtest.steps import interpreter as interpreter
from kvtest.steps import runs_ahead as runs_ahead
