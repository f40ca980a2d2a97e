"""What tests share: servers, models and clients, as an importable package."""
