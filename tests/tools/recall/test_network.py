"""The training network is the Llama that transformers loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from kvferry.shared.errors import ConfigurationError
from kvferry.tools.recall.conversations import Mixture, draw_batch
from kvferry.tools.recall.network import NetworkConfig, RecallNetwork, load_folder, save_folder
from kvferry.tools.recall.questions import UNKNOWN_ANSWER
from kvferry.tools.recall.small_talk import SMALL_TALK
from kvferry.tools.recall.train import renew_embeddings, unused_words
from kvferry.tools.recall.vocabulary import PAD_ID, VARIABLES, VOCABULARY

SMALL = NetworkConfig(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=96)


def structured(config: NetworkConfig = SMALL, seed: int = 3) -> RecallNetwork:
    network = RecallNetwork(config, generator=torch.Generator().manual_seed(seed))
    network.structure_positions()
    return network


def some_tokens(num_rows: int, num_tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(7, len(VOCABULARY), (num_rows, num_tokens), generator=generator)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("network")
    save_folder(structured(), path)
    return path


@torch.no_grad()
def test_exported_folder_gives_the_same_logits_through_transformers(folder: Path) -> None:
    token_ids = some_tokens(2, 150)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(loaded).__name__ == "LlamaForCausalLM"
    # Same fp16 weights on both sides, so only the order of fp32 operations differs.
    torch.testing.assert_close(loaded(token_ids).logits, load_folder(folder)(token_ids), atol=2e-3, rtol=1e-3)


@torch.no_grad()
def test_export_in_fp16_moves_logits_little(folder: Path) -> None:
    token_ids = some_tokens(2, 150)
    torch.testing.assert_close(load_folder(folder)(token_ids), structured()(token_ids), atol=0.05, rtol=0.02)


@torch.no_grad()
def test_shipped_model_gives_the_same_logits_through_transformers(demo_model_dir: Path) -> None:
    token_ids = some_tokens(1, 300)
    loaded = AutoModelForCausalLM.from_pretrained(demo_model_dir, dtype=torch.float32)
    ours = load_folder(demo_model_dir)
    difference = (loaded(token_ids).logits - ours(token_ids)).abs().max()
    assert difference < 0.05
    assert sum(f.stat().st_size for f in demo_model_dir.iterdir()) <= 16 * 2**20


@torch.no_grad()
def test_last_layer_at_positions_equals_those_rows_of_all() -> None:
    network, token_ids = structured(), some_tokens(2, 70)
    positions = torch.tensor([[0, 3, 69], [12, 12, 5]])
    expected = network(token_ids).gather(1, positions[..., None].expand(-1, -1, len(VOCABULARY)))
    torch.testing.assert_close(network(token_ids, positions), expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_positions_with_gaps_are_those_that_transformers_would_use(folder: Path) -> None:
    token_ids = some_tokens(2, 60)
    position_ids = torch.arange(60).repeat(2, 1)
    position_ids[0, 20:] += 500
    position_ids[1, 7:] += 31
    last = torch.full((2, 1), 59)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    network = load_folder(folder)
    hidden = network.hidden(token_ids, last, position_ids=position_ids)
    ours = F.linear(hidden, network.embed_tokens.weight)[:, 0]
    expected = loaded(token_ids, position_ids=position_ids).logits[:, -1]
    torch.testing.assert_close(ours, expected, atol=2e-3, rtol=1e-3)
    assert not torch.allclose(ours, network(token_ids, last)[:, 0], atol=2e-3, rtol=1e-3)


def attention_back(network: RecallNetwork, index: int, token_ids: torch.Tensor) -> torch.Tensor:
    """Mean attention weight of a layer's heads by distance, `[H, 32]`; what layer 0 makes of the tokens
    `[1, T]` is all that later layers see."""
    config, num_tokens = network.config, token_ids.shape[1]
    half = config.head_dim // 2
    frequencies = config.rope_theta ** (-torch.arange(half) / half)
    angles = torch.outer(torch.arange(float(num_tokens)), frequencies).repeat(1, 2)
    x = network.embed_tokens(token_ids)
    if index:
        x = network.layers[0](x, angles.cos()[None, None], angles.sin()[None, None])
    layer = network.layers[index]
    hidden = layer.input_layernorm(x)  # type: ignore[operator,union-attr]

    def rotated(projection: torch.nn.Linear, heads: int) -> torch.Tensor:
        x = projection(hidden).view(num_tokens, heads, config.head_dim).transpose(0, 1)
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * angles.cos() + turned * angles.sin()

    attention = layer.self_attn
    queries = rotated(attention.q_proj, config.num_heads)  # type: ignore[union-attr,arg-type]
    keys = rotated(attention.k_proj, config.num_kv_heads)  # type: ignore[union-attr,arg-type]
    keys = keys.repeat_interleave(config.num_heads // config.num_kv_heads, 0)
    later = torch.ones(num_tokens, num_tokens).triu(1).bool()
    weights = (queries @ keys.mT * config.head_dim**-0.5).masked_fill(later, -torch.inf).softmax(-1)
    return torch.stack([weights.diagonal(-back, 1, 2)[:, 40:].mean(-1) for back in range(32)], 1)


@torch.no_grad()
def test_structured_heads_attend_to_their_own_offset() -> None:
    """Head h of layer 0 puts most of its weight on token p - 1 - h, from the start."""
    weights = attention_back(structured(NetworkConfig()), 0, some_tokens(1, 120))
    for head in range(8):
        assert weights[head, 1 + head] > 0.9


@torch.no_grad()
def test_words_that_training_never_saw_are_found_and_drawn_anew() -> None:
    network, generator = structured(), torch.Generator().manual_seed(1)
    weight = network.embed_tokens.weight
    never = torch.tensor([PAD_ID, 5, 77, 600])
    direction = torch.randn(weight.shape[1], generator=generator)
    weight[never] = direction + 0.1 * torch.randn(4, weight.shape[1], generator=generator)
    before = weight.detach().clone()
    assert unused_words(network).tolist() == never.tolist()
    renew_embeddings(network, never, generator)
    seen = torch.ones(len(weight), dtype=torch.bool).index_fill(0, never, False)
    assert weight[seen].equal(before[seen])
    assert unused_words(network).tolist() == [PAD_ID]


@torch.no_grad()
def test_the_shipped_model_can_tell_its_words_apart(demo_model_dir: Path) -> None:
    unused = {VOCABULARY[i] for i in unused_words(load_folder(demo_model_dir)).tolist()}
    answers = " ".join([UNKNOWN_ANSWER, *(talk.reply for talk in SMALL_TALK)])
    assert unused.isdisjoint([*VARIABLES, *answers.split()])


def test_heads_must_divide_into_kv_heads() -> None:
    with pytest.raises(ConfigurationError, match="num_heads 8 must be a multiple of num_kv_heads 3"):
        NetworkConfig(num_kv_heads=3)


@torch.no_grad()
@pytest.mark.parametrize("num_new", [0, 1, 2])
def test_a_grown_network_computes_the_same_and_looks_farther_back(demo_model_dir: Path, num_new: int) -> None:
    network = load_folder(demo_model_dir)
    text, _ = draw_batch("grown", 16, 200, Mixture())
    num_layers = network.config.num_layers + num_new
    grown = network.grown(num_layers, text, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(grown(text[:2]), network(text[:2]), atol=0, rtol=0)
    for i in range(1, num_new + 1):
        weights = attention_back(grown, i, text[:1])
        for head in range(8):
            assert weights[head, 1 + 8 * i + head] > 0.7


def test_a_network_does_not_shrink() -> None:
    with pytest.raises(ConfigurationError, match="num_layers is 1; a network of 2 layers only grows"):
        structured().grown(1, some_tokens(1, 20))
