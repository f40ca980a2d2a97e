"""Spoils values, trees of JSON or MessagePack, and bytes, in ways that find mistakes of their readers."""

from __future__ import annotations

from random import Random
from typing import Any

NUMBERS = (
    0, 1, -1, 2, 7, 15, 16, 127, 128, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**48,
    2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1,
)  # fmt: skip
TEXTS = (
    "", " ", "\0", "a", "é", "\U0001f4a5", "a" * 65, "x" * 1025, "../..", "%s%n", "<|im_start|>", "1", "null",
    "\r\n", "{", "$ref", "\u202e", "full", "rocketkv", "user", "assistant", "auto",
)  # fmt: skip


def weird(rng: Random, depth: int = 2) -> Any:
    """A value that a field hardly expects."""
    kind = rng.randrange(9)
    if kind < 3:
        return rng.choice(NUMBERS)
    if kind < 5:
        return rng.choice(TEXTS)
    if kind == 5:
        return rng.choice((None, True, False, 0.5, -0.0, 1e308, 1e-320))
    if not depth:
        return rng.choice(([], {}, None))
    if kind == 6:
        return [weird(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 7:
        return {rng.choice(TEXTS): weird(rng, depth - 1) for _ in range(rng.randrange(4))}
    value: Any = rng.choice(([], {}, 0))
    for _ in range(rng.choice((1, 3, 40, 300))):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def spoilt_tree(rng: Random, tree: Any) -> Any:
    """A copy with one change at one place."""
    if isinstance(tree, dict) and tree and rng.random() < 0.85:
        name = rng.choice(list(tree))
        changed = dict(tree)
        match rng.randrange(8):
            case 0:
                del changed[name]
            case 1:
                changed[rng.choice(TEXTS)] = weird(rng)
            case _:
                changed[name] = spoilt_tree(rng, tree[name])
        return changed
    if isinstance(tree, list | tuple) and tree and rng.random() < 0.85:
        index = rng.randrange(len(tree))
        items = list(tree)
        match rng.randrange(8):
            case 0:
                del items[index]
            case 1:
                items.insert(index, weird(rng))
            case 2:
                items *= rng.choice((2, 17, 300))
            case _:
                items[index] = spoilt_tree(rng, items[index])
        return items
    if isinstance(tree, int) and not isinstance(tree, bool) and rng.random() < 0.5:
        return tree + rng.choice((-1, 1, 2**31, -(2**31)))
    return weird(rng)


def spoilt_bytes(rng: Random, data: bytes) -> bytes:
    """The data with one change."""
    at, end = rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)
    kind: int = rng.randrange(7)
    match kind:
        case 0:
            return data[:at]
        case 1:
            return data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:]
        case 2:
            return data[: min(at, end)] + data[max(at, end) :]
        case 3:
            return data[:at] + data[min(at, end) : max(at, end)] + data[at:]
        case 4:
            number = rng.choice(NUMBERS) % 2**64
            size = rng.choice((1, 2, 4, 8))
            word = (number % 256**size).to_bytes(size, rng.choice(("little", "big")))
            return data[:at] + word + data[at + size :]
        case _:
            changed = bytearray(data)
            for _ in range(rng.choice((1, 1, 2, 8)) if data else 0):
                changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            return bytes(changed)
