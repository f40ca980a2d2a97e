"""What codes of keys and values cost a real model: groups of tokens, rotations, FP8.

    python benchmarks/key_quantisers.py --model FOLDER [--length 2048] [--examples 24] [--tasks fact,long]
                                        [--variants K4/64,...] [--output FILE]

Every token is kept. Of each question about a real document (`benchmarks/real`), the full cache's greedy
answer is fed to a cache whose prompt's keys or values were quantised and restored, and compared with the
full cache by divergence, token by token. So all variants see the same tokens, and their KL is paired.

A variant is K or V, bits, and how: `K4/64` has a scale and a minimum of 16 bits for each channel and 64
tokens, `K4/all` for each channel; `V4` for each token. `K4/64+first4` keeps the first 4 tokens exact,
`K4/64+hadamard` rotates each head's channels first, `K4/64+unrotated` quantises keys before rotary positions.
`K8/fp8` and `V8/fp8` are FP8 E4M3 with one scale a head. "Bits a value" has the headers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from kvferry.kernels.quantise import dequantise_rows, quantise_rows
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.model.bridge import TransformersModel
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.tools.evaluation.collection import read_collection
from kvferry.tools.evaluation.conversation import tokenize
from kvferry.tools.evaluation.provenance import commit
from kvferry.tools.oracle import CapturedPrompt, OneProcessGenerator

REAL = Path(__file__).parent / "real"
MAX_NEW_TOKENS = 120
VARIANTS = (
    "K4/all,K4/128,K4/64,K4/32,K4/64+first4,K4/64+hadamard,K4/64+unrotated,K8/fp8,"
    "K2/all,K2/128,K2/64,K2/32,K2/64+hadamard,K2/64+unrotated,V4,V2,V8/fp8"
)
FP8_MOST = 448.0
"""The largest value of E4M3."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What is done with a prompt's keys or values.

    Attributes:
        name: as on the command line.
        bits: of a value with its part of the headers, for a head_dim.
        change: a layer with what is restored.
    """

    name: str
    bits: Callable[[int], float]
    change: Callable[[LayerInputs], LayerInputs]


def read_variant(name: str) -> Variant:
    """Return a variant by its name. Raises: ValueError: it is none."""
    base, *extras = name.split("+")
    kind, width, how = base[0], int(base[1]), base[3:]
    if kind not in "KV" or set(extras) - {"first4", "hadamard", "unrotated"}:
        raise ValueError(f"variant {name!r} is not known")
    if how == "fp8":
        restore, bits = fp8, lambda head_dim: 8.0
    elif kind == "V":
        restore, bits = (lambda rows: by_token(rows, width)), (lambda head_dim: width + 32 / head_dim)
    else:
        group = 0 if how == "all" else int(how)
        restore = lambda rows: by_channel(rows, width, group)  # noqa: E731
        bits = lambda head_dim: width + (32 / group if group else 0.0)  # noqa: E731

    def change(inputs: LayerInputs) -> LayerInputs:
        if kind == "V":
            return replace(inputs, values=restore(inputs.values.float()).to(inputs.values.dtype))
        keys = inputs.keys.float()
        if "unrotated" in extras:
            assert inputs.unrotate is not None
            found = rotated(inputs.unrotate, keys, restore(inputs.unrotate(inputs.keys)))
        elif "hadamard" in extras:
            matrix = hadamard(keys.shape[2])
            found = restore(keys @ matrix) @ matrix.T
        else:
            found = restore(keys)
        if "first4" in extras:
            found[:, :4] = keys[:, :4]
        return replace(inputs, keys=found.to(inputs.keys.dtype))

    return Variant(name=name, bits=bits, change=change)


def by_channel(keys: Tensor, bits: int, group: int) -> Tensor:
    """Keys `[H_kv, T, D]` with a scale for each channel and `group` tokens; 0: all of them."""
    parts = torch.split(keys, group or keys.shape[1], 1)
    return torch.cat([dequantise_rows(*quantise_rows(part.mT, bits, half=True)).mT for part in parts], 1)


def by_token(values: Tensor, bits: int) -> Tensor:
    """Values `[H_kv, T, D]` with a scale for each token."""
    return dequantise_rows(*quantise_rows(values, bits, half=True))


def fp8(rows: Tensor) -> Tensor:
    """Rows `[H_kv, T, D]` as E4M3, each head's largest value at the end of its range."""
    scale = rows.abs().amax((1, 2), keepdim=True).clamp(min=1e-12) / FP8_MOST
    return (rows / scale).to(torch.float8_e4m3fn).float() * scale


def hadamard(size: int) -> Tensor:
    """The orthonormal Hadamard matrix of a power of two."""
    assert size & (size - 1) == 0, size
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


def rotated(unrotate: Callable[[Tensor], Tensor], keys: Tensor, unrotated: Tensor) -> Tensor:
    """Keys at their positions again. What undoes rotary positions is a rotation; its transpose undoes it.

    Args: keys: post-RoPE, for the shape; unrotated: to be rotated.
    """
    with torch.inference_mode(False), torch.enable_grad():
        _, transpose = torch.func.vjp(unrotate, keys.clone())
        (found,) = transpose(unrotated.clone())
    return found.detach()


def fed(generator: OneProcessGenerator, captured: CapturedPrompt, tokens: Sequence[int]) -> Tensor:
    """Log-probabilities `[n, V]` before each token of an answer but the first."""
    full = generator.compress(captured, plan=plan_for("full"), max_new_tokens=MAX_NEW_TOKENS)
    return torch.stack([full.step(token) for token in tokens[:-1]]).log_softmax(-1)


def greedy(model: TransformersModel, generator: OneProcessGenerator, captured: CapturedPrompt) -> list[int]:
    """The full cache's answer."""
    assert captured.logits is not None
    full = generator.compress(captured, plan=plan_for("full"), max_new_tokens=MAX_NEW_TOKENS)
    tokens = [int(captured.logits.argmax())]
    while tokens[-1] not in model.spec.eos_token_ids and len(tokens) < MAX_NEW_TOKENS:
        tokens.append(int(full.step(tokens[-1]).argmax()))
    return tokens


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table; write it with --output."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--examples", type=int, default=24, help="questions of each task")
    parser.add_argument("--tasks", default="fact,long")
    parser.add_argument("--variants", default=VARIANTS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    model = load_model(options.model, device="cpu", dtype=options.dtype)
    tokenizer, generator = ChatTokenizer.load(options.model), OneProcessGenerator(model)
    variants = [read_variant(name) for name in options.variants.split(",")]
    found = read_collection(
        REAL, lengths=(options.length,), count_tokens=lambda text: len(tokenizer.encode(text))
    )
    examples = []
    for task in options.tasks.split(","):
        every = found[task, options.length]
        examples += every[:: max(1, len(every) // options.examples)][: options.examples]
    divergences: dict[str, list[float]] = {variant.name: [] for variant in variants}
    num_same = dict.fromkeys(divergences, 0)
    with torch.inference_mode():
        for example in tqdm(examples, disable=None):
            captured = generator.capture(list(tokenize(example, tokenizer).turns[-1].prompt_token_ids))
            tokens = greedy(model, generator, captured)
            if len(tokens) < 2:
                continue
            wanted = fed(generator, captured, tokens)
            for variant in variants:
                changed = replace(captured, layers=tuple(map(variant.change, captured.layers)))
                got = fed(generator, changed, tokens)
                kl = (wanted.exp() * (wanted - got)).sum(-1).clamp(min=0)
                divergences[variant.name].append(float(kl.mean()))
                num_same[variant.name] += bool((got.argmax(-1) == torch.tensor(tokens[1:])).all())
    rows = [
        {
            "variant": variant.name,
            "bits": variant.bits(model.spec.head_dim),
            "kl": statistics.fmean(divergences[variant.name]),
            "median_kl": statistics.median(divergences[variant.name]),
            "same_percent": 100 * num_same[variant.name] / len(divergences[variant.name]),
            "n": len(divergences[variant.name]),
        }
        for variant in variants
    ]
    lines = ["| variant | bits a value | KL, mean | KL, median | same answer |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['variant']} | {row['bits']:.2f} | {row['kl']:.4f} | {row['median_kl']:.4f} | "
        f"{row['same_percent']:.0f} % |"
        for row in rows
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    if options.output:
        result = {
            "command": "python benchmarks/key_quantisers.py " + " ".join(arguments or sys.argv[1:]),
            "commit": commit(),
            "model": Path(options.model).name,
            "length": options.length,
            "rows": rows,
        }
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
