"""`kvferry eval`: what compression costs in accuracy, measured on recall tasks.

    config.py ──► experiment.py ──► command.py ──► jobs.py ──► runner.py   one example, many plans
                                       │               records.py          JSONL; a run goes on from it
                                       └──► summary.py ──► table.py, plots.py

Runs the one-process generator of `kvferry.shared.oracle`, which the served path equals token for token; the
tasks are `kvferry.models.recall`'s. Talks to no service.
"""
