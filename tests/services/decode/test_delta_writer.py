"""A delta's layers come out as whole ones do, however cut; what the sender cannot know is refused."""

import asyncio
import contextlib
import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.services.decode.delta_writer import DeltaLayerWriter
from kvferry.shared.compression.interface import CompressedLayer
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import KvferryError, TransferFailed
from kvferry.shared.wire.held_rows import HeldRows, HeldSelections, delta_sections
from kvferry.shared.wire.messages import BlockHeader, Section, TransferKey

DIM = 3
KEY = TransferKey(transfer_id=1, generation=1)


def selection(data, *, heads, num_tokens):
    """Positions `[H_kv, n]`; None where all are kept."""
    num_rows = data.draw(st.integers(1, num_tokens))
    if num_rows == num_tokens and data.draw(st.booleans()):
        return None
    draw = st.permutations(range(num_tokens)).map(lambda order: sorted(order[:num_rows]))
    return np.array([data.draw(draw) for _ in range(heads)], np.int32)


def rows_of(tokens, positions, *, heads):
    """K or V rows of `[H_kv, T, D]` at these positions."""
    if positions is None:
        return tokens.clone()
    return torch.stack([tokens[head][torch.from_numpy(positions[head]).long()] for head in range(heads)])


def blocks(section, tensor, size):
    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    for offset in range(0, len(raw), size):
        payload = memoryview(raw[offset : offset + size])
        header = BlockHeader(
            key=KEY, sequence=0, layer=0, section=section, section_bytes=len(raw), offset=offset
        )
        yield header, payload


def retained_rows(tokens, positions, *, prompt, generated, heads):
    """As the arena has them: the prompt's rows, generated ones after them, the rest never written."""
    return tuple(
        torch.cat(
            [
                rows_of(its[:, :prompt], positions, heads=heads),
                its[:, prompt : prompt + generated],
                torch.full((heads, 2, DIM), torch.nan),
            ],
            1,
        )
        for its in tokens
    )


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_held_and_new_rows_together_are_the_whole_layer(data):
    heads = data.draw(st.sampled_from([1, 2, 3]))
    # the prompts of earlier turns, the newest first, each a part of the one before it
    prompts = sorted(data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4)), reverse=True)
    generated, more = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 5))
    total = prompts[0] + generated + more
    tokens = [torch.randn(heads, total, DIM, generator=torch.Generator().manual_seed(i)) for i in (1, 2)]
    before = [selection(data, heads=heads, num_tokens=prompt) for prompt in prompts]
    after = selection(data, heads=heads, num_tokens=total)
    num_shared = data.draw(st.integers(1, prompts[0] + generated))
    depth = data.draw(st.integers(1, len(prompts)))
    held = HeldSelections(
        selections=tuple(
            HeldRows(transfer_id=7, num_prompt_tokens=prompt, num_tokens=total, layers=(positions,))
            for prompt, positions in zip(prompts, before, strict=True)
        )
    ).first(depth, num_shared)
    held_rows = [
        # nothing generated after an earlier prompt is counted on
        retained_rows(tokens, positions, prompt=prompt, generated=0 if number else generated, heads=heads)
        for number, (prompt, positions) in enumerate(zip(prompts, before, strict=True))
    ][:depth]
    whole = [rows_of(its, after, heads=heads) for its in tokens]
    positions = None if after is None else torch.from_numpy(after)
    kept = CompressedLayer(keys=whole[0], values=whole[1], positions=positions)
    sections = dict(delta_sections(kept, 0, held))
    targets = tuple(torch.full((heads, total + 2, DIM), torch.nan) for _ in tokens)
    wanted = after if after is not None else np.tile(np.arange(total, dtype=np.int32), (heads, 1))
    writer = DeltaLayerWriter(0, wanted, held=held, held_rows=held_rows, rows=targets)

    def is_held(head, token):
        generated_last = prompts[0] <= token
        kept_once = any(
            token < prompt and (positions is None or token in positions[head])
            for prompt, positions in zip(prompts[:depth], before[:depth], strict=True)
        )
        return token < num_shared and (generated_last or kept_once)

    num_new = sum(not is_held(head, token) for head in range(heads) for token in wanted[head])
    assert sections[Section.KEYS].shape == (num_new, DIM)
    assert writer.missing_bytes == 2 * num_new * DIM * 4
    size = data.draw(st.integers(1, 30))
    for section in (Section.NEW_ROWS, Section.KEYS, Section.VALUES):
        for header, payload in blocks(section, sections[section], size):
            writer.write(header, payload)
    assert writer.missing_bytes == 0
    for target, expected in zip(targets, whole, strict=True):
        assert torch.equal(target[:, : expected.shape[1]], expected)
        assert target[:, expected.shape[1] :].isnan().all()


def test_another_number_of_rows_than_lacks_is_refused():
    rows = HeldRows(transfer_id=7, num_prompt_tokens=4, num_tokens=4, layers=(None,))
    held = HeldSelections(selections=(rows,))
    rows = tuple(torch.zeros(2, 6, DIM) for _ in range(2))
    positions = np.tile(np.arange(5, dtype=np.int32), (2, 1))
    writer = DeltaLayerWriter(0, positions, held=held, held_rows=[rows], rows=rows)
    *begun, last = blocks(Section.NEW_ROWS, torch.tensor([1, 2], dtype=torch.int32), 3)
    for block in begun:
        writer.write(*block)
    with pytest.raises(TransferFailed) as caught:
        writer.write(*last)
    assert caught.value.reason == "held_rows"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"held_tokens": 1}, "manifest_held_tokens"),
        ({"held_transfer_id": 1}, "manifest_held_transfer_id"),
        ({"held_depth": 1}, "manifest_held_depth"),
        ({"held_depth": -1}, "manifest_held_depth"),
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
        assert ticket.held_tokens == len(request.prompt_token_ids)
        names = ("held_transfer_id", "held_tokens", "held_depth")
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
