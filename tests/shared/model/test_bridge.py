"""The bridge against transformers' own forward, family by family."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from kvferry.kernels.dense_decode import dense_decode
from kvferry.shared.errors import Cancelled, ContextLengthExceeded, InvalidRequest
from kvferry.shared.model import bridge, prefill_attention
from kvferry.shared.model.bridge import TransformersModel
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.spec import LayerSpec

FAMILIES = (
    "llama",
    "llama-mha",
    "llama-mqa",
    "llama-yarn",
    "llama-dynamic",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "phi3",
    "gemma",
    "granite",
)
TinyModelDir = Callable[[str], Path]
LayerKV = tuple[Tensor, Tensor]


class Recorder:
    """Keeps copies of every layer's K and V; hands in given history."""

    def __init__(self, history: list[LayerKV] | None = None) -> None:
        self._history = history
        self.kv: list[LayerKV] = []
        self.queries: list[Tensor] = []
        self.scaling: list[float] = []

    def history(self, layer: int) -> LayerKV | None:
        return self._history[layer] if self._history else None

    def layer_done(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        assert layer == len(self.kv)
        self.kv.append((keys.clone(), values.clone()))
        self.queries.append(queries.clone())
        self.scaling.append(scaling)


class DenseAttention:
    """Decode attention over plain per-sequence tensors."""

    def __init__(self, sequences: list[list[LayerKV]]) -> None:
        self.sequences = sequences

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        outputs = torch.full_like(queries, float("nan"))
        for row, kv in enumerate(self.sequences):
            k = torch.cat([kv[layer][0], keys[row][:, None]], 1)
            v = torch.cat([kv[layer][1], values[row][:, None]], 1)
            kv[layer] = (k, v)
            outputs[row] = dense_decode(queries[row], k, v, scaling=scaling)
        return outputs


def load(folder: Path, dtype: str = "float32") -> TransformersModel:
    return load_model(folder, name="tiny", device="cpu", dtype=dtype, max_model_len=0)


def own_logits(folder: Path, token_ids: Tensor, *, dtype: torch.dtype, attention: str = "sdpa") -> Tensor:
    """transformers' own logits `[T, V]`, float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention).eval()
    with torch.inference_mode():
        return model(token_ids[None], use_cache=False).logits[0].float()


def some_ids(num_tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(7, 600, (num_tokens,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.covering(1)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_decode_logits_are_transformers_own(
    tiny_model_dir: TinyModelDir, family: str, attention: str
) -> None:
    folder = tiny_model_dir(family)
    token_ids = some_ids(45)
    expected = own_logits(folder, token_ids, dtype=torch.float32, attention=attention)
    assert expected.std() > 0.2
    model = load(folder)
    recorder = Recorder()
    torch.testing.assert_close(
        model.prefill(token_ids[:38], start=0, observer=recorder), expected[37], atol=2e-4, rtol=1e-4
    )
    decode = DenseAttention([recorder.kv])
    for position in range(38, 45):
        logits = model.decode(token_ids[position : position + 1], torch.tensor([position]), attention=decode)
        torch.testing.assert_close(logits[0], expected[position], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_all_the_prompts_tokens_are_transformers_own(
    tiny_model_dir: TinyModelDir, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model_dir(family)
    token_ids = some_ids(45)
    model = load(folder)
    monkeypatch.setattr(bridge, "_LOGITS", 10 * model.spec.vocab_size + 1)
    parts: list[tuple[int, Tensor]] = []
    last = model.prefill(
        token_ids, start=0, observer=Recorder(), on_logits=lambda first, logits: parts.append((first, logits))
    )
    assert [(first, rows.shape[0]) for first, rows in parts] == [
        (0, 10),
        (10, 10),
        (20, 10),
        (30, 10),
        (40, 5),
    ]
    logits = torch.cat([rows for _, rows in parts])
    expected = own_logits(folder, token_ids, dtype=torch.float32)
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(logits[-1], last, atol=2e-4, rtol=1e-4)


def test_a_model_that_changes_its_heads_logits_gives_none_of_a_prompt(
    tiny_model_dir: TinyModelDir,
) -> None:
    model = load(tiny_model_dir("granite"))
    model._model.config.logits_scaling = 2.0
    with pytest.raises(InvalidRequest, match="prompt_logprobs is not available for Granite") as raised:
        model.prefill(some_ids(9), start=0, observer=Recorder(), on_logits=lambda first, logits: None)
    assert raised.value.param == "prompt_logprobs"


class NoReading(TorchDispatchMode):
    """Refuses what makes a value known to Python, for which a GPU's step would have to be waited for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        # In inference mode the first two are not taken apart into the third.
        assert func not in (aten.is_nonzero.default, aten.item.default, aten._local_scalar_dense.default)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "mixtral"])
def test_a_decode_step_reads_no_value_on_the_host(tiny_model_dir: TinyModelDir, family: str) -> None:
    model = load(tiny_model_dir(family))

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        return queries

    with NoReading():
        logits = model.decode(torch.tensor([5, 6]), torch.tensor([30, 9]), attention=attend)
    assert logits.shape == (2, model.spec.vocab_size)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.05), ("float16", 0.01)])
@pytest.mark.parametrize("family", ["llama", "llama-mha", "mistral", "qwen2", "qwen3"])
def test_half_precision_stays_within_its_rounding(
    tiny_model_dir: TinyModelDir, family: str, dtype: str, tolerance: float
) -> None:
    folder = tiny_model_dir(family)
    token_ids = some_ids(33)
    expected = own_logits(folder, token_ids, dtype=torch.float32)
    own_error = (own_logits(folder, token_ids, dtype=getattr(torch, dtype)) - expected).abs().max()
    model = load(folder, dtype)
    assert model.spec.dtype == dtype
    recorder = Recorder()
    logits = [model.prefill(token_ids[:30], start=0, observer=recorder)]
    assert recorder.kv[0][0].dtype is getattr(torch, dtype)
    decode = DenseAttention([recorder.kv])
    logits += [
        model.decode(token_ids[p : p + 1], torch.tensor([p]), attention=decode)[0] for p in (30, 31, 32)
    ]
    assert all(one.dtype is torch.float32 for one in logits)
    error = (torch.stack(logits) - expected[29:]).abs().max()
    # as far from float32 as transformers itself in that dtype, give or take; logits span several units
    assert error <= 2 * own_error + tolerance * expected.abs().max()


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", ["llama", "llama-mha", "llama-mqa", "qwen3", "phi3"])
@pytest.mark.parametrize(
    "pieces",
    [(1, 40), (40, 1), (20, 21), (1, 1, 1, 38), (13, 13, 13, 1, 1), (41,), (1,) * 41],
    ids=lambda pieces: "+".join(map(str, pieces[:5])),
)
def test_prefill_in_pieces_equals_one_run(
    tiny_model_dir: TinyModelDir, family: str, pieces: tuple[int, ...]
) -> None:
    model = load(tiny_model_dir(family))
    token_ids = some_ids(41)
    whole = Recorder()
    expected = model.prefill(token_ids, start=0, observer=whole)
    history, start = None, 0
    for num_tokens in pieces:
        piece = Recorder(history)
        logits = model.prefill(token_ids[start : start + num_tokens], start=start, observer=piece)
        assert piece.queries[0].shape[2] == num_tokens
        history, start = piece.kv, start + num_tokens
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert history is not None
    for (keys, values), (whole_keys, whole_values) in zip(history, whole.kv, strict=True):
        torch.testing.assert_close(keys, whole_keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(values, whole_values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", [0, 1 << 14, 1 << 40])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 2), (6, 2), (4, 4), (8, 1)])
@pytest.mark.parametrize(
    ("num_history", "num_queries"), [(0, 2), (0, 33), (0, 300), (1, 2), (70, 129), (300, 5)]
)
def test_attention_in_blocks_is_the_softmax_over_all_visible_keys(
    num_history: int,
    num_queries: int,
    num_heads: int,
    num_kv_heads: int,
    limit: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill_attention, "_CPU_PAIRS", limit)
    monkeypatch.setattr(prefill_attention, "_BLOCK_QUERIES", 64)
    generator = torch.Generator().manual_seed(num_queries)
    num_keys = num_history + num_queries
    query = torch.randn(1, num_heads, num_queries, 16, generator=generator).to(dtype)
    key, value = torch.randn(2, 1, num_kv_heads, num_keys, 16, generator=generator).to(dtype)
    group = num_heads // num_kv_heads
    logits = query.double() @ key.double().repeat_interleave(group, 1).mT * 0.25
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_history)
    weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
    expected = weights @ value.double().repeat_interleave(group, 1)
    tolerance = 2e-6 if dtype is torch.float32 else 3e-2
    attended = prefill_attention.causal_attention(query, key, value, 0.25)
    assert attended.dtype == dtype
    torch.testing.assert_close(attended.double(), expected, atol=tolerance, rtol=tolerance)
    # What a GPU runs.
    masked = prefill_attention._masked_attention(query, key, value, 0.25, LayerSpec())
    torch.testing.assert_close(masked.double(), expected, atol=tolerance, rtol=tolerance)
    if num_history == 0:
        monkeypatch.setattr(prefill_attention, "_CUDA_PAIRS", limit)
        by_heads = prefill_attention._attention_by_heads(query, key, value, is_causal=True, scale=0.25)
        torch.testing.assert_close(by_heads.double(), expected, atol=tolerance, rtol=tolerance)


def test_a_pass_within_another_ones_layer_changes_neither(tiny_model_dir: TinyModelDir) -> None:
    model = load(tiny_model_dir("llama"))
    outer_ids, inner_ids = some_ids(60), some_ids(25, seed=1)
    alone = [model.prefill(token_ids, start=0, observer=Recorder()) for token_ids in (outer_ids, inner_ids)]
    inner: list[Tensor] = []

    class Interrupted(Recorder):
        def layer_done(self, layer: int, *arguments: Any) -> None:
            super().layer_done(layer, *arguments)
            inner.append(model.prefill(inner_ids, start=0, observer=Recorder()))

    outer = model.prefill(outer_ids, start=0, observer=Interrupted())
    assert torch.equal(outer, alone[0])
    assert len(inner) == model.spec.num_layers
    assert all(torch.equal(logits, alone[1]) for logits in inner)


@pytest.mark.parametrize("family", ["llama", "gemma", "phi3"])
def test_a_twin_runs_passes_of_its_own_over_the_same_weights(
    tiny_model_dir: TinyModelDir, family: str
) -> None:
    model = load_model(tiny_model_dir(family))
    twin = model.twin()
    weights, theirs = model._model.state_dict(), twin._model.state_dict()
    assert {name: t.data_ptr() for name, t in weights.items()} == {n: t.data_ptr() for n, t in theirs.items()}
    token_ids = torch.randint(1, model.spec.vocab_size, (40,), generator=torch.manual_seed(3))
    expected = model.prefill(token_ids, start=0, observer=Recorder())
    with ThreadPoolExecutor(2) as threads:
        passes = [
            threads.submit(instance.prefill, token_ids, start=0, observer=Recorder())
            for _ in range(10)
            for instance in (model, twin)
        ]
        assert all(torch.equal(each.result(timeout=60), expected) for each in passes)


@pytest.mark.parametrize("num_history", [1, 255, 300])
def test_long_pieces_after_history_equal_one_run(tiny_model_dir: TinyModelDir, num_history: int) -> None:
    model = load(tiny_model_dir("llama"))
    token_ids = some_ids(num_history + 513)
    expected = model.prefill(token_ids, start=0, observer=Recorder())
    first = Recorder()
    model.prefill(token_ids[:num_history], start=0, observer=first)
    logits = model.prefill(token_ids[num_history:], start=num_history, observer=Recorder(first.kv))
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


def test_a_batch_of_sequences_of_different_lengths_decodes_like_each_alone(
    tiny_model_dir: TinyModelDir,
) -> None:
    folder = tiny_model_dir("qwen3")
    model = load(folder)
    prompts = [some_ids(n, seed=n) for n in (1, 7, 20)]
    recorders = [Recorder() for _ in prompts]
    for prompt, recorder in zip(prompts, recorders, strict=True):
        model.prefill(prompt, start=0, observer=recorder)
    decode = DenseAttention([recorder.kv for recorder in recorders])
    following = torch.tensor([11, 12, 13])
    logits = model.decode(following, torch.tensor([1, 7, 20]), attention=decode)
    assert logits.shape == (3, model.spec.vocab_size)
    for row, prompt in enumerate(prompts):
        expected = own_logits(folder, torch.cat([prompt, following[row : row + 1]]), dtype=torch.float32)[-1]
        torch.testing.assert_close(logits[row], expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("family", "group_size"), [("llama-mha", 1), ("llama", 4), ("llama-mqa", 8)])
def test_the_observer_gets_grouped_queries_and_rows_that_give_the_layers_attention(
    tiny_model_dir: TinyModelDir, family: str, group_size: int
) -> None:
    model = load(tiny_model_dir(family))
    recorder = Recorder()
    model.prefill(some_ids(9), start=0, observer=recorder)
    spec = model.spec
    assert spec.group_size == group_size
    assert len(recorder.kv) == spec.num_layers
    for queries, (keys, values) in zip(recorder.queries, recorder.kv, strict=True):
        assert queries.shape == (spec.num_kv_heads, group_size, 9, spec.head_dim)
        assert keys.shape == values.shape == (spec.num_kv_heads, 9, spec.head_dim)
    assert recorder.scaling == [spec.head_dim**-0.5] * spec.num_layers


def test_the_models_own_softmax_scale_reaches_observer_and_attention(tiny_model_dir: TinyModelDir) -> None:
    recorder = Recorder()
    load(tiny_model_dir("granite")).prefill(some_ids(3), start=0, observer=recorder)
    assert recorder.scaling == [0.3, 0.3]


class Refusing(Recorder):
    """Cancels at a layer, before or after its attention."""

    def __init__(self, layer: int, where: str) -> None:
        super().__init__()
        self._layer = layer
        self._where = where

    def history(self, layer: int) -> LayerKV | None:
        if (layer, self._where) == (self._layer, "history"):
            raise Cancelled("the client left")
        return None

    def layer_done(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        if (layer, self._where) == (self._layer, "layer_done"):
            raise Cancelled("the client left")
        super().layer_done(layer, queries, keys, values, scaling)


@pytest.mark.parametrize("where", ["history", "layer_done"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_an_observer_that_raises_ends_the_pass_there_and_leaves_the_model_usable(
    tiny_model_dir: TinyModelDir, layer: int, where: str
) -> None:
    model = load(tiny_model_dir("llama-mqa"))
    token_ids = some_ids(12)
    expected = model.prefill(token_ids, start=0, observer=Recorder())
    refusing = Refusing(layer, where)
    with pytest.raises(Cancelled, match="the client left"):
        model.prefill(token_ids, start=0, observer=refusing)
    assert len(refusing.kv) == layer
    torch.testing.assert_close(model.prefill(token_ids, start=0, observer=Recorder()), expected)


def test_history_of_another_length_than_the_start_is_an_error(tiny_model_dir: TinyModelDir) -> None:
    model = load(tiny_model_dir("llama"))
    first = Recorder()
    model.prefill(some_ids(5), start=0, observer=first)
    for start, history in ((4, first.kv), (5, None), (0, first.kv)):
        with pytest.raises(AssertionError, match="history has"):
            model.prefill(some_ids(3), start=start, observer=Recorder(history))


def test_a_prompt_beyond_the_window_is_refused(tiny_model_dir: TinyModelDir) -> None:
    model = load_model(tiny_model_dir("llama"), device="cpu", max_model_len=10)
    model.prefill(some_ids(10), start=0, observer=Recorder())
    with pytest.raises(ContextLengthExceeded, match="11 tokens"):
        model.prefill(some_ids(11), start=0, observer=Recorder())


def test_results_need_no_gradient(tiny_model_dir: TinyModelDir) -> None:
    logits = load(tiny_model_dir("llama")).prefill(some_ids(2), start=0, observer=Recorder())
    assert logits.is_inference()
    assert not logits.requires_grad
