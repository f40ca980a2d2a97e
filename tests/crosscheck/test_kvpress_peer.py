"""`benchmarks/kvpress_peer.py` measures what kvpress does for its users, and what `kvferry eval` measures.

KVPRESS_PYTHON names an interpreter that has `requirements-kvpress.txt` installed (`make kvpress`).
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from kvtest.benchmarks import run_benchmark
from kvtest.collection import write_collection, write_lines
from kvtest.tiny_models import VOCAB_SIZE, make_config, save_model

from kvferry.services.launcher import cli
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.tools.oracle import OneProcessGenerator

ROOT = Path(__file__).parents[2]
INTERPRETER = "KVPRESS_PYTHON"
SCRIPTS = {
    name: ROOT / path
    for name, path in {
        "peer": "benchmarks/kvpress_peer.py",
        "users": "tests/crosscheck/kvpress_answers.py",
    }.items()
}
KNOWN = {
    "snapkv:window_size=8:kernel_size=3": "SnapKVPress(window_size=8, kernel_size=3)",
    "adakv(snapkv:window_size=8):alpha_safeguard=0.3": "AdaKVPress(SnapKVPress(window_size=8), 0.3)",
    "criticaladakv(snapkv:window_size=8)": "CriticalAdaKVPress(SnapKVPress(window_size=8))",
    "pyramidkv:window_size=8:beta=4": "PyramidKVPress(window_size=8, beta=4)",
    "tova": "TOVAPress()",
}
UNKNOWN = {
    "compactor": "CompactorPress()",
    "keydiff": "KeyDiffPress()",
    "pyramidkv:window_size=8:beta=4": "PyramidKVPress(window_size=8, beta=4)",
    "adakv(expected_attention:epsilon=0.01)": "AdaKVPress(ExpectedAttentionPress(epsilon=0.01))",
    "kvzip": "KVzipPress()",
}
NUM_TOKENS, NUM_DOCUMENT, NUM_ANSWER = 180, 150, 9

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not os.environ.get(INTERPRETER), reason=f"{INTERPRETER} names no interpreter with kvpress"
    ),
]


def run(script: str, *arguments: object) -> str:
    """What a script prints in kvpress's environment."""
    environment = {**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [os.environ[INTERPRETER], str(SCRIPTS[script]), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def prompts_of(folder: Path) -> list[dict[str, Any]]:
    """Three questions about two documents, of tokens at random, with the full cache's answers."""
    rng = random.Random(0)
    generator = OneProcessGenerator(load_model(folder, name="tiny", device="cpu", dtype="float32"))
    documents = [[rng.randrange(8, VOCAB_SIZE) for _ in range(NUM_DOCUMENT)] for _ in range(2)]
    found = []
    for number, document in enumerate((documents[0], documents[1], documents[0])):
        prompt = [
            *document,
            *(rng.randrange(8, VOCAB_SIZE) for _ in range(NUM_TOKENS - NUM_DOCUMENT + number)),
        ]
        captured = generator.capture(prompt)
        assert captured.logits is not None
        full = generator.compress(captured, plan=plan_for("full"), max_new_tokens=NUM_ANSWER)
        answer = [int(captured.logits.argmax())]
        while len(answer) < NUM_ANSWER:
            answer.append(int(full.step(answer[-1]).argmax()))
        found.append(
            {
                **{"example": str(number), "prompt": prompt, "num_document_tokens": NUM_DOCUMENT},
                **{"answer": answer, "eos_token_ids": [VOCAB_SIZE], "max_new_tokens": NUM_ANSWER},
            }
        )
    return found


@pytest.mark.parametrize("family", ["llama-8-layers", "qwen2"])
def test_it_finds_what_users_of_kvpress_find(family: str, tmp_path: Path) -> None:
    """The presses' rows are those of passes of their own; masks do what kvpress's patch does."""
    folder, prompts, output = tmp_path / "model", tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    save_model(make_config(family), folder)
    asked = prompts_of(folder)
    write_lines(prompts, asked)
    known, unknown = dict(KNOWN), dict(UNKNOWN)
    if family == "qwen2":  # its configuration has no head_dim, which only the peer mends
        del known["criticaladakv(snapkv:window_size=8)"]
    options = ("--model", folder, "--known", ",".join(known), "--unknown", ",".join(unknown))
    run("peer", prompts, *options, "--ratios", "0,0.6", "--output", output)
    measured = {
        (line["example"], line["setting"], line["press"], line["ratio"]): line
        for line in lines(output.read_text())[1:]
    }
    assert len(measured) == 3 * (1 + 2 * (len(known) + len(unknown)))
    presses = [f"{text}@known" for text in known.values()] + [f"{text}@unknown" for text in unknown.values()]
    users = {
        (line["example"], line["press"]): line for line in lines(run("users", prompts, folder, 0.6, *presses))
    }
    tokenizer = ChatTokenizer.load(folder)
    for question in asked:
        example, number = question["example"], len(question["answer"])
        assert measured[example, "aware", "full", 0.0]["num_same"] == number
        for setting, ending, names in (("aware", "@known", known), ("agnostic", "@unknown", unknown)):
            length = len(question["prompt"]) if setting == "aware" else NUM_DOCUMENT
            for name, text in names.items():
                nothing = measured[example, setting, name, 0.0]
                assert max(nothing["kl"]) < 1e-5, name
                assert nothing["num_same"] == number
                assert nothing["kept_bytes"] == nothing["full_bytes"]
                found, expected = measured[example, setting, name, 0.6], users[example, text + ending]
                assert found["kl"] == pytest.approx(expected["kl"], rel=2e-2, abs=2e-5), name
                assert max(found["kl"]) > 0.01
                assert tokenizer.decode(expected["tokens"]).split() == found["text"].split(), name
                assert found["num_compressed_tokens"] == length
                assert found["kept_bytes"] / found["full_bytes"] == pytest.approx(0.4, abs=0.01), name


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    folder, prompts, output = tmp_path / "model", tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    save_model(make_config("llama"), folder)
    write_lines(prompts, prompts_of(folder))
    options = ("--model", folder, "--known", "tova", "--unknown", "keydiff", "--ratios", "0.6,0.8")
    run("peer", prompts, *options, "--output", output)
    whole = output.read_text()
    kept = whole.splitlines(keepends=True)[:9]
    output.write_text("".join(kept) + '{"example": "1", "set')
    run("peer", prompts, *options, "--output", output)
    found = output.read_text()
    assert found.startswith("".join(kept))
    assert sorted(line for line in found.splitlines() if "about" not in line) == sorted(
        line for line in whole.splitlines() if "about" not in line
    )


def test_from_the_evaluation_to_the_table(demo_model_dir: Path, tmp_path: Path) -> None:
    """The demo model's answers, its full cache's the same in both environments."""
    folder, out = write_collection(tmp_path / "collection"), tmp_path / "out"
    options = ("--data", str(folder), "--lengths", "512", "--methods", "full,snapkv,rdkv", "--budgets", "10%")
    settings = ("--settings", "aware,agnostic", "--threads", "1", "--out", str(out))
    with pytest.raises(SystemExit) as end:
        cli.main(["eval", "--model", str(demo_model_dir), *options, *settings])
    assert end.value.code == 0
    records, prompts, peers = out / "records.jsonl", tmp_path / "prompts.jsonl", tmp_path / "kvpress.jsonl"
    common = ("--model", demo_model_dir)
    run_benchmark("kvpress_prompts.py", records, *common, "--data", folder, "--output", prompts)
    presses = ("--known", "snapkv:window_size=32:kernel_size=7,snapkv", "--unknown", "compactor")
    run("peer", prompts, *common, *presses, "--ratios", "0.9", "--output", peers)
    files = ("--prompts", prompts, "--kvpress", peers, "--records", records)
    run_benchmark("kvpress_table.py", *files, "--output", tmp_path / "table")
    result = json.loads((tmp_path / "table" / "results.json").read_text())
    assert result["same_full_answers"] == [4, 4]
    rows = [row for row in result["ratios"] if (row["task"], row["start"]) == ("all tasks", 0)]
    assert {(row["setting"], row["method"]) for row in rows} == {
        *(("aware", name) for name in ("snapkv", "rdkv", "kvpress snapkv")),
        ("aware", "kvpress snapkv:window_size=32:kernel_size=7"),
        *(("agnostic", name) for name in ("snapkv", "rdkv", "kvpress compactor")),
    }
    assert all(0.08 < row["kept_share"] < 0.11 and row["num_examples"] == 4 for row in rows)
    (row,) = (row for row in rows if (row["setting"], row["method"]) == ("aware", "rdkv"))
    assert row["ratio"] < 1
