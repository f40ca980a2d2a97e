"""Programs that use the services from outside: evaluation and calibration, the demo model's training."""
