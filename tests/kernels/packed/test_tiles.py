"""A thread's tile memory: exact, used again by the next call, in and out of inference mode, its own alone."""

import threading

import pytest
import torch

from kvferry.kernels.packed import tiles


@pytest.mark.parametrize("bits", [2, 4])
def test_fields_times_their_scales_are_the_codes(bits):
    octets = torch.arange(256, dtype=torch.uint8).view(2, 8, 16)
    fields = tiles.field_floats(octets, bits)
    expected = torch.stack([(octets >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]).float()
    assert torch.equal(fields.flatten(1) * tiles.field_scales(bits, octets.device), expected.flatten(1))


def test_a_tile_takes_the_place_of_the_one_before():
    first = tiles.as_floats(torch.full((3, 5), 7, dtype=torch.uint8))
    second = tiles.as_floats(torch.full((4, 5), 2.5, dtype=torch.float16))
    assert second.data_ptr() == first.data_ptr()
    assert (second == 2.5).all()


def test_more_than_a_tile_is_given_room(monkeypatch):
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 8)
    codes = torch.arange(200, dtype=torch.uint8)
    assert torch.equal(tiles.as_floats(codes), codes.float())


def test_what_inference_mode_allocated_is_written_outside_it():
    def run() -> None:
        with torch.inference_mode():
            tiles.as_floats(torch.ones(3, dtype=torch.uint8))
        outputs.append(tiles.as_floats(torch.full((3,), 9, dtype=torch.uint8)).clone())

    outputs: list[torch.Tensor] = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert outputs[0].tolist() == [9, 9, 9]


def test_threads_do_not_share_a_tile():
    mine = tiles.as_floats(torch.full((6,), 3, dtype=torch.uint8))
    thread = threading.Thread(target=tiles.as_floats, args=(torch.full((6,), 4, dtype=torch.uint8),))
    thread.start()
    thread.join(60)
    assert mine.tolist() == [3] * 6
