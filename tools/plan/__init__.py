"""`kvferry plan`: predicts memory, bytes, times and workers for a load, and says when not to disaggregate."""
