"""Runs guidellm and aiperf, as they are published, against one `kvferry serve`.

    python benchmarks/load_clients.py --guidellm ENVIRONMENT --aiperf ENVIRONMENT [--output FILE]

Each ENVIRONMENT is a virtual environment of its own with that client. The server has a tiny random model with
a byte-level tokenizer, because the clients write their prompts as text. What is committed is whether every
request was complete with as many tokens as asked for; the times are those of a random model. `vllm bench
serve` is in `bench_agreement.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from kvtest.stack import serving  # noqa: E402
from kvtest.text_models import make_text_model  # noqa: E402

from kvferry.tools.evaluation.provenance import commit  # noqa: E402

NUM_REQUESTS = 32
CONCURRENCY = 4
PROMPT_TOKENS, ANSWER_TOKENS = 128, 32
NUM_TURNS = 2
TIMEOUT_S = 300.0


def _run(command: list[str], folder: Path) -> None:
    variables = {**os.environ, "HOME": str(folder)}
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise SystemExit(done.stdout[-8000:] + done.stderr[-8000:])


def with_guidellm(environment: Path, url: str, model: Path, route: str, folder: Path) -> dict[str, Any]:
    """What guidellm reports of one load."""
    command = [str(environment / "bin" / "guidellm"), "run", "--disable-console-interactive"]
    command += ["--backend", f"kind=openai_http,target={url},request_format={route}"]
    command += ["--profile", f"kind=concurrent,streams={CONCURRENCY}"]
    command += ["--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    sizes = f"prompt_tokens={PROMPT_TOKENS},output_tokens={ANSWER_TOKENS}"
    command += [
        "--data",
        f"kind=synthetic_text,{sizes}",
        "--tokenizer",
        f"kind=huggingface_auto,model={model}",
    ]
    _run([*command, "--output", f"kind=json,path={folder / 'guidellm.json'}"], folder)
    (benchmark,) = json.loads((folder / "guidellm.json").read_text())["benchmarks"]
    successful = benchmark["requests"]["successful"]
    return {
        "complete": len(successful),
        "failed": len(benchmark["requests"]["errored"]),
        "answer_tokens": sum(one["output_metrics"]["text_tokens"] for one in successful),
    }


def with_aiperf(environment: Path, url: str, model: Path, kind: str, folder: Path) -> dict[str, Any]:
    """What aiperf reports of one load; its chats have several turns."""
    command = [
        str(environment / "bin" / "aiperf"),
        "profile",
        "--url",
        url,
        "--model",
        "text",
        "--ui",
        "none",
    ]
    command += ["--endpoint-type", kind, "--streaming", "--tokenizer", str(model), "--random-seed", "1"]
    command += ["--isl", str(PROMPT_TOKENS), "--osl", str(ANSWER_TOKENS), "--concurrency", str(CONCURRENCY)]
    command += ["--extra-inputs", "ignore_eos:true", "--use-server-token-count"]
    if kind == "chat":
        command += ["--num-conversations", str(NUM_REQUESTS // NUM_TURNS)]
        command += ["--conversation-turn-mean", str(NUM_TURNS), "--conversation-turn-stddev", "0"]
    else:
        command += ["--request-count", str(NUM_REQUESTS)]
    _run([*command, "--output-artifact-dir", str(folder / "aiperf")], folder)
    (report,) = (folder / "aiperf").rglob("profile_export_aiperf.json")
    profile = json.loads(report.read_text())
    return {
        "complete": int(profile["request_count"]["avg"]),
        "failed": int((profile.get("error_request_count") or {"avg": 0})["avg"]),
        "answer_tokens": int(profile["total_output_tokens"]["avg"]),
    }


CLIENTS = {
    "guidellm": (with_guidellm, ("/v1/chat/completions", "/v1/completions", "/v1/responses")),
    "aiperf": (with_aiperf, ("chat", "completions")),
}


def _version(environment: Path, name: str) -> str:
    code = f"import importlib.metadata; print(importlib.metadata.version({name!r}))"
    command = [str(environment / "bin" / "python"), "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in CLIENTS:
        parser.add_argument(f"--{name}", type=Path, help=f"environment with {name}")
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args()
    # environments by their names, wherever they are
    command = [Path(argument).name if Path(argument).is_absolute() else argument for argument in sys.argv]
    found: dict[str, Any] = {"command": command, "commit": commit(), "requests": NUM_REQUESTS}
    found["answer_tokens"] = NUM_REQUESTS * ANSWER_TOKENS
    found["clients"] = {}
    with tempfile.TemporaryDirectory(prefix="kvferry-clients-") as model_folder:
        model = make_text_model(Path(model_folder))
        with serving("--model", str(model), "--model-name", "text", "--in-process") as stack:
            for name, (run, kinds) in CLIENTS.items():
                if (environment := getattr(options, name)) is None:
                    continue
                results = found["clients"][name] = {"version": _version(environment, name)}
                for kind in kinds:
                    with tempfile.TemporaryDirectory(prefix="kvferry-client-") as folder:
                        results[kind] = run(environment.absolute(), stack.base_url, model, kind, Path(folder))
                    sys.stdout.write(f"{name}, {kind}: {results[kind]}\n")
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
