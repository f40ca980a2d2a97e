"""The public kvpress release on the prompts of `kvferry eval`: divergence from the full cache, and answers.

    make kvpress      an environment with kvpress, which needs another transformers than kvferry
    .venv-kvpress/bin/python benchmarks/kvpress_peer.py PROMPTS --model FOLDER --output FILE
        [--known PRESSES] [--unknown PRESSES] [--ratios 0.75,0.9,0.95,0.975] [--dtype float32]

`kvpress_prompts.py` writes PROMPTS; `kvpress_table.py` sets FILE beside kvferry's records. A press is written
NAME:PARAMETER=VALUE, one around another NAME(PRESS): `adakv(snapkv:window_size=32):alpha_safeguard=0.3`.
--known are those that compress a prompt with its question, --unknown those that compress a document before
any question; the rest of the prompt is then fed. A run that was interrupted is resumed.

    document ──capture──► question ──capture──► presses ──► kept rows ──► answer fed ──► KL, greedy answer
                 │                                              ▲
                 └───────────────────────► presses ─────────────┘  (question unknown: fed after it)

Measured as `kvferry eval` does: KL(full || press) in nats before each token of the full cache's answer, which
is fed; where the question was known the first token comes from the full prompt's logits.

Every press runs its own code (`forward_hook`, with what each attention layer was given and has cached), but
not in a forward pass of its own: prefill is dense, so one pass serves all presses, and a document is run once
for all of its questions. A press that runs the model itself (KVzip) does so once for all ratios. What is kept
is attended under masks, layer by layer and head by head, in place of kvpress's search for keys that no query
matches. Rows that a head drops (AdaKV) do not count, though kvpress itself stores them.

Imports nothing of kvferry.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvpress  # pyright: ignore[reportMissingImports]
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

KNOWN = (
    "snapkv,snapkv:window_size=32:kernel_size=7,adakv(snapkv),adakv(snapkv:window_size=32:kernel_size=7),"
    "criticaladakv(snapkv:window_size=32:kernel_size=7),pyramidkv,pyramidkv:window_size=32:kernel_size=7,tova"
)
UNKNOWN = "compactor,adakv(compactor),keydiff,adakv(expected_attention:epsilon=0.01),kvzip"
"""Defaults of kvpress, its registry's own choices, and the settings that are best on real models."""
RATIOS = "0.75,0.9,0.95,0.975"
FULL = "full"
AWARE, AGNOSTIC = "aware", "agnostic"

PRESSES: Mapping[str, Callable[..., Any]] = {
    "chunkkv": kvpress.ChunkKVPress,
    "adakv": kvpress.AdaKVPress,
    "block": kvpress.BlockPress,
    "compactor": kvpress.CompactorPress,
    "criticaladakv": kvpress.CriticalAdaKVPress,
    "criticalkv": kvpress.CriticalKVPress,
    "cur": kvpress.CURPress,
    "expected_attention": kvpress.ExpectedAttentionPress,
    "keydiff": kvpress.KeyDiffPress,
    "knorm": kvpress.KnormPress,
    "kvzip": kvpress.KVzipPress,
    "lagkv": kvpress.LagKVPress,
    "leverage": kvpress.LeverageScorePress,
    "noncausal": kvpress.NonCausalAttnPress,
    "pyramidkv": kvpress.PyramidKVPress,
    "random": kvpress.RandomPress,
    "snapkv": kvpress.SnapKVPress,
    "streamingllm": kvpress.StreamingLLMPress,
    "tova": kvpress.TOVAPress,
}


def make_press(text: str) -> Any:
    """Return a press that drops nothing yet; setting its `compression_ratio` changes that."""
    found = re.fullmatch(r"(\w+)(?:\((.+)\))?((?::\w+=[^:()]+)*)", text)
    if found is None or found[1] not in PRESSES:
        raise SystemExit(
            f"the press {text!r} is unknown; allowed are NAME:PARAMETER=VALUE and NAME(PRESS), and the names "
            f"{', '.join(PRESSES)}"
        )
    params = dict(change.split("=", 1) for change in found[3].split(":") if change)
    given = {name: ast.literal_eval(value) for name, value in params.items()}
    if found[2] is not None:
        given["press"] = make_press(found[2])
    return PRESSES[found[1]](**given)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A line of PROMPTS.

    Attributes:
        example: digest that kvferry knows the question by.
        prompt: token ids, of which the first num_document_tokens are the document's.
        answer: the full cache's greedy answer, as kvferry measured it; not empty.
        eos_token_ids: ids that end an answer.
    """

    example: str
    prompt: list[int]
    num_document_tokens: int
    answer: list[int]
    eos_token_ids: list[int]
    max_new_tokens: int

    @property
    def document(self) -> list[int]:
        return self.prompt[: self.num_document_tokens]


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A prompt of T tokens after a dense pass, of each layer.

    Attributes:
        hidden: what its attention was given, `[1, T, E]`.
        rotary: cosines and sines, `[1, T, D]` each.
        keys, values: `[1, H_kv, T, D]`, keys after the rotary embedding.
        logits: float32 `[V]`, after the last token.
    """

    tokens: Sequence[int]
    hidden: list[Tensor]
    rotary: list[tuple[Tensor, Tensor]]
    keys: list[Tensor]
    values: list[Tensor]
    logits: Tensor


@dataclass(frozen=True, kw_only=True)
class Pressed:
    """What is left of a prompt of num_tokens tokens, of each layer.

    Attributes:
        keys, values: `[H_kv, P, D]`.
        kept: bool `[H_kv, P]`; rows that are not kept fill up a head that keeps fewer than another one.
    """

    num_tokens: int
    keys: list[Tensor]
    values: list[Tensor]
    kept: list[Tensor]

    @property
    def kept_bytes(self) -> int:
        """Of K and V rows in 16 bits."""
        return sum(
            int(kept.sum()) * 4 * keys.shape[2] for kept, keys in zip(self.kept, self.keys, strict=True)
        )

    @property
    def full_bytes(self) -> int:
        return sum(self.num_tokens * 4 * keys.shape[0] * keys.shape[2] for keys in self.keys)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a pressed prompt makes of an answer of n tokens.

    Attributes:
        same: of each of its tokens, whether it is the likeliest here, too.
        kl: of each, nats from the full cache's distribution.
        tokens: the greedy answer.
    """

    same: list[bool]
    kl: list[float]
    tokens: list[int]


class Batch:
    """Pressed prompts of one length that are continued together. A row of the batch is one of them."""

    def __init__(self, peer: Peer, pressed: Sequence[Pressed]) -> None:
        self._peer = peer
        self._next = pressed[0].num_tokens  # the position of the next token, whatever was dropped
        self._cache = DynamicCache()
        self._visible: list[Tensor] = []
        for layer in range(len(peer.attentions)):
            size = max(prompt.keys[layer].shape[1] for prompt in pressed)

            def padded(rows: Tensor, size: int = size) -> Tensor:
                return F.pad(rows, (0, 0, 0, size - rows.shape[1]))

            keys = torch.stack([padded(prompt.keys[layer]) for prompt in pressed])
            values = torch.stack([padded(prompt.values[layer]) for prompt in pressed])
            self._cache.update(keys, values, layer)
            kept = [F.pad(prompt.kept[layer], (0, size - prompt.kept[layer].shape[1])) for prompt in pressed]
            self._visible.append(torch.stack(kept))

    def feed(self, tokens: Sequence[int]) -> Tensor:
        """Append the same tokens to every row; return hidden states `[B, n, E]`."""
        number = len(self._visible[0])
        positions = torch.arange(self._next, self._next + len(tokens)).expand(number, -1)
        self._next += len(tokens)
        return self._append(torch.tensor([list(tokens)] * number), positions)

    def step(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Append a token to each row; return hidden states `[B, E]`."""
        return self._append(torch.tensor(tokens)[:, None], torch.tensor(positions)[:, None])[:, 0]

    def _append(self, tokens: Tensor, positions: Tensor) -> Tensor:
        num_new = tokens.shape[1]
        causal = torch.ones(num_new, num_new, dtype=torch.bool).tril()

        def mask(layer: int) -> Tensor:
            """Of each query head: kept rows, and of the new tokens those before."""
            earlier = self._visible[layer].repeat_interleave(self._peer.group, dim=1)
            shape = (*earlier.shape[:2], num_new)
            return torch.cat([earlier[:, :, None].expand(*shape, -1), causal.expand(*shape, -1)], dim=3)

        with self._peer.before_attention(lambda layer, _: {"attention_mask": mask(layer)}):
            hidden = self._peer.run(tokens, positions, self._cache)
        self._visible = [F.pad(visible, (0, num_new), value=True) for visible in self._visible]
        return hidden

    def forget(self, row: int, number: int) -> None:
        """Hide the last tokens of one row."""
        for visible in self._visible:
            visible[row, :, visible.shape[2] - number :] = False

    def take(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        self._visible = [visible[rows] for visible in self._visible]
        self._cache.batch_select_indices(torch.tensor(rows))


class Peer:
    """A model of transformers with kvpress's presses."""

    def __init__(self, folder: str, dtype: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()
        self._inner = getattr(self.model.model, "language_model", self.model.model)
        self.attentions = [layer.self_attn for layer in self._inner.layers]
        config = self.attentions[0].config
        if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
            raise SystemExit(f"--model is {folder}; kvpress is not measured where layers have a window")
        self.group = config.num_attention_heads // config.num_key_value_heads
        if getattr(config, "head_dim", None) is None:
            config.head_dim = self.attentions[0].head_dim  # CriticalKV reads it; Qwen2's has none
        for module in self.attentions:
            module.rotary_emb = self._inner.rotary_emb  # as a press does around a forward pass

    def run(self, tokens: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        """Return the last hidden states `[B, n, E]` of token ids `[B, n]`."""
        return self._inner(
            input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True
        ).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits `[..., V]`."""
        return self.model.get_output_embeddings()(hidden).float()

    @contextmanager
    def before_attention(self, changes: Callable[[int, dict[str, Any]], Mapping[str, Any]]) -> Iterator[None]:
        """Call a function with each layer's number and its attention's arguments, which it may change."""

        def hook(module: Any, positional: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return positional, {**kwargs, **changes(module.layer_idx, kwargs)}

        hooks = [attention.register_forward_pre_hook(hook, with_kwargs=True) for attention in self.attentions]
        try:
            yield
        finally:
            for handle in hooks:
                handle.remove()

    def capture(self, tokens: Sequence[int], before: Captured | None = None) -> Captured:
        """Run a prompt. Args: before: of its first tokens, which are not run again."""
        start = len(before.tokens) if before else 0
        assert before is None or (list(before.tokens) == list(tokens[:start]) and start < len(tokens))
        given: list[tuple[Tensor, ...]] = []

        def note(_: int, kwargs: dict[str, Any]) -> dict[str, Any]:
            given.append((kwargs["hidden_states"], *kwargs["position_embeddings"]))
            return {}

        cache = filled(before.keys, before.values) if before else DynamicCache()
        with self.before_attention(note):
            positions = torch.arange(start, len(tokens))[None]
            last = self.run(torch.tensor([list(tokens[start:])]), positions, cache)[0, -1]
        if before:
            earlier = [(hidden, *rotary) for hidden, rotary in zip(before.hidden, before.rotary, strict=True)]
            given = [
                tuple(torch.cat(parts, dim=1) for parts in zip(old, new, strict=True))
                for old, new in zip(earlier, given, strict=True)
            ]
        return Captured(
            tokens=tokens,
            hidden=[hidden for hidden, _, _ in given],
            rotary=[(cos, sin) for _, cos, sin in given],
            keys=[layer.keys for layer in cache.layers],
            values=[layer.values for layer in cache.layers],
            logits=self.logits(last),
        )

    def pressed(self, press: Any, ratios: Sequence[float], captured: Captured) -> list[Pressed]:
        """Return what a press leaves of a prompt at each ratio."""
        if hasattr(press, "compress_post"):
            return self._pressed_after(press, ratios, captured)
        found = []
        for ratio in ratios:
            press.compression_ratio = ratio
            press.post_init_from_model(self.model)
            torch.manual_seed(0)
            cache = filled(captured.keys, captured.values)
            for layer, module in enumerate(self.attentions):
                module.masked_key_indices = None
                kwargs = {
                    "hidden_states": captured.hidden[layer],
                    "position_embeddings": captured.rotary[layer],
                    "past_key_values": cache,
                    "cache_position": torch.arange(len(captured.tokens)),
                }
                press.forward_hook(module, [], kwargs, [None, None])
            found.append(self._left(captured, cache))
        return found

    def _pressed_after(self, press: Any, ratios: Sequence[float], captured: Captured) -> list[Pressed]:
        """Return what is left by a press that runs the model itself, then drops (KVzip); it runs once."""
        found: list[Pressed] = []
        cache, compress = DynamicCache(), press.compress_post

        def at_each_ratio(model: Any) -> None:
            for ratio in ratios:
                press.compression_ratio = ratio
                compress(model)
                found.append(self._left(captured, cache))

        press.compress_post = at_each_ratio
        press.compression_ratio = 0.5  # at 0 it would not be called
        with press(self.model):
            self.model.model(input_ids=torch.tensor([list(captured.tokens)]), past_key_values=cache)
        assert len(found) == len(ratios), press
        return found

    def _left(self, captured: Captured, cache: DynamicCache) -> Pressed:
        """Return the cache's rows without those that the modules say are to be skipped."""
        layers = [_kept(module, cache.layers[module.layer_idx]) for module in self.attentions]
        keys, values, kept = (list(column) for column in zip(*layers, strict=True))
        return Pressed(num_tokens=len(captured.tokens), keys=keys, values=values, kept=kept)

    def whole(self, captured: Captured) -> Pressed:
        """Return all of a prompt."""
        keys = [layer[0] for layer in captured.keys]
        return Pressed(
            num_tokens=len(captured.tokens),
            keys=keys,
            values=[layer[0] for layer in captured.values],
            kept=[torch.ones(layer.shape[:2], dtype=torch.bool) for layer in keys],
        )

    def full_logprobs(self, captured: Captured, answer: Sequence[int]) -> Tensor:
        """Return the full cache's float32 log-probabilities `[n, V]`, before each token of an answer."""
        batch = Batch(self, [self.whole(captured)])
        rows = [captured.logits[None]]
        if len(answer) > 1:
            rows.append(self.logits(batch.feed(answer[:-1])[0]))
        return torch.cat(rows).log_softmax(-1)

    def answers(
        self, pressed: Sequence[Pressed], asked: Prompt, full: Tensor, later: Sequence[int]
    ) -> list[Answer]:
        """Return what each pressed prompt makes of the full cache's answer.

        Args:
            full: `full_logprobs`.
            later: the prompt's tokens that were not pressed; without any, the first logits are full's.
        """
        batch = Batch(self, pressed)
        fed = [*later, *asked.answer[:-1]]
        hidden = batch.feed(fed) if fed else None
        compared = []
        for row in range(len(pressed)):
            parts = [] if later else [full[:1]]
            if hidden is not None:
                parts.append(self.logits(hidden[row, max(0, len(later) - 1) :]).log_softmax(-1))
            logprobs = torch.cat(parts)
            kl = (full.exp() * (full - logprobs)).sum(-1).clamp(min=0)
            compared.append((logprobs.argmax(-1).tolist(), kl.tolist()))
        greedy = self._greedy(batch, [likeliest for likeliest, _ in compared], asked)
        return [
            Answer(same=_same(likeliest, asked.answer), kl=kl, tokens=tokens)
            for (likeliest, kl), tokens in zip(compared, greedy, strict=True)
        ]

    def _greedy(self, batch: Batch, likeliest: Sequence[list[int]], asked: Prompt) -> list[list[int]]:
        """Return greedy answers: the full cache's up to the first other token, and what follows that one."""
        answers, rows = [], []
        for row, tokens in enumerate(likeliest):
            num_same = [*_same(tokens, asked.answer), False].index(False)
            answers.append([*asked.answer[:num_same], *tokens[num_same : num_same + 1]])
            if num_same < len(asked.answer):
                batch.forget(row, len(asked.answer) - 1 - num_same)
                rows.append(row)

        def is_open(row: int) -> bool:
            return answers[row][-1] not in asked.eos_token_ids and len(answers[row]) < asked.max_new_tokens

        held = list(range(len(answers)))
        while rows := [row for row in rows if is_open(row)]:
            if rows != held:
                batch.take([held.index(row) for row in rows])
                held = rows
            positions = [len(asked.prompt) + len(answers[row]) - 1 for row in rows]
            hidden = batch.step([answers[row][-1] for row in rows], positions)
            for row, token in zip(rows, self.logits(hidden).argmax(-1).tolist(), strict=True):
                answers[row].append(token)
        return answers


def _same(tokens: Sequence[int], others: Sequence[int]) -> list[bool]:
    return [a == b for a, b in zip(tokens, others, strict=True)]


def _kept(module: Any, cached: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return a layer's keys, values and which of them count; takes what is to be skipped off the module."""
    keys, values = cached.keys[0], cached.values[0]
    kept = torch.ones(keys.shape[:2], dtype=torch.bool)
    if (masked := getattr(module, "masked_key_indices", None)) is not None:
        module.masked_key_indices = None
        kept[masked[1], masked[2]] = False
        rows = kept.byte().argsort(dim=1, descending=True, stable=True)[:, : int(kept.sum(1).max())]
        index = rows[..., None].expand(-1, -1, keys.shape[2])
        keys, values, kept = keys.gather(1, index), values.gather(1, index), kept.gather(1, rows)
    return keys, values, kept


def filled(keys: Sequence[Tensor], values: Sequence[Tensor]) -> DynamicCache:
    """Return a cache with these tensors; what is appended to it leaves them as they are."""
    cache = DynamicCache()
    for layer, (its_keys, its_values) in enumerate(zip(keys, values, strict=True)):
        cache.update(its_keys, its_values, layer)
    return cache


@dataclass(frozen=True)
class Contender:
    """A press at a ratio in a setting."""

    setting: str
    press: str
    ratio: float


class Output:
    """The lines of FILE: one for each question and contender."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._path = path
        self.done: set[tuple[str, Contender]] = set()
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        if lines and not lines[-1].endswith("\n"):
            del lines[-1]
        for line in map(json.loads, lines):
            if "example" in line:
                self.done.add((line["example"], Contender(line["setting"], line["press"], line["ratio"])))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines), encoding="utf-8")
        self._append([{"about": about}])

    def add(
        self, asked: Prompt, contenders: Sequence[Contender], found: Sequence[tuple[Pressed, Answer, str]]
    ) -> None:
        self._append(
            {
                "example": asked.example,
                "setting": contender.setting,
                "press": contender.press,
                "ratio": contender.ratio,
                "num_same": [*answer.same, False].index(False),
                "agreement": sum(answer.same) / len(answer.same),
                "kl": [float(f"{kl:.3g}") for kl in answer.kl],
                "text": text,
                "num_compressed_tokens": pressed.num_tokens,
                "kept_bytes": pressed.kept_bytes,
                "full_bytes": pressed.full_bytes,
            }
            for contender, (pressed, answer, text) in zip(contenders, found, strict=True)
        )
        self.done.update((asked.example, contender) for contender in contenders)

    def _append(self, lines: Iterator[dict[str, Any]] | Sequence[dict[str, Any]]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line, sort_keys=True) + "\n" for line in lines)


class Measurement:
    """All contenders on all prompts."""

    def __init__(self, peer: Peer, folder: str, contenders: Sequence[Contender], output: Output) -> None:
        self._peer = peer
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._contenders = (Contender(AWARE, FULL, 0.0), *contenders)
        self._output = output

    def missing(self, asked: Prompt) -> list[Contender]:
        return [
            contender for contender in self._contenders if (asked.example, contender) not in self._output.done
        ]

    def document(self, prompts: Sequence[Prompt]) -> Iterator[int]:
        """Measure questions about one document; yield how many answers were added."""
        document = self._peer.capture(prompts[0].document)
        of_document: dict[Contender, Pressed] = {}
        for asked in prompts:
            captured = self._peer.capture(asked.prompt, document)
            full = self._peer.full_logprobs(captured, asked.answer)
            for setting, source, states, later in (
                (AWARE, captured, {}, []),
                (AGNOSTIC, document, of_document, asked.prompt[asked.num_document_tokens :]),
            ):
                missing = [contender for contender in self.missing(asked) if contender.setting == setting]
                self._press([contender for contender in missing if contender not in states], source, states)
                for _, group in itertools.groupby(sorted(missing, key=_ratio), key=_ratio):
                    contenders = list(group)
                    pressed = [states[contender] for contender in contenders]
                    answers = self._peer.answers(pressed, asked, full, later)
                    texts = [
                        self._tokenizer.decode(answer.tokens, skip_special_tokens=True) for answer in answers
                    ]
                    self._output.add(asked, contenders, list(zip(pressed, answers, texts, strict=True)))
                    yield len(contenders)

    def _press(
        self, contenders: Sequence[Contender], captured: Captured, states: dict[Contender, Pressed]
    ) -> None:
        """Add what each contender leaves of a prompt; those of one press follow one another."""
        for name, group in itertools.groupby(contenders, key=lambda contender: contender.press):
            of_press = list(group)
            if name == FULL:
                found = [self._peer.whole(captured)]
            else:
                found = self._peer.pressed(
                    make_press(name), [contender.ratio for contender in of_press], captured
                )
            states.update(zip(of_press, found, strict=True))


def _ratio(contender: Contender) -> float:
    return contender.ratio


def read_prompts(path: Path) -> list[Prompt]:
    """Return the lines of a file, those about one document after one another."""
    names = [each.name for each in fields(Prompt)]
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    prompts = [Prompt(**{name: line[name] for name in names}) for line in lines]
    places: dict[tuple[int, ...], int] = {}
    for asked in prompts:
        places.setdefault(tuple(asked.document), len(places))
    return sorted(prompts, key=lambda asked: places[tuple(asked.document)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the output lacks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path, help="file that kvpress_prompts.py wrote")
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--dtype", default="float32", help="as kvferry eval computed")
    parser.add_argument("--known", default=KNOWN, help="presses that see the question")
    parser.add_argument("--unknown", default=UNKNOWN, help="presses that see the document alone")
    parser.add_argument("--ratios", default=RATIOS, help="shares that are dropped")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's default")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    logging.disable(logging.WARNING)
    contenders = [
        Contender(setting, press, float(ratio))
        for setting, presses in ((AWARE, options.known), (AGNOSTIC, options.unknown))
        for press in presses.split(",")
        if press
        for ratio in options.ratios.split(",")
    ]
    for contender in contenders:
        make_press(contender.press)
    about = {
        "command": "benchmarks/kvpress_peer.py " + " ".join(arguments or sys.argv[1:]),
        "model": Path(options.model).name,
        "dtype": options.dtype,
        **{package: version(package) for package in ("kvpress", "transformers", "torch")},
    }
    output = Output(options.output, about)
    measurement = Measurement(Peer(options.model, options.dtype), options.model, contenders, output)
    prompts = [asked for asked in read_prompts(options.prompts) if measurement.missing(asked)]
    total = sum(len(measurement.missing(asked)) for asked in prompts)
    with torch.inference_mode(), tqdm(total=total, disable=None, unit="answer") as progress:
        for _, group in itertools.groupby(prompts, key=lambda asked: asked.document):
            for number in measurement.document(list(group)):
                progress.update(number)
    return 0


if __name__ == "__main__":
    sys.exit(main())
