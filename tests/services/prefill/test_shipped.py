"""What was shipped is remembered within a bound, and given out for one transfer alone."""

from dataclasses import replace

import numpy as np

from kvferry.shared.cache.delta import ENTRY_BYTES, NO_TOKEN, RetainedRows, ShippedSelections
from kvferry.shared.control.messages import SessionKey


def selection(transfer_id):
    """Positions of 32 bytes, and a layer that keeps all."""
    layers = (np.arange(8, dtype=np.int32).reshape(2, 4), None)
    return RetainedRows(transfer_id=transfer_id, num_prompt_tokens=9, num_tokens=9, layers=layers)


def key(name):
    return SessionKey(owner="o", session_id=name)


def test_the_longest_unused_are_forgotten_first():
    shipped = ShippedSelections(max_bytes=2 * (32 + ENTRY_BYTES))
    for number, name in enumerate("aba" + "c", start=1):
        shipped.put(key(name), selection(number), retained=None)
    retained = {
        name: [shipped.retained(key(name), transfer_id=i, num_tokens=5, depth=9) for i in range(1, 5)]
        for name in "abc"
    }
    assert {name: [rows is not None for rows in chains] for name, chains in retained.items()} == {
        "a": [False, False, True, False],
        "b": [False, False, False, False],
        "c": [False, False, False, True],
    }
    shipped.drop(key("a"))
    assert shipped.retained(key("a"), transfer_id=3, num_tokens=5, depth=9) is None
    for number, name in enumerate("de", start=5):
        shipped.put(key(name), selection(number), retained=None)
    assert shipped.retained(key("d"), transfer_id=5, num_tokens=5, depth=9) is not None


def test_none_is_retained_where_no_token_is_the_same_or_none_may_be_remembered():
    shipped = ShippedSelections(max_bytes=2 * (32 + ENTRY_BYTES))
    shipped.put(key("a"), selection(1), retained=None)
    assert shipped.retained(key("a"), transfer_id=1, num_tokens=0, depth=9) is None
    nothing = ShippedSelections(max_bytes=0)
    nothing.put(key("a"), selection(1), retained=None)
    assert nothing.retained(key("a"), transfer_id=1, num_tokens=5, depth=9) is None


def test_selections_of_all_rows_are_bounded_in_number():
    shipped = ShippedSelections(max_bytes=10 * ENTRY_BYTES)
    every = replace(selection(1), layers=(None, None))
    for number in range(50):
        shipped.put(key(str(number)), every, retained=None)
    found = [shipped.retained(key(str(n)), transfer_id=1, num_tokens=5, depth=9) for n in range(50)]
    assert [chain is not None for chain in found] == [False] * 40 + [True] * 10


def ids(retained):
    return [rows.transfer_id for rows in retained.selections] if retained is not None else []


def test_a_prompt_that_extends_what_it_left_rows_out_of_keeps_it_remembered():
    shipped = ShippedSelections(max_bytes=1 << 20)
    retained = None
    for number in range(1, 36):
        shipped.put(key("a"), selection(number), retained=retained)
        retained = shipped.retained(key("a"), transfer_id=number, num_tokens=11, depth=99)
        assert ids(retained) == list(range(number, max(0, number - 32), -1))
        assert [rows.num_tokens for rows in retained.selections] == [11] + [9] * (retained.depth - 1)
    # as far as the worker still has them
    assert ids(shipped.retained(key("a"), transfer_id=35, num_tokens=11, depth=3)) == [35, 34, 33]
    # the turn of transfer 35 was given up there: its worker has the one before
    assert ids(shipped.retained(key("a"), transfer_id=34, num_tokens=11, depth=2)) == [34, 33]
    # of earlier ones, the rows that they share with the next are not remembered
    assert shipped.retained(key("a"), transfer_id=33, num_tokens=11, depth=2) is None
    # what the transfer did not count on is not there any more
    shipped.put(key("a"), selection(36), retained=retained.first(2, 11))
    assert ids(shipped.retained(key("a"), transfer_id=36, num_tokens=11, depth=9)) == [36, 35, 34]


def test_rows_of_several_selections_are_remembered_once():
    shipped, retained = ShippedSelections(max_bytes=1 << 20), None
    layers = ([[0, 1, 2], [0, 1, 2]], [[0, 1, 8], [1, 2, 5]], [[0, 2, 8], [5, 6, 7]])
    for number, positions in enumerate(layers, 1):
        rows = RetainedRows(
            transfer_id=number, num_prompt_tokens=9, num_tokens=9, layers=(np.array(positions, np.int32),)
        )
        shipped.put(key("a"), rows, retained=retained)
        retained = shipped.retained(key("a"), transfer_id=number, num_tokens=9, depth=9)
    first = retained.selections[2].layers[0]
    assert first.tolist() == [[2], [0]]
    every = np.broadcast_to(np.arange(9, dtype=np.int32), (2, 9))
    found = [np.flatnonzero(which >= 0).tolist() for which in retained.find(0, every)[0]]
    assert found == [[0, 1, 2, 8], [0, 1, 2, 5, 6, 7]]
    # the last column is padding where a head has fewer rows
    longer = RetainedRows(
        transfer_id=4, num_prompt_tokens=9, num_tokens=9, layers=(np.array([[0, 1], [2, 3]], np.int32),)
    )
    left, numbers = RetainedRows(
        transfer_id=3, num_prompt_tokens=4, num_tokens=4, layers=(np.array([[0, 1, 3], [0, 1, 3]], np.int32),)
    ).left(longer)
    assert left.layers[0].tolist() == [[3, NO_TOKEN], [0, 1]]
    assert numbers[0].tolist() == [[2, 0], [0, 1]]


def test_a_prompt_that_branches_off_forgets_what_was_before():
    shipped = ShippedSelections(max_bytes=1 << 20)
    shipped.put(key("a"), selection(1), retained=None)
    retained = shipped.retained(key("a"), transfer_id=1, num_tokens=8, depth=1)
    shipped.put(key("a"), selection(2), retained=retained)
    assert ids(shipped.retained(key("a"), transfer_id=2, num_tokens=8, depth=9)) == [2]
    assert ids(shipped.retained(key("a"), transfer_id=1, num_tokens=8, depth=9)) == []
