"""The fixtures of `kvtest.prefill`."""

from __future__ import annotations

from kvtest.prefill import demo_model as demo_model
from kvtest.prefill import harness as harness
from kvtest.prefill import prefill_options as prefill_options
