"""A router's process of a test: the `kvferry` command with a fifth of the times that an outage of Redis must
outlast."""

from __future__ import annotations

LEASE_S, SWEEP_INTERVAL_S = 3.0, 1.0


def run() -> None:
    """Run the command of `sys.argv`."""
    from kvferry.services.launcher.cli import main
    from kvferry.services.router import app

    timing = app.Timing(session_lease_s=LEASE_S, sweep_interval_s=SWEEP_INTERVAL_S)
    app.create_app.__kwdefaults__["timing"] = timing
    main()
