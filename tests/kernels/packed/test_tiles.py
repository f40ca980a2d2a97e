"""Tiles in a thread's memory: exact, used again by the next, in and out of inference mode, its own alone."""

import threading

import pytest
import torch

from kvferry.kernels.packed import tiles

CPU = torch.device("cpu")


def floats_of(codes, made=None):
    """Codes as a tile of their own has them."""
    made = made or tiles.Tiles(CPU)
    made.reserve(codes.numel())
    floats = made.floats(*codes.shape)
    made.convert(codes, floats)
    made.run()
    return floats


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_fields_times_their_scales_are_the_codes(bits):
    octets = torch.arange(256, dtype=torch.uint8).view(2, 8, 16)
    made = tiles.Tiles(CPU)
    made.reserve(octets.numel() * 8 // bits)
    fields = made.fields(octets, bits)
    made.run()
    expected = torch.stack([(octets >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]).float()
    assert torch.equal(fields.flatten(1) * tiles.field_scales(bits, CPU), expected.flatten(1))


def test_what_fits_into_a_tile_is_floats_together_and_the_next_takes_its_place(monkeypatch):
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 32)
    made = tiles.Tiles(CPU)
    first = floats_of(torch.full((3, 5), 7, dtype=torch.uint8), made)
    second = floats_of(torch.full((17,), 2.5, dtype=torch.float16), made)
    assert len(made.tiles) == 1
    assert (first == 7).all()
    assert (second == 2.5).all()
    third = floats_of(torch.full((1,), 9, dtype=torch.uint8), made)
    assert len(made.tiles) == 2
    assert third.data_ptr() == first.data_ptr()


def test_products_see_the_tile_that_they_are_laid_down_in(monkeypatch):
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 6)
    made = tiles.Tiles(CPU)
    output = torch.zeros(2, 1)
    for codes in torch.arange(12, dtype=torch.uint8).view(2, 6, 1):
        made.reserve(codes.numel())
        floats = made.floats(*codes.shape)
        made.convert(codes, floats)
        made.then(torch.addmm, output, torch.ones(2, 6), floats, out=output)
    made.run()
    assert output.flatten().tolist() == [66, 66]


def test_more_than_a_tile_is_given_room(monkeypatch):
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 8)
    codes = torch.arange(200, dtype=torch.uint8)
    assert torch.equal(floats_of(codes), codes.float())


def test_what_inference_mode_allocated_is_written_outside_it():
    def run() -> None:
        made = tiles.Tiles(CPU)
        with torch.inference_mode():
            floats_of(torch.ones(3, dtype=torch.uint8), made)
        made.run()
        outputs.append(floats_of(torch.full((3,), 9, dtype=torch.uint8)).clone())

    outputs: list[torch.Tensor] = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert outputs[0].tolist() == [9, 9, 9]


def test_threads_do_not_share_a_tile():
    mine = floats_of(torch.full((6,), 3, dtype=torch.uint8))
    thread = threading.Thread(target=floats_of, args=(torch.full((6,), 4, dtype=torch.uint8),))
    thread.start()
    thread.join(60)
    assert mine.tolist() == [3] * 6
