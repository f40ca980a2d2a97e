"""Encryption of stored values: what opens, and what does not."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.shared.errors import ConfigurationError
from kvferry.shared.trust.at_rest import (
    LABEL_OFFSET,
    MASTER_KEY_BYTES,
    SEALED_BYTES,
    AtRestKeys,
    Unreadable,
    is_sealed,
    open_with,
)

OLD, NEW = b"o" * MASTER_KEY_BYTES, b"n" * MASTER_KEY_BYTES
KEYS = AtRestKeys((NEW,))


def line(master: bytes) -> bytes:
    return base64.b64encode(master)


@given(value=st.binary(max_size=200), label=st.binary(min_size=16, max_size=16))
def test_a_sealed_value_opens_for_its_owner_and_context_alone(value: bytes, label: bytes) -> None:
    sealed = KEYS.seal("alice", value, context="s", label=label)
    assert len(sealed) == len(value) + SEALED_BYTES
    assert sealed[LABEL_OFFSET : LABEL_OFFSET + 16] == label
    assert KEYS.open("alice", sealed, context="s") == value
    assert KEYS.seal("alice", value, context="s", label=label) != sealed
    for owner, context in (("bob", "s"), ("alice", "t"), ("", "s")):
        with pytest.raises(Unreadable, match="damaged, or another's"):
            KEYS.open(owner, sealed, context=context)


@given(position=st.integers(0, 70), change=st.integers(1, 255))
@example(position=LABEL_OFFSET, change=1)
def test_no_changed_bit_opens(position: int, change: int) -> None:
    sealed = bytearray(KEYS.seal("alice", b"ten bytes!", context="s"))
    sealed[position % len(sealed)] ^= change
    with pytest.raises(Unreadable):
        KEYS.open("alice", bytes(sealed), context="s")


@given(st.binary(max_size=90))
def test_other_bytes_are_unreadable(data: bytes) -> None:
    for value in (data, b"KVFe" + data, KEYS.seal("a", b"", context="s")[: len(data)]):
        with pytest.raises(Unreadable):
            KEYS.open("a", value, context="s")


def test_the_first_key_of_the_file_encrypts_and_all_decrypt(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(line(OLD) + b"\n")
    before = AtRestKeys.read(str(path))
    path.write_bytes(b"# newest first\n\n" + line(NEW) + b"\r\n  " + line(OLD) + b"\n")
    rotated = AtRestKeys.read(str(path))
    assert before is not None
    assert rotated is not None
    old, new = (keys.seal("a", b"text", context="s") for keys in (before, rotated))
    assert rotated.open("a", old, context="s") == rotated.open("a", new, context="s") == b"text"
    assert KEYS.open("a", new, context="s") == b"text"
    for keys, value in ((before, new), (KEYS, old)):
        with pytest.raises(Unreadable, match=r"encrypted with key [0-9a-f]{16}, which at_rest_keys lacks"):
            keys.open("a", value, context="s")


def test_encrypted_and_plain_are_never_taken_for_each_other() -> None:
    sealed = KEYS.seal("a", b"text", context="s")
    assert is_sealed(sealed)
    with pytest.raises(Unreadable, match="there are no at_rest_keys"):
        open_with(None, "a", sealed, context="s")
    with pytest.raises(Unreadable, match="it is not encrypted"):
        open_with(KEYS, "a", b"text", context="s")
    assert open_with(None, "a", b"text", context="s") == b"text"
    assert open_with(KEYS, "a", sealed, context="s") == b"text"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no key"),
        (b"# only this\n", "has no key"),
        (b"not base64!", "line 1, is not base64"),
        (line(NEW) + b"\n" + line(b"short"), "line 2, has 5 bytes; a key has 32"),
        (b"A" * (65 << 10), "larger than"),
    ],
)
def test_a_file_that_is_no_list_of_keys_is_refused_without_quoting_it(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=message) as refused:
        AtRestKeys.read(str(path))
    assert line(NEW).decode() not in refused.value.message
    assert line(b"short").decode() not in refused.value.message


def test_no_file_is_no_encryption_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    assert AtRestKeys.read("") is None
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        AtRestKeys.read(str(tmp_path / "absent"))
