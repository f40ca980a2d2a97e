"""Structured output through the whole server: whether every answer is valid, and what a step costs.

    python benchmarks/structured_output.py validity [--schemas 1000] [--regexes 200] [--seed 16]
    python benchmarks/structured_output.py step
    python benchmarks/structured_output.py libraries

`validity` serves a tiny random model with a byte-level tokenizer and asks it for answers of random JSON
schemas and regular expressions, 16 at a time, every third request without structure. Every answer that ended
by itself must be valid, and all greedy answers without structure must equal those they have alone. Decode's
steps must have more than a quarter of the 16 in the mean: on a busy machine some wait for their grammars.

`step` measures decode steps of 16 sequences without structure and with a schema each, by turns.

`libraries` compares llguidance with xgrammar, where that is installed: the time to compile a schema and to
compute a mask, over a vocabulary of a usual size.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from kvtest.schemas import random_regex, random_schema  # noqa: E402
from kvtest.stack import Stack, serving  # noqa: E402
from kvtest.text_models import make_text_model  # noqa: E402

BATCH = 16
MAX_TOKENS = 220
USUAL_VOCABULARY = 128_000
NUM_STEPS = 100
STEPS = "kvferry_decode_step_seconds_count"


def is_valid(asked: dict[str, Any], text: str) -> bool:
    """Whether an answer is what was asked for."""
    if "regex" in asked:
        return re.fullmatch(asked["regex"], text, re.ASCII) is not None
    import jsonschema

    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    return bool(
        jsonschema.Draft202012Validator(asked["schema"], format_checker=checker).is_valid(json.loads(text))
    )


def request_of(asked: dict[str, Any], number: int) -> dict[str, Any]:
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": f"request {number}"}]}
    fields |= {"model": "structured", "max_tokens": MAX_TOKENS, "seed": number, "temperature": 1.0}
    if "schema" in asked:
        named = {"name": "answer", "schema": asked["schema"]}
        fields["response_format"] = {"type": "json_schema", "json_schema": named}
    elif "regex" in asked:
        fields["extra_body"] = {"structured_outputs": {"regex": asked["regex"]}}
    else:
        fields["temperature"] = 0
    return fields


def check_validity(stack: Stack, num_schemas: int, num_regexes: int, seed: int) -> dict[str, Any]:
    """Asks for every structure, among requests without; raises where an answer is wrong."""
    import openai

    rng = random.Random(seed)
    structured = [{"schema": random_schema(rng)} for _ in range(num_schemas)]
    structured += [{"regex": random_regex(rng)} for _ in range(num_regexes)]
    rng.shuffle(structured)
    plain_every = 3
    mixed = [
        constraint
        for i, one in enumerate(structured)
        for constraint in (([{}] if i % plain_every == 0 else []) + [one])
    ]
    client = openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key="-", max_retries=8, timeout=300)

    def ask(number: int) -> Any:
        return client.chat.completions.create(**request_of(mixed[number], number))

    begin_s, num_steps = time.perf_counter(), stack.decode_metric(STEPS)
    with client, ThreadPoolExecutor(BATCH) as pool:
        answers = list(pool.map(ask, range(len(mixed))))
        elapsed_s = time.perf_counter() - begin_s
        num_steps = stack.decode_metric(STEPS) - num_steps
        plain = [number for number, asked in enumerate(mixed) if not asked]
        alone = {number: ask(number).choices[0].message.content for number in plain}
    choices = [answer.choices[0] for answer in answers]
    differ = [number for number in plain if choices[number].message.content != alone[number]]
    # Prefill draws each answer's first token.
    mean_batch = sum(answer.usage.completion_tokens - 1 for answer in answers) / num_steps
    wrong = [
        {**asked, "text": choice.message.content}
        for asked, choice in zip(mixed, choices, strict=True)
        if asked and choice.finish_reason == "stop" and not is_valid(asked, choice.message.content)
    ]
    if wrong:
        raise SystemExit(f"{len(wrong)} answers are not valid, the first: {json.dumps(wrong[0])}")
    if differ:
        raise SystemExit(f"answers without structure differ from those they have alone: {differ}")
    ended = [choice.finish_reason == "stop" for asked, choice in zip(mixed, choices, strict=True) if asked]
    return {
        "schemas": num_schemas,
        "regexes": num_regexes,
        "seed": seed,
        "ended": sum(ended),
        "valid": sum(ended),
        "cut_off_by_max_tokens": len(ended) - sum(ended),
        "without_structure": len(plain),
        "without_structure_same_as_alone": len(plain),
        "sequences_a_step": round(mean_batch, 2),
        "seconds": round(elapsed_s, 1),
    }


def _options(model: Path, num_threads: int) -> list[str]:
    named = ["--model", str(model), "--model-name", "structured"]
    return [*named, "--in-process", "--threads", str(num_threads)]


def validity(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="kvferry-structured-") as folder:
        model = make_text_model(Path(folder))
        with serving(*_options(model, options.threads)) as stack:
            return check_validity(stack, options.schemas, options.regexes, options.seed)


# ---- a vocabulary of a usual size ------------------------------------------------------------------------


def usual_tokenizer() -> Any:
    """A byte-level BPE of about 128,000 tokens, trained on Python's own library."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    cached = Path(tempfile.gettempdir()) / f"kvferry-tokenizer-{USUAL_VOCABULARY}.json"
    if cached.exists():
        return Tokenizer.from_file(str(cached))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=USUAL_VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    tokenizer.train_from_iterator((path.read_text("utf-8", "replace") for path in files), trainer)
    tokenizer.save(str(cached))
    return tokenizer


def _times(values_s: list[float]) -> dict[str, float]:
    ordered = sorted(values_s)
    quantile = {"p50": 0.5, "p95": 0.95, "max": 1.0}
    return {
        f"{name}_us": round(ordered[min(int(at * len(ordered)), len(ordered) - 1)] * 1e6, 1)
        for name, at in quantile.items()
    }


def libraries(options: argparse.Namespace) -> dict[str, Any]:
    """Compile and mask times of each library, over the same random schemas and draws."""
    tokenizer = usual_tokenizer()
    vocab_size = tokenizer.get_vocab_size()
    rng = random.Random(options.seed)
    schemas = [json.dumps(random_schema(rng)) for _ in range(100)]
    found: dict[str, Any] = {"vocab_size": vocab_size, "schemas": len(schemas)}
    for name, make in (("llguidance", _llguidance), ("xgrammar", _xgrammar)):
        try:
            compiled, mask, accept = make(tokenizer, vocab_size)
        except ImportError:
            found[name] = "not installed"
            continue
        compile_s, mask_s, refused, draws = [], [], 0, random.Random(options.seed)
        for schema in schemas:
            begin_s = time.perf_counter()
            try:
                matcher = compiled(schema)
            except (ValueError, RuntimeError):
                refused += 1
                continue
            compile_s.append(time.perf_counter() - begin_s)
            for _ in range(80):
                begin_s = time.perf_counter()
                bits = mask(matcher)
                mask_s.append(time.perf_counter() - begin_s)
                allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
                token_id = int(draws.choice(allowed))
                if token_id == 0:
                    break
                accept(matcher, token_id)
        found[name] = {"refused": refused, "compile": _times(compile_s), "mask": _times(mask_s)}
    return found


def _llguidance(tokenizer: Any, vocab_size: int) -> Any:
    from llguidance import LLMatcher, LLTokenizer

    tokens = LLTokenizer(tokenizer.to_str(), vocab_size, [0])
    bits = np.zeros((vocab_size + 31) // 32, dtype=np.int32)

    def compiled(schema: str) -> Any:
        options = {"whitespace_flexible": False}
        matcher = LLMatcher(
            tokens, LLMatcher.grammar_from_json_schema(schema, overrides=options), log_level=0
        )
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def mask(matcher: Any) -> Any:
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        return bits

    return compiled, mask, lambda matcher, token_id: matcher.consume_token(token_id)


def _xgrammar(tokenizer: Any, vocab_size: int) -> Any:
    import xgrammar

    texts = [tokenizer.id_to_token(token_id) for token_id in range(vocab_size)]
    info = xgrammar.TokenizerInfo(texts, vocab_type=xgrammar.VocabType.BYTE_LEVEL, stop_token_ids=[0])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    bits = xgrammar.allocate_token_bitmask(1, vocab_size)

    def mask(matcher: Any) -> Any:
        matcher.fill_next_token_bitmask(bits)
        return bits[0].numpy()

    def compiled(schema: str) -> Any:
        return xgrammar.GrammarMatcher(compiler.compile_json_schema(schema, any_whitespace=False))

    return compiled, mask, lambda matcher, token_id: matcher.accept_token(token_id)


# ---- steps -----------------------------------------------------------------------------------------------


def step(options: argparse.Namespace) -> dict[str, Any]:
    """Mean times of a decode step of 16 sequences, without structure and with it in all, by turns.

    They are the server's own figures: a step with what the engine does for it on the host.
    """
    sizes = {
        "2-layers-of-64_vocabulary-of-bytes": (None, {}),
        "8-layers-of-512_usual-vocabulary": (
            usual_tokenizer(),
            {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8},
        ),
    }
    found: dict[str, Any] = {"threads": options.threads, "sequences": BATCH, "tokens": NUM_STEPS}
    found["temperature"] = options.temperature
    for name, (tokenizer, overrides) in sizes.items():
        with tempfile.TemporaryDirectory(prefix="kvferry-structured-") as folder:
            model = make_text_model(Path(folder), tokenizer=tokenizer, **overrides)
            with serving(*_options(model, options.threads)) as stack:
                times: dict[str, list[float]] = {"plain": [], "structured": []}
                for number in range(-1, options.rounds):
                    for kind, means in times.items():
                        mean_s = _mean_step_s(stack, kind == "structured", options)
                        if number >= 0:  # the first round warms up
                            means.append(mean_s)
        plain, structured = (statistics.median(times[kind]) for kind in ("plain", "structured"))
        found[name] = {
            "plain_ms": [round(mean_s * 1e3, 3) for mean_s in times["plain"]],
            "structured_ms": [round(mean_s * 1e3, 3) for mean_s in times["structured"]],
            "added_percent_of_medians": round(100 * (structured / plain - 1), 1),
        }
    return found


def _mean_step_s(stack: Any, is_structured: bool, options: argparse.Namespace) -> float:
    """Of one batch of requests that all have the same number of tokens."""
    import httpx

    rng = random.Random(options.seed)

    def ask(schema: dict[str, Any]) -> None:
        body: dict[str, Any] = {"model": "structured", "prompt": "it is", "max_tokens": NUM_STEPS, "seed": 1}
        body["temperature"] = options.temperature
        if is_structured:
            body["structured_outputs"] = {"json": {"type": "array", "items": schema, "minItems": 1000}}
        else:
            body["ignore_eos"] = True
        answer = (
            httpx.post(f"{stack.base_url}/v1/completions", json=body, timeout=600).raise_for_status().json()
        )
        if answer["usage"]["completion_tokens"] != NUM_STEPS:
            raise SystemExit(f"an answer has {answer['usage']['completion_tokens']} tokens")

    names = ("kvferry_decode_step_seconds_sum", "kvferry_decode_step_seconds_count")
    before = [stack.decode_metric(name) for name in names]
    with ThreadPoolExecutor(BATCH) as pool:
        schemas = [schema for _ in range(9 * BATCH) if "$defs" not in (schema := random_schema(rng))]
        list(pool.map(ask, schemas[:BATCH]))
    total_s, count = (stack.decode_metric(name) - b for name, b in zip(names, before, strict=True))
    return total_s / count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["validity", "step", "libraries"])
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--regexes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1, help="of the server")
    parser.add_argument("--rounds", type=int, default=5, help="of `step`")
    parser.add_argument("--temperature", type=float, default=1.0, help="of `step`")
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args()
    parts = {"validity": validity, "step": step, "libraries": libraries}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=True
    ).stdout.strip()
    found = {"command": sys.argv[1:], "commit": commit, options.part: parts[options.part](options)}
    text = json.dumps(found, indent=1) + "\n"
    sys.stdout.write(text)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
