"""A delta's layers come out as whole ones do, however cut; what the sender cannot know is refused."""

import asyncio
import contextlib
import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvtest.compression import make_resolved, make_spec
from kvtest.delta import DIM, FOUR_TOKENS, draw_delta
from kvtest.wire import header_of, to_bytes

from kvferry.services.decode.cache_writer import CacheWriter
from kvferry.shared.cache.arena import ArenaCopier, sequence_layout
from kvferry.shared.cache.delta import PinnedRows, delta_tensors
from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.plan import LayerPlan
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import KvferryError, TransferFailed
from kvferry.shared.wire.messages import BlockHeader, NamedTensor, TransferKey

KEY = TransferKey(transfer_id=1, generation=1)


class Receiver:
    """A writer of one layer's delta, over bytes that are NaN in every dtype."""

    def __init__(self, *, heads, num_tokens, rows, retained, retained_rows):
        plan = make_resolved(LayerPlan(rows=rows), num_prompt_tokens=num_tokens, max_new_tokens=3)
        (fmt,) = make_formats(make_spec(num_layers=1, num_kv_heads=heads, head_dim=DIM), plan)
        layout = sequence_layout((fmt,))
        self.buffer = torch.full((layout.size_bytes,), 0xFF, dtype=torch.uint8)
        self.writer = CacheWriter(
            layout,
            self.buffer,
            ArenaCopier(1 << 12, self.buffer.device),
            pinned=PinnedRows(chain=retained, layers=[[rows] for rows in retained_rows]),
        )

    def begin(self, tensors):
        named = [NamedTensor(name=name, tensor=tensor, kind="rows") for name, tensor in tensors.items()]
        self.writer.begin_layer(header_of(0, named))

    def blocks(self, tensors, size):
        """Every block of the layer, not written yet."""
        for index, tensor in enumerate(tensors.values()):
            data = to_bytes(tensor)
            for offset in range(0, len(data), size):
                header = BlockHeader(key=KEY, layer=0, tensor=index, offset=offset)
                yield header, memoryview(data[offset : offset + size])

    def receive(self, tensors, size=1 << 12):
        self.begin(tensors)
        for header, payload in self.blocks(tensors, size):
            self.writer.write(header, payload)
        (cache,) = self.writer.finish(0)
        return cache


@given(st.data())
def test_retained_and_new_rows_together_are_the_whole_layer(data):
    delta = draw_delta(data)
    assert delta.sent["new_rows"].tolist() == delta.num_new
    assert delta.sent["keys"].shape == delta.sent["values"].shape == (sum(delta.num_new), DIM)
    receiver = Receiver(
        heads=delta.heads,
        num_tokens=delta.num_tokens,
        rows=delta.num_tokens if delta.positions is None else delta.positions.shape[1],
        retained=delta.retained,
        retained_rows=delta.rows,
    )
    delta.assert_received(receiver.receive(delta.sent, size=data.draw(st.integers(1, 30))))


def small_delta():
    """A receiver that retains 4 of 5 tokens of two heads, and the tensors that it lacks."""
    rows = tuple(torch.randn(2, 6, DIM, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    receiver = Receiver(heads=2, num_tokens=5, rows=5, retained=FOUR_TOKENS, retained_rows=[rows])
    return receiver, delta_tensors({"keys": rows[0][:, :5], "values": rows[1][:, :5]}, 0, FOUR_TOKENS)


@pytest.mark.parametrize(
    "new_rows", [[1, 2], [2, 0], [0, 2], [1, 0], [-1, 3], [2**31 - 1, 1]], ids=lambda rows: str(rows)
)
def test_another_number_of_rows_than_lacks_is_refused(new_rows):
    receiver, sent = small_delta()
    assert sent["new_rows"].tolist() == [1, 1]
    sent["new_rows"] = torch.tensor(new_rows, dtype=torch.int32)
    receiver.begin(sent)
    *begun, last = receiver.blocks(sent, 5)
    for block in begun:
        receiver.writer.write(*block)
    with pytest.raises(TransferFailed, match="this worker lacks") as caught:
        receiver.writer.write(*last)
    assert caught.value.reason == "retained_rows"
    assert (receiver.buffer == 0xFF).all()


@pytest.mark.parametrize(("num_rows", "reason"), [(0, "retained_rows"), (3, "retained_rows"), (11, "size")])
def test_more_or_fewer_rows_than_the_heads_lack_are_refused(num_rows, reason):
    receiver, sent = small_delta()
    for name in ("keys", "values"):
        sent[name] = torch.zeros(num_rows, DIM)
    with pytest.raises(TransferFailed, match="layer 0: ") as caught:
        receiver.receive(sent)
    assert caught.value.reason == reason
    assert (receiver.buffer == 0xFF).all()


def test_rows_that_are_missing_are_found_at_the_end():
    receiver, sent = small_delta()
    receiver.begin(sent)
    *begun, _ = receiver.blocks(sent, 5)
    for block in begun:
        receiver.writer.write(*block)
    with pytest.raises(TransferFailed, match="layer 0 is incomplete") as caught:
        receiver.writer.finish(0)
    assert caught.value.reason == "incomplete"


@pytest.mark.parametrize(
    "change",
    [
        lambda sent: {name: tensor for name, tensor in sent.items() if name != "new_rows"},
        lambda sent: {"index": torch.zeros(2, 5, dtype=torch.int32), **sent},
        lambda sent: {**sent, "keys": torch.zeros(2, 1, DIM)},
        lambda sent: {**sent, "values": torch.zeros(3, DIM)},
        lambda sent: {**sent, "new_rows": torch.zeros(2, dtype=torch.int16)},
        lambda sent: {**sent, "keys": sent["keys"].double().float().to(torch.bfloat16)},
        lambda sent: dict(reversed(sent.items())),
        lambda sent: {**sent, "keys": torch.tensor(0.0)},
        lambda sent: {},
    ],
    ids=[
        "no counts", "an index", "whole rows", "more values", "another dtype", "other rows", "another order",
        "no shape", "none",
    ],
)  # fmt: skip
def test_other_tensors_than_a_deltas_are_refused_before_their_bytes(change):
    receiver, sent = small_delta()
    with pytest.raises(TransferFailed, match="layer 0: its tensors are") as caught:
        receiver.begin(change(sent))
    assert caught.value.reason == "layer_header"
    assert (receiver.buffer == 0xFF).all()


def test_an_index_of_a_delta_that_does_not_ascend_is_refused():
    rows = tuple(torch.zeros(2, 6, DIM) for _ in range(2))
    receiver = Receiver(heads=2, num_tokens=6, rows=3, retained=FOUR_TOKENS, retained_rows=[rows])
    index = torch.tensor([[0, 2, 1], [0, 1, 5]], dtype=torch.int32)
    new = torch.tensor([0, 1], dtype=torch.int32)
    keys = torch.zeros(1, DIM)
    with pytest.raises(TransferFailed, match="must ascend within 0 to 5") as caught:
        receiver.receive({"index": index, "new_rows": new, "keys": keys, "values": keys})
    assert caught.value.reason == "index"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"retained_tokens": 1}, "manifest_retained_tokens"),
        ({"retained_transfer_id": 1}, "manifest_retained_transfer_id"),
        ({"retained_depth": 1}, "manifest_retained_depth"),
        ({"retained_depth": -1}, "manifest_retained_depth"),
    ],
)
async def test_a_delta_to_rows_that_were_not_offered_is_refused(
    harness, request_of, ticket_of, changes, reason
):
    made = await harness()
    session = SessionKey(owner="o", session_id="s")
    request = dataclasses.replace(request_of(store_history=True), session=session)
    await made.run(request)
    retained = made.service.arena.bytes_by_state()["retained"]
    assert retained > 0
    stream, ticket = await ticket_of(made.service, dataclasses.replace(request, request_id="again"))
    async with contextlib.aclosing(stream):
        assert ticket.retained_tokens == len(request.prompt_token_ids)
        names = ("retained_transfer_id", "retained_tokens", "retained_depth")
        offered = {name: getattr(ticket, name) for name in names}
        wrong = {name: offered[name] + changes.get(name, 0) for name in offered}
        transfer = made.shipper.open(dataclasses.replace(request, request_id="again"), ticket, **wrong)
        with pytest.raises(KvferryError) as caught:
            await asyncio.to_thread(transfer.wait, 20)
        assert caught.value.reason == reason
        with pytest.raises(KvferryError):
            await anext(stream)
    # what was offered is still there for another attempt
    assert made.service.arena.bytes_by_state()["retained"] == retained
    assert made.service.arena.free_bytes == made.service.arena.size_bytes - retained
