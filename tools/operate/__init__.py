"""`kvferry sessions`, `documents` and `keys`: what a server stores, and who may use it."""
