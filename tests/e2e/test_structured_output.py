"""Structured output through the whole server, by the official client, from a random model."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from kvtest.grammars import COSTLY
from kvtest.recovery import wait_until_served
from kvtest.stack import Stack, serving
from kvtest.text_models import byte_level_tokenizer, make_text_model
from pydantic import BaseModel, Field

from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.sampling.grammar import GrammarCompiler
from kvferry.shared.sampling.params import Grammar, SamplingParams
from kvferry.tools.oracle import OneProcessGenerator

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "structured_output.py"
_spec = importlib.util.spec_from_file_location("structured_output", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
benchmark = importlib.util.module_from_spec(_spec)
sys.modules["structured_output"] = benchmark
_spec.loader.exec_module(benchmark)

ASK: Any = {"model": "structured", "messages": [{"role": "user", "content": "answer"}], "max_tokens": 300}
SENTENCES = "the quick brown fox jumps over the lazy dog, and then it is done. " * 8
LONG_ARRAY = {"type": "array", "items": {"enum": ["a", 1, None, {"b": [True]}]}, "minItems": 1000}


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)
    kind: Literal["friend", "foe"]
    tags: list[Literal["x", "y"]] = Field(max_length=3)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model(tmp_path_factory.mktemp("text-model"))


@pytest.fixture(scope="module")
def served(model_dir: Path) -> Iterator[Stack]:
    with serving("--model", str(model_dir), "--model-name", "structured", "--in-process") as stack:
        yield stack


@pytest.fixture
def client(served: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.base_url}/v1", api_key="-", max_retries=0, timeout=120) as client:
        yield client


def test_random_schemas_and_expressions_are_followed_beside_requests_without(served: Stack) -> None:
    found = benchmark.check_validity(served, num_schemas=80, num_regexes=30, seed=5)
    assert found["ended"] >= 85
    assert found["without_structure_same_as_alone"] > 30
    assert found["sequences_a_step"] > 1  # how many more is the machine's


def test_the_committed_results_are_within_the_goals() -> None:
    results = SCRIPT.parent / "results" / "structured"
    found = json.loads((results / "validity.json").read_text())["validity"]
    assert (found["schemas"], found["regexes"]) == (1000, 200)
    assert found["valid"] == found["ended"] == 1200 - found["cut_off_by_max_tokens"]
    assert found["ended"] > 1000
    assert found["without_structure_same_as_alone"] == found["without_structure"] == 400
    assert found["sequences_a_step"] > 8
    for name in ("step.json", "step-greedy.json"):
        step = json.loads((results / name).read_text())["step"]
        assert step["sequences"] == 16
        models = [model for model in step.values() if isinstance(model, dict)]
        assert len(models) == 2
        for model in models:
            plain, structured = (statistics.median(model[key]) for key in ("plain_ms", "structured_ms"))
            assert model["added_percent_of_medians"] == pytest.approx(100 * (structured / plain - 1), abs=0.1)
            assert model["added_percent_of_medians"] <= 15


def test_the_clients_own_helpers_parse_answers_and_streams(client: openai.OpenAI) -> None:
    parsed = [
        client.chat.completions.parse(**ASK, response_format=Person, seed=seed).choices[0].message.parsed
        for seed in range(3)
    ]
    assert len({person.model_dump_json() for person in parsed if person}) == 3
    with client.chat.completions.stream(**ASK, response_format=Person, seed=0) as stream:
        person = stream.get_final_completion().choices[0].message.parsed
    assert person == parsed[0]


async def test_the_async_client_answers_streams_and_parses(served: Stack) -> None:
    url = f"{served.base_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0, timeout=120) as client:
        whole = await client.chat.completions.create(**ASK, temperature=0)
        async with client.chat.completions.stream(**ASK, temperature=0) as stream:
            pieces = [event.delta async for event in stream if event.type == "content.delta"]
            final = await stream.get_final_completion()
        assert "".join(pieces) == final.choices[0].message.content == whole.choices[0].message.content
        assert len(pieces) > 1
        parsed = await client.chat.completions.parse(**ASK, response_format=Person, seed=0)
        async with client.chat.completions.stream(**ASK, response_format=Person, seed=0) as stream:
            streamed = await stream.get_final_completion()
    assert isinstance(parsed.choices[0].message.parsed, Person)
    assert streamed.choices[0].message.parsed == parsed.choices[0].message.parsed


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "json_object"}}, r"\{.*\}"),
        ({"extra_body": {"structured_outputs": {"regex": r"[a-c]{3}-\d+"}}}, r"[a-c]{3}-\d+"),
        ({"extra_body": {"structured_outputs": {"choice": ["yes", "no way"]}}}, "yes|no way"),
        ({"extra_body": {"structured_outputs": {"grammar": 'start: "a" B\nB: /[0-9]{3}/'}}}, r"a\d{3}"),
        ({"extra_body": {"structured_outputs": {"json": {"enum": [1, 2]}}}}, "1|2"),
        ({"extra_body": {"guided_regex": "x+y"}}, "x+y"),
        ({"extra_body": {"guided_choice": ["left", "right"]}}, "left|right"),
        ({"extra_body": {"guided_json": '{"const": "c"}'}}, '"c"'),
        ({"extra_body": {"guided_grammar": 'root ::= "q" | "r"'}}, "q|r"),
        ({"extra_body": {"regex": "(ab){2}"}}, "abab"),
        ({"extra_body": {"ebnf": 'root ::= "s" [0-9] [0-9]'}}, r"s\d\d"),
        ({"extra_body": {"json_schema": '{"type": "boolean"}'}}, "true|false"),
    ],
)
def test_every_spelling_is_followed(client: openai.OpenAI, fields: dict[str, Any], pattern: str) -> None:
    ended = 0
    for seed in range(4):
        choice = client.chat.completions.create(**ASK, seed=seed, **fields).choices[0]
        if choice.finish_reason == "stop":
            ended += 1
            assert re.fullmatch(pattern, choice.message.content, re.DOTALL)
    assert ended > 0


def test_each_of_several_choices_follows_it_and_a_stop_string_ends_it(client: openai.OpenAI) -> None:
    asked: Any = {"structured_outputs": {"regex": "[a-f]{6},[a-f]{6}"}}
    answer = client.chat.completions.create(**ASK, n=4, seed=3, logprobs=True, extra_body=asked)
    texts = [choice.message.content for choice in answer.choices]
    assert all(re.fullmatch("[a-f]{6},[a-f]{6}", text) for text in texts)
    assert len(set(texts)) == 4
    stopped = client.chat.completions.create(**ASK, seed=3, stop=",", extra_body=asked).choices[0]
    assert stopped.message.content == texts[0].partition(",")[0]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "guided_choice and guided_regex"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "guided_regex"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens", "guided_regex"),
        ({"guided_choice": []}, "guided_choice", "at least 1 item"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "missing"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "json_object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": 5}}}},
            "response_format.json_schema.schema",
            "cannot be used",
        ),
        ({"structural_tag": "{}"}, "structural_tag", "not supported"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**ASK, extra_body=fields)
    assert refused.value.param == param
    assert message in refused.value.message


@pytest.mark.parametrize("method", ["full", "rocketkv"])
def test_answers_equal_their_one_process_selves_beside_others(
    client: openai.OpenAI, model_dir: Path, method: str
) -> None:
    tokenizer = ChatTokenizer.load(model_dir)
    model = load_model(str(model_dir), name="structured", device="cpu", dtype="float32", max_model_len=0)
    compiler = GrammarCompiler(lambda: tokenizer, model.spec.vocab_size, model.spec.eos_token_ids)
    budget = Budget() if method == "full" else Budget(tokens=48)
    compression = {"method": method} | ({} if budget.tokens is None else {"token_budget": budget.tokens})
    schemas = [None, LONG_ARRAY, {"type": "object", "minProperties": 1}] * 3

    def ask(number: int) -> list[int]:
        fields: dict[str, Any] = {"kv_compression": compression, "return_token_ids": True}
        if schemas[number] is not None:
            fields["structured_outputs"] = {"json": schemas[number]}
        answer = client.completions.create(
            model="structured",
            prompt=SENTENCES + str(number),
            max_tokens=40,
            temperature=0,
            extra_body=fields,
        )
        return answer.choices[0].token_ids  # type: ignore[attr-defined, no-any-return]

    with ThreadPoolExecutor(9) as pool:
        answers = list(pool.map(ask, range(9)))
    for number, tokens in enumerate(answers):
        schema = schemas[number]
        grammar = None if schema is None else Grammar(kind="json_schema", text=json.dumps(schema))
        expected = OneProcessGenerator(model).generate(
            tokenizer.encode(SENTENCES + str(number)),
            plan=plan_for(method, budget=budget),
            sampling=SamplingParams(max_tokens=40, temperature=0.0, grammar=grammar),
            matcher=compiler.matcher(grammar),
        )
        assert tokens == [token.token_id for token in expected]


def test_an_answer_goes_on_in_its_grammar_after_a_worker_is_lost(model_dir: Path) -> None:
    asked: Any = {"structured_outputs": {"json": LONG_ARRAY}, "kv_compression": {"method": "full"}}
    options = ("--model", str(model_dir), "--model-name", "structured", "--recovery-wait-s", "100")
    with serving(*options) as stack:
        client = openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key="-", max_retries=0, timeout=120)

        def stream(*, kills: bool) -> str:
            pieces: list[str] = []
            pid = int(json.loads(stack.ready_path.read_text())["decode_pid"])
            for chunk in client.chat.completions.create(**ASK, temperature=0, stream=True, extra_body=asked):
                pieces += [choice.delta.content or "" for choice in chunk.choices]
                if kills and len(pieces) == 1:
                    os.kill(pid, signal.SIGKILL)
            return "".join(pieces)

        with client:
            expected = stream(kills=False)
            for _ in range(5):  # on a busy machine an answer may be over before it is heard
                assert stream(kills=True) == expected
                wait_until_served(stack.base_url, {"model": "structured", "prompt": "a", "max_tokens": 1})
                if stack.router_metric("kvferry_recoveries_total", role="decode") == 1:
                    return
        pytest.fail("no answer was there to be recovered")


def test_json_may_have_no_white_space(client: openai.OpenAI) -> None:
    asked = {"json": Person.model_json_schema(), "disable_any_whitespace": True}
    for seed in range(4):
        answer = client.chat.completions.create(**ASK, seed=seed, extra_body={"structured_outputs": asked})
        if answer.choices[0].finish_reason == "stop":
            text = answer.choices[0].message.content or ""
            assert text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii="\\u" in text)


def overlapping(number: int) -> dict[str, Any]:
    """2 KB that take minutes and a gigabyte to compile."""
    patterns = [f".*{chr(97 + i % 26)}.{{{i}}}" for i in range(40)]
    one_of_all = [{"properties": {"x": {"type": "string", "pattern": pattern}}} for pattern in patterns]
    return {"title": f"{number}", "allOf": one_of_all}


def test_schemas_that_take_for_ever_keep_nobody_else_waiting(served: Stack) -> None:
    """Of seven the clients leave at once, an eighth is refused in words; chats go on, with and without
    structure."""
    url = f"{served.base_url}/v1/chat/completions"
    chat = {**ASK, "max_tokens": 3}

    def body(number: int) -> dict[str, Any]:
        return {**chat, "guided_json": overlapping(number)}

    with ThreadPoolExecutor(8) as pool, httpx.Client(timeout=60) as plain:

        def leave(number: int) -> None:
            with contextlib.suppress(httpx.TimeoutException):
                httpx.post(url, json=body(number), timeout=0.5, headers={"x-api-key": "hostile"})

        leaving = [pool.submit(leave, number) for number in range(7)]
        asked = pool.submit(httpx.post, url, json=body(7), timeout=60, headers={"x-api-key": "hostile"})
        for number in range(4):
            assert plain.post(url, json=chat).status_code == 200
            other = {**chat, "guided_json": {"const": number}}
            assert plain.post(url, json=other, headers={"x-api-key": "other"}).status_code == 200
            assert plain.get(f"{served.base_url}/ready").status_code == 200
        refused = asked.result(120)
        assert all(future.result(120) is None for future in leaving)
    assert refused.status_code == 400
    assert "guided_json cannot be used" in refused.json()["error"]["message"]


def test_a_schema_that_takes_the_stack_is_refused_and_nothing_ends(
    served: Stack, client: openai.OpenAI
) -> None:
    links = {f"d{i}": {"properties": {"n": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(1000)}
    chain = {"$defs": {**links, "d1000": {}}, "$ref": "#/$defs/d0"}
    deep = "[" * 100_000
    for name, value in (
        ("guided_json", chain),
        ("guided_json", deep),
        ("guided_grammar", "start: " + "(" * 9999),
    ):
        with pytest.raises(openai.BadRequestError, match=f"{name} cannot be used"):
            client.chat.completions.create(**ASK, extra_body={name: value})
    tool = {"type": "function", "function": {"name": "f", "parameters": chain}}
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**ASK, tools=[tool], tool_choice="required")
    assert client.chat.completions.create(**{**ASK, "max_tokens": 2}).choices


def test_a_grammar_whose_masks_take_too_long_ends_its_own_answer_by_name(client: openai.OpenAI) -> None:
    """The check cannot know that its answer begins with a z. An answer beside it is as it is alone."""

    def plain() -> str | None:
        return client.chat.completions.create(**ASK, temperature=0, seed=3).choices[0].message.content

    alone, bias = plain(), {str(byte_level_tokenizer().token_to_id("z")): 100}
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(plain)
        with pytest.raises(openai.BadRequestError, match="more than 20 ms of a processor for each token"):
            client.chat.completions.create(
                **ASK, temperature=0, logit_bias=bias, extra_body={"guided_grammar": COSTLY.text}
            )
        assert beside.result(120) == alone
