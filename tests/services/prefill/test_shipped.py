"""What was shipped is remembered within a bound, and given out for one transfer alone."""

import numpy as np

from kvferry.services.prefill.shipped import ShippedSelection, ShippedSelections
from kvferry.shared.control.messages import SessionKey


def selection(transfer_id):
    """Positions of 32 bytes, and a layer that keeps all."""
    layers = (np.arange(8, dtype=np.int32).reshape(2, 4), None)
    return ShippedSelection(transfer_id=transfer_id, num_prompt_tokens=9, layers=layers)


def key(name):
    return SessionKey(owner="o", session_id=name)


def test_the_longest_unused_are_forgotten_first():
    shipped = ShippedSelections(max_bytes=64)
    for number, name in enumerate("aba" + "c", start=1):
        shipped.put(key(name), selection(number))
    held = {
        name: [shipped.held(key(name), transfer_id=i, num_tokens=5) for i in range(1, 5)] for name in "abc"
    }
    assert {name: [rows is not None for rows in its] for name, its in held.items()} == {
        "a": [False, False, True, False],
        "b": [False, False, False, False],
        "c": [False, False, False, True],
    }
    shipped.drop(key("a"))
    assert shipped.held(key("a"), transfer_id=3, num_tokens=5) is None
    for number, name in enumerate("de", start=5):
        shipped.put(key(name), selection(number))
    assert shipped.held(key("d"), transfer_id=5, num_tokens=5) is not None


def test_none_is_held_where_no_token_is_the_same_or_none_may_be_remembered():
    shipped = ShippedSelections(max_bytes=64)
    shipped.put(key("a"), selection(1))
    assert shipped.held(key("a"), transfer_id=1, num_tokens=0) is None
    nothing = ShippedSelections(max_bytes=0)
    nothing.put(key("a"), selection(1))
    assert nothing.held(key("a"), transfer_id=1, num_tokens=5) is None
