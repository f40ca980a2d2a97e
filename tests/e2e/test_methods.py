"""Every method over the real stack, all in one concurrent batch, equals its one-process self token for token.

Two of the methods come from a package outside, found by their entry points in every process: one brings a
scorer, the other a format.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.shared.compression import interface
from kvferry.shared.compression.plan import Budget, CompressionPlan
from kvferry.shared.compression.presets import method_names, plan_for, preset
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.text import TextAssembler
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.sampling.params import SamplingParams
from kvferry.tools.oracle import OneProcessGenerator

PROMPT_WORDS = (97, 331)
BUDGET = 48
MAX_TOKENS = 16
OUTSIDE_METHODS = ("every-other", "halves")
WIRE = {"pyramidkv": {"wire_bits": 8}, "sparq": {"wire_bits": 4}}
"""Methods whose rows are quantised on their way."""
SCORER_SOURCE = """
import torch

from kvferry.shared.compression.interface import Method
from kvferry.shared.compression.plan import Budget, CompressionPlan, Part


class EveryOther:
    observed_queries = 0
    protected_rows = 1
    depends_on_rows = False
    scores_heads_apart = True

    def __call__(self, inputs):
        scores = torch.zeros(inputs.keys.shape[:2])
        scores[:, ::2] = 1.0
        scores[:, -1] = torch.inf
        return scores


METHOD = Method(
    plan=CompressionPlan(
        method="every-other",
        scorer=Part(name="every_other"),
        attention=Part(name="exact_topk"),
        budget=Budget(tokens=64),
    ),
    scorer=lambda params, rows: EveryOther(),
)
"""
FORMAT_SOURCE = """
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvferry.shared.compression.interface import TensorSpec
from kvferry.shared.compression.formats.interface import (
    LayerCache, LayerFormat, NaiveLayer, check_index, gather_rows, select_rows
)
from kvferry.shared.compression.interface import Method
from kvferry.shared.compression.plan import Budget, CompressionPlan, LayerPlan, Part, read_params
from kvferry.shared.compression.presets import PRESETS


def attend(queries, prompt, keys, values, scaling):
    keys = torch.cat([prompt["prompt_keys"].to(keys.dtype), keys], 1)
    values = torch.cat([prompt["prompt_values"].to(values.dtype), values], 1)
    return torch.softmax(queries @ keys.mT * scaling, -1) @ values


class HalvesCache(LayerCache):
    def append_and_attend(self, queries, key, value, *, num_appended, scaling):
        keys, values = self.regions["keys"], self.regions["values"]
        keys[:, num_appended], values[:, num_appended] = key, value
        length = num_appended + 1
        return attend(queries, self.regions, keys[:, :length], values[:, :length], scaling)


class NaiveHalves(NaiveLayer):
    def __init__(self, tensors):
        self._prompt = tensors

    def attend(self, queries, key, value, *, scaling, dense=False):
        return attend(queries, self._prompt, *self.appended(key, value), scaling)


@dataclass(frozen=True, kw_only=True)
class Halves(LayerFormat):
    '''Rows in float16, the last first.'''

    name: ClassVar[str] = "halves"
    kinds: ClassVar[dict] = {"index": "index", "prompt_keys": "rows", "prompt_values": "rows"}

    @classmethod
    def check(cls, plan):
        read_params("format 'halves'", plan.representation.params, {})

    @classmethod
    def plan_layer(cls, plan, sizing):
        return LayerPlan(rows=sizing.rows, representation=plan.representation)

    @classmethod
    def of(cls, plan, layer, shape):
        return cls(shape=shape, rows=layer.rows)

    def compress(self, inputs, scores):
        index, keys, values = {}, inputs.keys, inputs.values
        if scores is not None:
            kept = select_rows(scores, self.rows)
            index, keys, values = {"index": kept}, gather_rows(keys, kept), gather_rows(values, kept)
        return {**index, "prompt_keys": keys.flip(1).half(), "prompt_values": values.flip(1).half()}

    def tensors(self):
        return {**self.shape.index_spec(self.rows), **self._prompt()}

    def placed(self, num_new):
        return {**self._prompt(), **self.shape.row_specs(num_new)}

    def _prompt(self):
        shape = (self.shape.num_kv_heads, self.rows, self.shape.head_dim)
        rows = TensorSpec(shape=shape, dtype=torch.float16)
        return {"prompt_keys": rows, "prompt_values": rows}

    def _receive(self, header, regions):
        return {
            name: regions[name] if name in regions else torch.empty(spec.shape, dtype=spec.dtype)
            for name, spec in header.items()
        }

    def open(self, regions, tensors):
        check_index(tensors, self.shape.num_prompt_tokens, reason="index")
        return HalvesCache(self, regions)

    def naive(self, tensors):
        return NaiveHalves(tensors)


METHOD = Method(
    plan=CompressionPlan(
        method="halves",
        scorer=PRESETS["snapkv"].scorer,
        budget=Budget(tokens=64),
        representation=Part(name="halves"),
    ),
    format=Halves,
)
"""
ENTRY_POINTS = """
[kvferry.methods]
every-other = kvferry_e2e_scorer:METHOD
halves = kvferry_e2e_format:METHOD
"""


@pytest.fixture(scope="module")
def outside_package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A distribution with two methods, on this process's path and on that of processes it starts."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "kvferry_e2e_scorer.py").write_text(SCORER_SOURCE)
    (folder / "kvferry_e2e_format.py").write_text(FORMAT_SOURCE)
    info = folder / "kvferry_e2e_outside-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvferry-e2e-outside\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    caches = (interface.installed_methods, interface.installed_parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        for cached in caches:
            cached.cache_clear()
        yield folder
    for cached in caches:
        cached.cache_clear()


@pytest.fixture(scope="module")
def method_stack(outside_package: Path, start_stack: Callable[..., Any]) -> Iterator[Any]:
    with start_stack() as running:
        yield running


def body_of(method: str, ids: list[int]) -> dict[str, Any]:
    compression: dict[str, object] = {"method": method}
    if method in WIRE:
        compression["parameters"] = WIRE[method]
    if method not in method_names() or preset(method).takes_budget:
        compression["token_budget"] = BUDGET
    return {
        "model": "demo",
        "prompt": ids,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
        "kv_compression": compression,
    }


def plan_of(method: str) -> CompressionPlan:
    budget = Budget(tokens=BUDGET) if preset(method).takes_budget else None
    return plan_for(method, budget=budget, overrides=WIRE.get(method))


def test_all_methods_in_one_batch_equal_their_one_process_selves(
    method_stack: Any,
    make_document: Callable[..., Any],
    tokenizer: ChatTokenizer,
    demo_model_dir: Path,
) -> None:
    prompts = []
    for seed, num_words in enumerate(PROMPT_WORDS):
        document = make_document(seed, num_words=num_words)
        content = f"{document.text} {document.questions[0][0]}"
        prompts.append(tokenizer.render([{"role": "user", "content": content}]))
    requests = [(method, ids) for method in method_names() for ids in prompts]
    assert all((method, prompts[0]) in requests for method in OUTSIDE_METHODS)
    random.Random(0).shuffle(requests)

    url = f"{method_stack.base_url}/v1/completions"
    steps_before = method_stack.decode_metric("kvferry_decode_step_seconds_count")
    with ThreadPoolExecutor(len(requests)) as pool:
        responses = list(
            pool.map(lambda request: httpx.post(url, json=body_of(*request), timeout=240), requests)
        )
    steps = method_stack.decode_metric("kvferry_decode_step_seconds_count") - steps_before
    assert 0 < steps < len(requests) * (MAX_TOKENS - 1), "no two sequences decoded together"
    model = load_model(str(demo_model_dir), name="demo", device="cpu", dtype="float32", max_model_len=0)
    generator = OneProcessGenerator(model)
    for (method, ids), response in zip(requests, responses, strict=True):
        assert response.status_code == 200, (method, response.text)
        answer = response.json()
        assert answer["kv"]["method"] == method
        expected = generator.generate(
            ids,
            plan=plan_of(method),
            sampling=SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True),
        )
        assembler = TextAssembler(tokenizer)
        texts = [assembler.push(token.token_id).token_text for token in expected]
        assert answer["choices"][0]["logprobs"]["tokens"] == texts, method


def test_a_method_that_no_package_brings_is_refused_by_name(method_stack: Any) -> None:
    response = httpx.post(
        f"{method_stack.base_url}/v1/completions", json=body_of("no-such-method", [5, 6, 7]), timeout=30
    )
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "kv_compression.method"
    assert all(name in error["message"] for name in method_names())


@pytest.mark.parametrize(
    ("method", "parameters", "param"),
    [
        ("kivi", {"bits": 3}, "kv_compression.bits"),
        ("think", {"channel_retention": 2.0}, "kv_compression.channel_retention"),
        ("adakv", {"floor": -0.5}, "kv_compression.floor"),
        ("snapkv", {"wire_bits": 5}, "kv_compression.wire_bits"),
        ("h2o", {"wire_bits": 8}, "kv_compression.wire_bits"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(
    method_stack: Any, method: str, parameters: dict[str, float], param: str
) -> None:
    body = body_of("full", [5, 6, 7]) | {"kv_compression": {"method": method, "parameters": parameters}}
    response = httpx.post(f"{method_stack.base_url}/v1/completions", json=body, timeout=30)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
