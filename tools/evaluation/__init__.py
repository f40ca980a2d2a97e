"""`kvferry eval`: what compression costs in accuracy, measured on recall tasks.

    config.py ──► experiment.py ──► command.py ──► jobs.py ──► runner.py   one example, many plans
                                       │               │ settings.py       what a selection sees
                                       │               │ compressor.py     meets budgets in retained bytes
                                       │               │ scoring.py        greedy and forced answers
                                       │               records.py          JSONL; a later run resumes from it
                                       └──► summary.py ──► table.py, plots.py
                                       └──► recommendation.py   the cheapest for a stated loss

    data.py         --data: own questions, public_formats.py: RULER, LongBench, SCBench; answer_scores.py
    calibrate.py    `kvferry calibrate`: distortion tables and quality curves, on prompts of samples.py

It measures methods at budgets, in several settings, lengths and depths; a training checkpoint's accuracy
(`--methods full`); and what distance alone costs (`--gap`).

Runs the one-process generator of `kvferry.tools.oracle`, which the served path equals token for token; the
tasks are `kvferry.tools.recall`'s. Talks to no service.
"""
