"""A plain Llama in torch for training the demo model; reads and writes transformers folders.

Serving does not use this class; it loads the exported folder with transformers. Training needs three things
that transformers' class does not offer: bf16 autocast with causal blocks on a CPU, a last layer that runs
only where there is a loss, and the structured initialisation.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kvferry.shared.errors import ConfigurationError
from kvferry.tools.recall.attention import causal_attention
from kvferry.tools.recall.elementwise import rms_norm, rotate
from kvferry.tools.recall.vocabulary import BOS_ID, END_ID, PAD_ID, VOCABULARY

_CONSTANT_FEATURE = 4.0
"""Embedding dimension 0 at initialisation, in standard deviations of the other dimensions."""
_SHARPNESS = 20.0
"""Score of a fixed-offset head at its offset, a frequency."""
_NUM_FREQUENCIES = 6
"""Rotary pairs, those of highest frequency, that fixed-offset heads use."""


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """Shape of the network; the defaults are the shipped model's."""

    hidden_size: int = 256
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 512
    vocab_size: int = len(VOCABULARY)
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigurationError(
                f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.vocab_size < len(VOCABULARY):
            raise ConfigurationError(f"vocab_size {self.vocab_size} must be at least {len(VOCABULARY)}")

    def to_transformers(self) -> dict[str, object]:
        """Return the fields of the folder's config.json."""
        fields = asdict(self)
        renamed = {
            "num_hidden_layers": fields.pop("num_layers"),
            "num_attention_heads": fields.pop("num_heads"),
            "num_key_value_heads": fields.pop("num_kv_heads"),
        }
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **fields,
            **renamed,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": BOS_ID,
            "eos_token_id": END_ID,
            "pad_token_id": PAD_ID,
            "torch_dtype": "float16",
        }

    @classmethod
    def from_transformers(cls, fields: dict[str, object]) -> NetworkConfig:
        """Read a config.json that `to_transformers` wrote."""
        names = {
            "num_layers": "num_hidden_layers",
            "num_heads": "num_attention_heads",
            "num_kv_heads": "num_key_value_heads",
        }
        return cls(**{n: fields[names.get(n, n)] for n in cls.__dataclass_fields__})  # type: ignore[arg-type]


def _masked_attention(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Compute explicit grouped attention.

    Args: queries `[B, H_kv, G, S, D]`, already scaled; keys and values `[B, H_kv, T, D]`; bias `[..., S, T]`.

    On a CPU no fused kernel that takes a mask is fast; two batched matrix products in bf16 are.
    """
    b, h, g, s, d = queries.shape
    scores = torch.bmm(queries.reshape(b * h, g * s, d), keys.reshape(b * h, -1, d).transpose(1, 2))
    scores = scores.view(b, h, g, s, -1) + bias
    weights = torch.softmax(scores, -1, dtype=scores.dtype)
    return torch.bmm(weights.view(b * h, g * s, -1), values.reshape(b * h, -1, d)).view(b, h, g, s, d)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self._eps)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; parameter names are transformers' own."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        c = self._config = config
        self.q_proj = nn.Linear(c.hidden_size, c.num_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> Tensor:
        """Attend from positions `[B, S]`, or from everywhere, over h `[B, T, hidden]`: `[B, S, hidden]`."""
        c, (b, t, _) = self._config, h.shape
        keys = self.k_proj(h).view(b, t, c.num_kv_heads, c.head_dim).transpose(1, 2)
        values = self.v_proj(h).view(b, t, c.num_kv_heads, c.head_dim).transpose(1, 2)
        keys = rotate(keys, cos, sin)
        if positions is not None:
            h = _gather_rows(h, positions)
            cos, sin = (_gather_rows(x[:, 0], positions)[:, None] for x in (cos, sin))  # [B, 1, S, D]
        queries = self.q_proj(h).view(b, h.shape[1], c.num_heads, c.head_dim).transpose(1, 2)
        out: Tensor = self.o_proj(_attend(rotate(queries, cos, sin), keys, values, positions))
        return out


class MLP(nn.Module):
    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))
        return out


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and around a residual."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None) -> Tensor:
        """Run the layer on x `[B, T, hidden]`; with positions `[B, S]` only those rows come out."""
        attended = self.self_attn(self.input_layernorm(x), cos, sin, positions)
        x = (x if positions is None else _gather_rows(x, positions)) + attended
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def _gather_rows(x: Tensor, positions: Tensor) -> Tensor:
    return x.gather(1, positions[..., None].expand(-1, -1, x.shape[-1]))


def _attend(queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor | None) -> Tensor:
    """Attend with queries `[B, H, S, D]` to keys and values `[B, H_kv, T, D]`; returns `[B, S, H * D]`."""
    b, heads, s, d = queries.shape
    h_kv, t = keys.shape[1], keys.shape[2]
    if positions is None:
        out = causal_attention(queries, keys, values)
    else:
        later = torch.arange(t, device=keys.device) > positions[..., None]  # [B, S, T]
        bias = torch.zeros_like(later, dtype=queries.dtype).masked_fill_(later, -math.inf)
        grouped = (queries * d**-0.5).view(b, h_kv, heads // h_kv, s, d)
        out = _masked_attention(grouped, keys, values, bias[:, None, None]).view(b, heads, s, d)
    return out.transpose(1, 2).reshape(b, s, heads * d)


class RecallNetwork(nn.Module):
    """Decoder-only Llama with tied embeddings."""

    def __init__(self, config: NetworkConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self._initialise(generator)

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator | None) -> None:
        c = self.config
        for name, parameter in self.named_parameters():
            if parameter.dim() != 2:
                continue
            std = 0.05 if "embed" in name else 0.5 * c.hidden_size**-0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std *= (2 * c.num_layers) ** -0.5
            parameter.normal_(0, std, generator=generator)

    @torch.no_grad()
    def structure_positions(self) -> None:
        """Start layer 0's query heads as fixed-offset heads: head h attends to token p - 1 - h. Embedding
        dimension 0 becomes a constant. Training may undo all of it."""
        self.embed_tokens.weight[:, 0] = _CONSTANT_FEATURE * 0.05
        constant = torch.zeros(self.config.hidden_size)
        constant[0] = 1 / self._layer(0).input_layernorm(self.embed_tokens.weight)[:, 0].mean()
        self._look_back(0, constant, nearest=1)

    @torch.no_grad()
    def grown(
        self, num_layers: int, token_ids: Tensor, *, generator: torch.Generator | None = None
    ) -> RecallNetwork:
        """Make a deeper network that computes the same: new layers, which add nothing yet, after the first.

        Their query heads are fixed-offset heads, too, and look farther back: of 8 heads a layer, the first
        new one's at tokens p - 9 to p - 16, the next one's at p - 17 to p - 24. Values are those of the layer
        that follows, output projections zero (block expansion, Wu et al. 2024,
        https://arxiv.org/abs/2401.02415).

        Args:
            token_ids: `[B, T]`, text: the first layer's output for it shows what is left of a constant
                feature, which is found by least squares.

        Raises:
            ConfigurationError: num_layers is below the number there is.
        """
        num_old = self.config.num_layers
        if num_layers < num_old:
            raise ConfigurationError(f"num_layers is {num_layers}; a network of {num_old} layers only grows")
        deeper = RecallNetwork(replace(self.config, num_layers=num_layers), generator=generator)
        deeper.embed_tokens.load_state_dict(self.embed_tokens.state_dict())
        deeper.norm.load_state_dict(self.norm.state_dict())
        num_new = num_layers - num_old
        for i, layer in enumerate(self.layers):
            deeper.layers[i + num_new if i else 0].load_state_dict(layer.state_dict())
        following = self._layer(min(1, num_old - 1))
        x = self.embed_tokens(token_ids)
        x = self._layer(0)(x, *self._rotary(token_ids, None, x.dtype))
        seen = following.input_layernorm(x).flatten(0, 1)
        moments = seen.T @ seen + 1e-3 * len(seen) * torch.eye(self.config.hidden_size)
        constant = torch.linalg.solve(moments, seen.sum(0))
        for i in range(1, num_new + 1):
            added = deeper._layer(i)
            added.input_layernorm.load_state_dict(following.input_layernorm.state_dict())
            added.self_attn.v_proj.load_state_dict(following.self_attn.v_proj.state_dict())
            nn.init.zeros_(added.self_attn.o_proj.weight)
            nn.init.zeros_(added.mlp.down_proj.weight)
            deeper._look_back(i, constant, nearest=1 + self.config.num_heads * i)
        return deeper

    def _look_back(self, index: int, constant: Tensor, *, nearest: int) -> None:
        """Make head h of a layer attend to token p - nearest - h.

        Keys carry a constant unrotated in the rotary pairs of highest frequency, queries carry it rotated
        back by the offset, so the score peaks at that distance:
        `score(i, j) ~ sum_f cos((i - j - offset) * theta_f)`.

        Args: constant: `[hidden]`, whose product with a word that the layer sees is about 1.
        """
        c = self.config
        half = c.head_dim // 2
        attention = self._layer(index).self_attn
        row = math.sqrt(_SHARPNESS * math.sqrt(c.head_dim)) * constant
        keys = attention.k_proj.weight.view(c.num_kv_heads, c.head_dim, -1)
        queries = attention.q_proj.weight.view(c.num_heads, c.head_dim, -1)
        used = constant != 0  # the others' weights stay as they were drawn
        for i in range(_NUM_FREQUENCIES):
            angle = c.rope_theta ** (-2 * i / c.head_dim)
            keys[:, i, used], keys[:, i + half, used] = row[used], 0
            for head in range(c.num_heads):
                offset = nearest + head
                queries[head, i, used] = row[used] * math.cos(offset * angle)
                queries[head, i + half, used] = -row[used] * math.sin(offset * angle)

    def _layer(self, index: int) -> DecoderLayer:
        layer = self.layers[index]
        assert isinstance(layer, DecoderLayer)
        return layer

    def hidden(
        self, token_ids: Tensor, positions: Tensor | None = None, *, position_ids: Tensor | None = None
    ) -> Tensor:
        """Compute the last hidden states of token_ids `[B, T]`.

        Args:
            position_ids: rotary positions, int64 `[B, T]`, instead of 0 .. T - 1.

        Returns: `[B, T, hidden]`, or `[B, S, hidden]` if positions `[B, S]` are given.
        """
        x = self.embed_tokens(token_ids)
        if torch.is_autocast_enabled(token_ids.device.type):
            x = x.to(torch.bfloat16)
        cos, sin = self._rotary(token_ids, position_ids, x.dtype)
        for layer in self.layers[:-1]:
            x = layer(x, cos, sin)
        out: Tensor = self.norm(self.layers[-1](x, cos, sin, positions))
        return out

    def _rotary(
        self, token_ids: Tensor, position_ids: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and sines `[B, 1, T, D]` of token_ids' positions."""
        c = self.config
        half = torch.arange(0, c.head_dim, 2, device=token_ids.device).float() / c.head_dim
        if position_ids is None:
            position_ids = torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids)
        angles = position_ids.float()[:, None, :, None] * c.rope_theta**-half  # [B, 1, T, D / 2]
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def forward(self, token_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Compute logits; arguments as in `hidden`."""
        return F.linear(self.hidden(token_ids, positions), self.embed_tokens.weight)


def save_folder(network: RecallNetwork, folder: Path) -> None:
    """Write config.json and model.safetensors in fp16 (bf16 moves logits by more than one)."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{n}": p.detach().cpu().half().contiguous() for n, p in network.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(network.config.to_transformers(), indent=1)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def load_folder(folder: Path) -> RecallNetwork:
    """Read a folder that `save_folder` wrote, in fp32."""
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    network = RecallNetwork(NetworkConfig.from_transformers(fields))
    tensors = load_file(folder / "model.safetensors")
    network.load_state_dict({n.removeprefix("model."): t.float() for n, t in tensors.items()})
    return network
