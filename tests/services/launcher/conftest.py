"""The fixtures of `kvtest.launcher`."""

from __future__ import annotations

from kvtest.launcher import serve_afresh as serve_afresh
