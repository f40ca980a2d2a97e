"""The examples that clients' packages are published with, unmodified, against one real server.

Each is run as it stands, except those that a rule of `NOT_RUN` names with its reason. Rules go by content, so
that examples which a new version of a client brings are run.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from kvtest import published_examples
from kvtest.published_examples import Example, as_input, examples_of
from kvtest.stack import Stack, serving
from kvtest.text_models import HERMES, make_text_model

NOT_RUN = {
    "openai": {
        r"workload_identity": "tokens of a cloud's identity service",
        r"input_image": "images",
        r"\.realtime\.": "the Realtime API",
        r"fine_tuning\.jobs\.list|first_page": "fine-tuning",
        r"client\.files\.": "files",
        r"\.audio\.": "audio",
        r"webhooks": "OpenAI's webhooks",
        r"my_field": "a placeholder for a field that no answer has",
        r"DefaultHttpx2Client\(\.\.\.\)": "an outline",
        r"OPENAI_MTLS_": "certificates that OpenAI gives out",
        r"AzureOpenAI": "Azure",
        r"[Bb]edrock": "Bedrock",
    },
    "anthropic": {},
    "litellm": {
        r"0\.0\.0\.0:4000": "LiteLLM's proxy, not this server",
        r"a2a": "agent-to-agent servers",
        r"mcp_server\.py": "a tool server that the reader has",
    },
    "langchain-openai": {
        r"\A(AIMessage(Chunk)?|Joke)\(|\A\[\n|\Afull = AIMessageChunk\(": "a result",
        r"openai\.OpenAI\(\.\.\)": "an outline",
        r"in \(await model\.astream\(messages\)\)\n": "an outline: the loop has no body",
        r"web_search": "tools that OpenAI runs",
        r"image_url": "images",
    },
}
"""What examples that are not run contain, and the reason."""
ENDS_WITH = {'"/foo"': "NotFoundError"}
"""Examples that end with an error: a route that no server has."""
GIVEN = {
    "openai": "import asyncio, openai\nfrom openai import AsyncOpenAI, OpenAI\nclient = OpenAI()",
    "anthropic": "",
    "litellm": "",
    "langchain-openai": "dynamic_suffix = 'a'",
}
"""What a text leaves to its reader."""
CALLS = {"create", "completion", "invoke", "stream"}
"""The functions that send a request."""
LIKELY = {'"': 10.0, "}": 9.0, ":": 8.0, ",": 7.0, "<|im_end|>": 9.5}
"""Tokens that the model prefers, and how much."""
NOT_SERVED = "fine_tuning"
"""An example of a call that fails, which handles the error itself."""


def num_calls(example: Example) -> int:
    calls = [node.func for node in ast.walk(ast.parse(example.code)) if isinstance(node, ast.Call)]
    return sum((getattr(func, "attr", None) or getattr(func, "id", None)) in CALLS for func in calls)


def is_run(package: str, example: Example) -> bool:
    return not any(re.search(pattern, example.code) for pattern in NOT_RUN[package])


EXAMPLES = {package: examples_of(package) for package in NOT_RUN}
RUN = {
    package: [example for example in examples if is_run(package, example)]
    for package, examples in EXAMPLES.items()
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A random model that ends strings and objects where a grammar lets it, under the examples' names."""
    folder = tmp_path_factory.mktemp("examples")
    make_text_model(folder, template=HERMES, max_position_embeddings=1024)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = transformers.AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(list(LIKELY))
    with torch.no_grad():
        # The first hidden value is the same for every token.
        model.get_input_embeddings().weight[:, 0] = 8.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0.0
        model.get_output_embeddings().weight[ids, 0] = torch.tensor(list(LIKELY.values()))
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0}))
    code = "\n".join(example.code for examples in RUN.values() for example in examples)
    names = {re.sub("^(openai|anthropic)/", "", name) for name in re.findall(r'model="([^"]+)"', code)}
    options = ["--model-name", "text", "--model-aliases", ",".join(sorted(names))]
    with serving("--model", str(folder), *options, "--in-process") as stack:
        yield stack


@pytest.mark.parametrize("package", EXAMPLES)
def test_the_examples_of_a_package_run(served: Stack, package: str, tmp_path: Path) -> None:
    url, examples = served.base_url, RUN[package]
    variables = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "-", "ANTHROPIC_API_KEY": "-"}
    variables |= {"ANTHROPIC_BASE_URL": url, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    before = served.router_metric("kvferry_request_success_total")
    done = subprocess.run(
        [sys.executable, published_examples.__file__],
        input=as_input(examples, given=GIVEN[package], output=tmp_path / "ends.json"),
        env={**os.environ, **variables},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for example, end in zip(examples, json.loads((tmp_path / "ends.json").read_text()), strict=True):
        wanted = next((error for pattern, error in ENDS_WITH.items() if pattern in example.code), None)
        assert end.get("type") == wanted, example.code + end.get("trace", "")
    calls = sum(num_calls(each) for each in examples if NOT_SERVED not in each.code)
    assert served.router_metric("kvferry_request_success_total") - before == calls > 0


@pytest.mark.parametrize("package", EXAMPLES)
def test_every_rule_names_an_example(package: str) -> None:
    for pattern in NOT_RUN[package]:
        assert any(re.search(pattern, example.code) for example in EXAMPLES[package]), pattern
