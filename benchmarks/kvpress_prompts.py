"""The prompts of a finished `kvferry eval --data FOLDER` as tokens, for `kvpress_peer.py`.

    python benchmarks/kvpress_prompts.py RECORDS.jsonl --model FOLDER [--data benchmarks/real] --output FILE

A JSON line for each question that the full cache was measured on: its last prompt's token ids, how many of
them are the document's, the full cache's greedy answer, and what an answer's text is scored against.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.tools.evaluation.collection import read_collection
from kvferry.tools.evaluation.conversation import tokenize
from kvferry.tools.evaluation.experiment import FULL, example_digest
from kvferry.tools.evaluation.public_formats import DatasetExample
from kvferry.tools.evaluation.records import Key, Record, read_record

REAL = Path(__file__).parent / "real"


def read_records(paths: Sequence[Path]) -> dict[Key, Record]:
    """Return the records of files that `kvferry eval` wrote."""
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    return {record.key: record for record in (read_record(json.loads(line)) for line in lines)}


def full_records(records: Mapping[Key, Record]) -> dict[str, Record]:
    """Return the full cache's record of each example, by the example's digest, as served where there is one.

    Raises: SystemExit: there is none, or they are of several models.
    """
    full = [record for record in records.values() if record.key.method == FULL and record.turns]
    if len({record.key.fingerprint for record in full}) != 1:
        raise SystemExit(f"the records must have the method {FULL}, of one model in one dtype")
    full.sort(key=lambda record: record.key.setting == "aware")
    return {record.key.example: record for record in full}


def prompt_of(record: Record, example: DatasetExample, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """Return a line. Args: record: the full cache's on this example."""
    if example_digest(example) != record.key.example:
        raise SystemExit(f"{record.key.task} {record.key.seed} is of another --data: its text has changed")
    answer = record.turns[-1].tokens
    if not answer:
        raise SystemExit("the records have no tokens of answers; measure them again in another folder")
    conversation = tokenize(example, tokenizer)
    turn = conversation.turns[-1]
    assert turn.reference is not None
    return {
        "fingerprint": record.key.fingerprint,
        "example": record.key.example,
        "task": record.key.task,
        "num_tokens": record.key.num_tokens,
        "prompt": turn.prompt_token_ids,
        "num_document_tokens": conversation.num_document_tokens,
        "answer": answer,
        "eos_token_ids": tokenizer.eos_token_ids,
        "max_new_tokens": turn.max_new_tokens or record.key.max_new_tokens,
        "reference": asdict(turn.reference),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", type=Path, help="records.jsonl of kvferry eval")
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, default=REAL, help="the folder of documents that it asked about")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    tokenizer = ChatTokenizer.load(options.model)
    records = full_records(read_records([options.records])).values()
    examples = read_collection(
        options.data,
        lengths=sorted({record.key.num_tokens for record in records}),
        count_tokens=lambda text: len(tokenizer.encode(text)),
    )
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w", encoding="utf-8") as file:
        for record in tqdm(records, disable=None, unit="prompt"):
            example = examples[record.key.task, record.key.num_tokens][record.key.seed]
            line = prompt_of(record, example, tokenizer)
            file.write(json.dumps(line, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
