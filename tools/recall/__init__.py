"""The demo model: word lists, document generator, recall tasks and training.

`kvferry train-demo` (`train.py`) makes the model; `tasks.py` is what `kvferry eval` asks.
"""
