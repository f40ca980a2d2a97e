"""How many operations RDKV asks a GPU for, and how often the host waits: counted, with equal results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvtest.counted_device import Counting, copied, on_device

from kvferry.kernels import dispatch
from kvferry.kernels.packed.check import check_packed_layer
from kvferry.kernels.packed.layer import PackedLayer
from kvferry.kernels.quarantine import quarantined
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.rdkv.compress import RdkvSettings, compress_layer_rdkv
from kvferry.shared.compression.rdkv.epsilon import find_table

SETTINGS = RdkvSettings(budget_tokens=30, table=find_table("model"), window=8)
NUM_TOKENS = 300
COMPRESS = {"launches": 59, "reads": 2}
CHECK = {"launches": 5, "reads": 1}
"""A layer's, of any number of heads. On the torch path they are 1,820 and 54, and 228 and 6, with eight."""


def compressed(*tensors: torch.Tensor) -> PackedLayer:
    queries, keys, values = tensors
    return compress_layer_rdkv(
        SETTINGS, LayerInputs(layer=0, queries=queries, keys=keys, values=values, scaling=0.3)
    )


@torch.no_grad()
@pytest.mark.parametrize("num_kv_heads", [2, 8])
def test_launches_and_reads_of_a_layer(num_kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = ((num_kv_heads, 2, 8, 32), *((num_kv_heads, NUM_TOKENS, 32),) * 2)
    tensors = [torch.randn(*shape, generator=generator) for shape in shapes]
    dispatch.configure("triton", torch.device("cpu"))
    try:
        expected = compressed(*tensors)
        counted: dict[str, Any] = {}
        # the first time, constants are copied to the device
        for _ in range(2):
            with Counting() as compressing:
                packed = compressed(*on_device(*tensors))
            with Counting() as checking:
                check_packed_layer(packed, NUM_TOKENS)
        for name, counting in (("compress", compressing), ("check", checking)):
            counted[name] = {"launches": counting.launches.total(), "reads": counting.reads.total()}
    finally:
        dispatch.configure("auto", torch.device("cpu"))
    assert not quarantined()
    assert torch.equal(copied(packed.buffer), expected.buffer)
    assert counted == {"compress": COMPRESS, "check": CHECK}, (compressing.launches, checking.launches)
