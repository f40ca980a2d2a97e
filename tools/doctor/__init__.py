"""`kvferry doctor`: whether a machine can run the workers, and what to change."""
