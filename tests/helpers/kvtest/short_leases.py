"""A router's process of a test: the `kvferry` command with a fifth of the times that an outage of Redis must
outlast."""

from __future__ import annotations

LEASE_S, PENDING_LEASE_S, ANNOUNCE_INTERVAL_S, SWEEP_INTERVAL_S = 3.0, 6.0, 1.0, 1.0


def run() -> None:
    """Run the command of `sys.argv`."""
    from kvferry.services.launcher.cli import main
    from kvferry.services.router import app
    from kvferry.services.router.sessions import redis_store

    redis_store._PENDING_LEASE_S = PENDING_LEASE_S
    redis_store._ANNOUNCE_INTERVAL_S = ANNOUNCE_INTERVAL_S
    timing = app.Timing(session_lease_s=LEASE_S, sweep_interval_s=SWEEP_INTERVAL_S)
    app.create_app.__kwdefaults__["timing"] = timing
    main()
