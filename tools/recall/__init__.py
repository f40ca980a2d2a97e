"""The demo model's own package: word lists, document generator, evaluation tasks, training.

Serving needs none of it. `kvferry train-demo` (`train.py`) makes the model, `tasks.py` feeds evaluation.
"""
