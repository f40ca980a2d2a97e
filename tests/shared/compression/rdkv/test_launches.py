"""How many operations RDKV asks a GPU for, and how often the host waits: counted, with equal results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvtest.counted_device import Counting, copied, on_device

from kvferry.kernels import dispatch
from kvferry.kernels.packed.check import begin_packed_check
from kvferry.kernels.packed.layer import view_packed_layer
from kvferry.kernels.packed.packing import Packing
from kvferry.kernels.quarantine import quarantined
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.rdkv.compress import RdkvSettings, begin_layer_rdkv
from kvferry.shared.compression.rdkv.epsilon import find_table

SETTINGS = RdkvSettings(budget_tokens=30, table=find_table("model"), window=8)
NUM_TOKENS = 300
COMPRESS = {"launches": 44, "reads": 0}
CHECK = {"launches": 4, "reads": 0}
"""A layer's, of any number of heads, without the copy to the host that each then begins. On the torch path
they are 2,250 and 65, and 244 and 6, with eight."""


def begin(*tensors: torch.Tensor) -> Packing:
    queries, keys, values = tensors
    return begin_layer_rdkv(
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
        packing = begin(*tensors)
        expected = packing.finish(packing.tensors)
        begin_packed_check(expected, NUM_TOKENS)()
        counted: dict[str, Any] = {}
        # the first time, constants are copied to the device
        for _ in range(2):
            with Counting() as compressing:
                packing = begin(*on_device(*tensors))
            # of the copies on the host no more is asked
            shipped = packing.finish([copied(tensor) for tensor in packing.tensors])
            with Counting() as checking:
                received = view_packed_layer(shipped.layout, *on_device(shipped.buffer))
                refuse = begin_packed_check(received, NUM_TOKENS)
            with Counting() as committing:
                refuse()
        for name, counting in (("compress", compressing), ("check", checking)):
            counted[name] = {"launches": counting.launches.total(), "reads": counting.reads.total()}
    finally:
        dispatch.configure("auto", torch.device("cpu"))
    assert not quarantined()
    assert torch.equal(shipped.buffer, expected.buffer)
    assert committing.reads == committing.launches == {"_to_copy": 1}
    assert counted == {"compress": COMPRESS, "check": CHECK}, (compressing.launches, checking.launches)
