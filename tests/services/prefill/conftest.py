"""The fixtures of `kvtest.prefill` and `kvtest.clock`."""

from __future__ import annotations

from kvtest.clock import no_engine_is_wedged as no_engine_is_wedged
from kvtest.prefill import demo_model as demo_model
from kvtest.prefill import harness as harness
from kvtest.prefill import prefill_clock as prefill_clock
from kvtest.prefill import prefill_options as prefill_options
