"""A process that is told to stop ends, whatever its threads wait for."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

WEDGED = """
import threading
from kvferry.shared.process.serving import end_within
end_within(0.5)
threading.Thread(target=threading.Event().wait).start()
"""


def test_a_process_with_a_stuck_thread_ends_in_time() -> None:
    done = subprocess.run([sys.executable, "-c", WEDGED], timeout=60, capture_output=True, check=False)
    assert done.returncode == 1
    assert b"did not stop in time" in done.stdout + done.stderr


ALLOCATING = """
import ctypes, sys, threading
from kvferry.shared.process.serving import share_free_memory
if sys.argv[1] == "shared":
    share_free_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
together = threading.Barrier(16)
def allocate():
    together.wait()
    for _ in range(100):
        libc.malloc(3000)
threads = [threading.Thread(target=allocate) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc.fdopen.restype = ctypes.c_void_p
output = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, output)
libc.fflush(output)
"""


def num_arenas(how: str, **variables: str) -> int:
    environment = {
        name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"
    } | variables
    command = [sys.executable, "-c", ALLOCATING, how]
    done = subprocess.run(command, timeout=60, capture_output=True, check=True, env=environment)
    return done.stdout.count(b"<heap nr=")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="the allocator is not glibc's")
def test_threads_share_what_is_freed_unless_the_environment_says_otherwise() -> None:
    assert num_arenas("each its own") > 4
    assert num_arenas("shared") <= 2
    assert num_arenas("shared", MALLOC_ARENA_MAX="4") == 4
