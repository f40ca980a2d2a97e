"""Programs beside the services: the chat, evaluation and calibration, the demo model's training."""
