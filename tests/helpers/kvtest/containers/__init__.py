"""A Docker engine, stand-in base images and the compose stack."""
