"""A worker whose device is lost gives its requests up for others to serve, and ends."""

import subprocess
import sys

import pytest
from kvtest.decode import SmallModel

from kvferry.services.decode import engine
from kvferry.shared.errors import KvferryError, WorkerUnavailable
from kvferry.shared.process.serving import EXIT_LOST


def breaking(made, error):
    def fail(token_ids):
        raise error

    made.model.before_step = fail


async def test_requests_of_a_lost_device_can_be_replayed_and_the_worker_is_told(
    monkeypatch, harness, request_of
):
    lost = []
    made = await harness(model=SmallModel())
    made.service._engine._on_device_lost = lost.append
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    breaking(made, error)
    monkeypatch.setattr(engine, "is_lost", lambda error: True)
    with pytest.raises(WorkerUnavailable, match="the device is lost") as raised:
        await made.tokens(request_of(max_tokens=5))
    assert raised.value.retryable
    made.service._engine._thread.join(10)
    assert lost == [error]
    assert not made.service.is_ready
    assert await made.arena_is_free(within_s=5)


async def test_another_failure_of_a_step_ends_no_worker(harness, request_of):
    lost = []
    made = await harness(model=SmallModel())
    made.service._engine._on_device_lost = lost.append
    breaking(made, RuntimeError("something else"))
    with pytest.raises(KvferryError, match="the decode step failed"):
        await made.tokens(request_of(max_tokens=5))
    assert not lost
    made.model.before_step = lambda token_ids: None
    assert len(await made.tokens(request_of(max_tokens=3))) == 3


def test_the_process_ends_with_a_code_of_its_own():
    script = (
        "import time; from kvferry.shared.process import serving; serving.LOSS_GRACE_S = 0.1;"
        "serving.end_process(RuntimeError('CUDA error')); time.sleep(60)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], timeout=100, check=False, capture_output=True)
    assert done.returncode == EXIT_LOST
    assert b"the device or a rank is lost" in done.stdout + done.stderr
