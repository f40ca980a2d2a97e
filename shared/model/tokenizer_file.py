"""Reads a tokenizer's file: the most characters that a token may stand for, and the effects of its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KEEP_ALL = frozenset(
    {"ByteLevel", "Digits", "Lowercase", "Metaspace", "NFC", "NFD", "NFKC", "NFKD", "Prepend"}
)


def _steps(component: Any) -> list[Any]:
    """Return the steps of a component of `tokenizer.json`: a sequence's steps, or the component itself."""
    if component is None:
        return []
    if component["type"] != "Sequence":
        return [component]
    names = ("normalizers", "pretokenizers", "decoders")
    return [step for name in names for part in component.get(name, ()) for step in _steps(part)]


def has_decoder(decoder: Any, kind: str) -> bool:
    """Return whether a decoder, or a part of it, is of a kind."""
    return any(step["type"] == kind for step in _steps(decoder))


def longest_token(data: Any, vocabulary: Mapping[str, int]) -> int | None:
    """Return the most characters of a normalized text that one token may stand for.

    Args: data: `tokenizer.json`.

    Returns: None where a token can stand for any number (unknown words, blanks beside a mark), where
        characters may get no token, and where that is not known of the steps before the model.
    """
    model, before = data["model"], [*_steps(data["normalizer"]), *_steps(data["pre_tokenizer"])]
    kinds = {step["type"] for step in before}
    byte_tokens = {f"<0x{byte:02X}>" for byte in range(256)} if model.get("byte_fallback") else set()
    if "ByteLevel" in kinds:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        byte_tokens = set(bytes_to_unicode().values())  # type: ignore[no-untyped-call]
    knows_all = bool(byte_tokens) and byte_tokens <= vocabulary.keys()
    affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    strips = any(token["lstrip"] or token["rstrip"] for token in data["added_tokens"])
    if model["type"] != "BPE" or not knows_all or affixes or strips or not all(map(_keeps_all, before)):
        return None
    return max(map(len, vocabulary))


def _keeps_all(step: Any) -> bool:
    """Return whether a normalizer or pre-tokenizer drops no character, except by Unicode's composition."""
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String", "")
        return 0 < len(pattern) <= len(step["content"])
    if step["type"] in ("Split", "Punctuation"):
        return bool(step["behavior"] != "Removed")
    return step["type"] in _KEEP_ALL


def composes(data: Any) -> bool:
    """Return whether a normalizer may turn several characters into one. Args: data: `tokenizer.json`."""
    return any(step["type"] in ("NFC", "NFKC") for step in _steps(data["normalizer"]))
