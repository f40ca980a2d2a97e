"""The handshake of sealed connections against another implementation of Noise, and what it refuses."""

from __future__ import annotations

import pytest
import zmq.utils.z85
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

import kvferry.shared.wire.noise as noise
from kvferry.shared.wire.noise import TAG_BYTES, Cipher, Handshake, NotAuthentic

PROLOGUE = b"kvferry blocks 1 prefill decode"
INITIATOR, RESPONDER, INITIATORS_EPHEMERAL, RESPONDERS_EPHEMERAL = (bytes([n]) * 32 for n in range(1, 5))


def public(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def ends(prologues: tuple[bytes, bytes] = (PROLOGUE, PROLOGUE)) -> tuple[Handshake, Handshake]:
    return (
        Handshake(
            initiates=True, own=INITIATOR, peer=public(RESPONDER), prologue=prologues[0],
            ephemeral=INITIATORS_EPHEMERAL,
        ),
        Handshake(
            initiates=False, own=RESPONDER, peer=public(INITIATOR), prologue=prologues[1],
            ephemeral=RESPONDERS_EPHEMERAL,
        ),
    )  # fmt: skip


def seal(cipher: Cipher, plain: bytes) -> bytes:
    sealed = bytearray(len(plain) + TAG_BYTES)
    cipher.seal(plain, memoryview(sealed))
    return bytes(sealed)


def opened(cipher: Cipher, sealed: bytes) -> bytes:
    plain = bytearray(len(sealed) - TAG_BYTES)
    cipher.open(sealed, memoryview(plain))
    return bytes(plain)


def test_the_bytes_are_those_of_another_implementation() -> None:
    """Made with noiseprotocol 0.3.1 from the same keys."""
    initiator, responder = ends()
    first = initiator.write()
    responder.read(first)
    second = responder.write()
    initiator.read(second)
    assert first.hex() == (
        "5dfedd3b6bd47f6fa28ee15d969d5bb0ea53774d488bdaf9df1c6e0124b3ef2268f63fd0d8cd3bc041fba49767326002"
    )
    assert second.hex() == (
        "ac01b2209e86354fb853237b5de0f4fab13c7fcbf433a61c019369617fecf10b023699720e8277d1634cd8ab1377cc7d"
    )
    sends, receives = initiator.split()
    assert seal(sends, b"to the responder").hex() == (
        "2f0a47737e06081ecbc7fb6eb8652f813c9d84fc38c506936fe8d99cf613f69c"
    )
    assert seal(sends, b"").hex() == "f6e51544d0cfa75d6bf9d68ee88ab5eb"
    answer = bytes.fromhex("0728a659d4ddeb017b9fceecee9da9bb6854b8294d4e9117be36334822a7c9ab")
    assert opened(receives, answer) == b"to the initiator"


def test_a_changed_first_message_is_refused() -> None:
    message = ends()[0].write()
    for bit in range(8 * len(message)):
        changed = bytearray(message)
        changed[bit // 8] ^= 1 << bit % 8
        if bit == 255:  # the highest bit of a public key is not used, but it is authenticated
            assert public(INITIATORS_EPHEMERAL)[31] < 128
        with pytest.raises(NotAuthentic):
            ends()[1].read(bytes(changed))


def test_points_of_low_order_are_refused() -> None:
    for point in (bytes(32), b"\x01" + bytes(31)):
        with pytest.raises(NotAuthentic):
            ends()[1].read(point + bytes(16))


def test_another_prologue_and_a_message_sent_back_are_refused() -> None:
    initiator, responder = ends((PROLOGUE, b"kvferry blocks 1 decode prefill"))
    message = initiator.write()
    with pytest.raises(NotAuthentic):
        responder.read(message)
    with pytest.raises(NotAuthentic):
        initiator.read(message)


def test_a_record_is_authentic_once_and_at_its_place() -> None:
    sends, receives = Cipher(bytes(32)), Cipher(bytes(32))
    first, second = seal(sends, b"first"), seal(sends, b"second")
    assert opened(receives, first) == b"first"
    for wrong in (first, second[:-1] + bytes([second[-1] ^ 1]), bytes(16)):
        with pytest.raises(NotAuthentic):
            opened(receives, wrong)


def test_the_key_is_replaced_as_noise_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "REKEY_RECORDS", 3)
    sends, receives = Cipher(bytes(32)), Cipher(bytes(32))
    records = [seal(sends, b"same") for _ in range(7)]
    assert len(set(records)) == 7
    assert [opened(receives, record) for record in records] == [b"same"] * 7
    next_key = noise.AESGCM(bytes(32)).encrypt(b"\0" * 4 + b"\xff" * 8, bytes(32), None)[:32]
    assert records[3] == seal(Cipher(next_key), b"same")


def test_keys_for_blocks_are_keys_of_the_handshake() -> None:
    """`kvferry certs` makes them with ZeroMQ's function."""
    own_public, secret = zmq.curve_keypair()
    assert public(zmq.utils.z85.decode(secret)) == zmq.utils.z85.decode(own_public)
