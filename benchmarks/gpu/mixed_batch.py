"""Decode attention's modelled time of one layer where one sequence is much longer than the others.

A program has at most so many bytes in flight, so one with many tiles takes long, even if the GPU is idle
otherwise. Programs start in order, each where one has ended. Every number is modelled, and none is a
measurement.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from kvferry.kernels.descriptors import CTAS_PER_SM, MAX_SPLITS

SEQUENCES = ((131072,) + (1024,) * 31, (131072,) + (8192,) * 31, (8192,) * 32)
"""Tokens of each sequence of a batch of 32."""


def by_length(tiles: Sequence[int], num_programs: int, min_tiles: int) -> list[int]:
    """Tiles of each program, as `place_of` of `kernels/split_attention.py` divides them."""
    per_split = max(-(-sum(tiles) // (num_programs - len(tiles))), -(-max(tiles) // MAX_SPLITS), min_tiles)
    programs = []
    for num_tiles in tiles:
        splits = max(-(-num_tiles // per_split), 1)
        programs += [
            end - begin for begin, end in pairwise(num_tiles * n // splits for n in range(splits + 1))
        ]
    return programs


def equally(tiles: Sequence[int], num_splits: int, min_tiles: int) -> list[int]:
    """The same where every head has as many splits, as before."""
    programs = []
    for num_tiles in tiles:
        per_split = max(-(-num_tiles // num_splits), min_tiles)
        bounds = accumulate([per_split] * num_splits, initial=0)
        programs += [min(end, num_tiles) - min(begin, num_tiles) for begin, end in pairwise(bounds)]
    return programs


def time_s(programs: Sequence[int], tile_s: float, num_places: int) -> float:
    """Until the last program ends. Args: tile_s: of one tile; num_places: programs at a time."""
    ends = [0.0] * num_places
    for tiles in programs:
        heapq.heapreplace(ends, ends[0] + tiles * tile_s)
    return max(ends)


def mixed_rows(
    name: str, kernel: str, *, num_sms: int, per_sm: int, in_flight: int, latency_s: float, bandwidth: float,
    num_kv_heads: int, block_tokens: int, tile_bytes: int, min_tiles: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """One GPU's rows. Args: per_sm: programs on a multiprocessor; in_flight: bytes of one program."""
    rows = []
    for lengths in SEQUENCES:
        tiles = [-(-length // block_tokens) for length in lengths for _ in range(num_kv_heads)]
        least_s = sum(tiles) * tile_bytes / bandwidth
        target = CTAS_PER_SM * num_sms
        divided = {
            "equal_splits": equally(tiles, min(-(-target // len(tiles)), MAX_SPLITS), min_tiles),
            "splits_by_length": by_length(tiles, len(tiles) + target, min_tiles),
        }
        tile_s = tile_bytes * latency_s / in_flight
        rows.append(
            {
                "gpu": name,
                "kernel": kernel,
                "longest": max(lengths),
                "others": min(lengths),
                "batch": len(lengths),
            }
            | {
                f"{how}_modelled_us": 1e6 * max(time_s(programs, tile_s, num_sms * per_sm), least_s)
                for how, programs in divided.items()
            }
        )
    return rows
