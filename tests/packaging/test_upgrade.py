"""Upgrades from earlier commits to this tree, both from wheels.

A rolling one from the release before runs under streams: first workers, then routers. No stream ends early or
says something else, and a session goes on. Routers of one commit also ask workers of the other alone, the
release before and others: they say what one process says, or the answer is a 503 that names the worker.

Where no release has a tag, the one before is a commit whose control protocol is the earlier one that this
tree's workers still take.
"""

from __future__ import annotations

import functools
import json
import re
import signal
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from kvtest.decode import demo_tokenizer
from kvtest.ports import free_port
from kvtest.processes import Process, started
from kvtest.redis_server import RedisServer
from kvtest.waiting import until
from kvtest.wheels import build_wheel, install_wheel

from kvferry.shared.compression.presets import plan_for
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.text import TextAssembler
from kvferry.shared.sampling.params import SamplingParams
from kvferry.tools.oracle import OneProcessGenerator

REPOSITORY = Path(__file__).parents[2]
EARLIER = "a3a9089d49c687bf07ef6de8be895c27af14f7ba"
OTHER_PARAMETER = "0b48fbe8"
"""Its format of the default method needs a parameter that no other commit's knows."""
WEEK_S = 7 * 24 * 3600
ROLES = ("prefill", "decode")
NUM_STREAMS = 8
NUM_TOKENS = 120
WAIT_S = 120.0


def git(*arguments: str) -> bytes:
    """What git says; the test is skipped where this clone's history lacks what is asked for."""
    done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, timeout=60, check=False)
    if done.returncode:
        pytest.skip(f"git {' '.join(arguments)}: {done.stderr.decode().strip()}")
    return done.stdout


def release_before() -> str:
    tags = git("tag", "--list", "v*", "--merged", "HEAD^", "--sort", "-version:refname").decode().split()
    return tags[0] if tags else EARLIER


def week_before() -> str:
    """The newest commit that was a week old when this one was made."""
    made_s = int(git("log", "-1", "--format=%ct"))
    found = git("log", "-1", "--format=%H", f"--before={made_s - WEEK_S}").decode().strip()
    return found or pytest.skip("the history of this clone begins less than a week ago")


@pytest.fixture(scope="module")
def environment_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the environment with a commit's wheel."""

    @functools.cache
    def of(commit: str) -> Path:
        folder = tmp_path_factory.mktemp("earlier")
        with tarfile.open(fileobj=BytesIO(git("archive", commit))) as archive:
            archive.extractall(folder / "source", filter="tar")
        return install_wheel(build_wheel(folder / "source", folder), folder / "env")

    return of


@pytest.fixture(scope="module")
def earlier(environment_of: Callable[[str], Path]) -> Path:
    """The environment with the earlier release's wheel."""
    return environment_of(release_before())


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer.running() as server:
        yield server


def stream(router: Process, index: int, on_token: Callable[[], None] = lambda: None) -> str:
    body = {
        "model": "demo",
        "prompt": f"the pin of the red castle is {index} 2 7 1 . what is the pin of the red castle ?",
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "kv_compression": {"method": ("full", "rdkv")[index % 2]},
    }
    pieces = []
    url = f"http://{router.addresses['address']}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=WAIT_S) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            assert '"error"' not in line, line
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    pieces.append(choice["text"])
                    on_token()
        assert line in ("", "data: [DONE]")
    return "".join(pieces)


def converse(router: Process, turn: int) -> dict[str, Any]:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": f"the pin of the old barn is {turn} 3 3 7 ."}],
        "session_id": "s",
        "session_mode": "append",
        "max_tokens": 4,
        "temperature": 0,
    }
    answer = httpx.post(
        f"http://{router.addresses['address']}/v1/chat/completions", json=body, timeout=WAIT_S
    )
    assert answer.status_code == 200, answer.text
    session = httpx.get(f"http://{router.addresses['address']}/v1/sessions/s", timeout=WAIT_S).json()
    return {**answer.json(), "turns": session["turns"]}


def is_ready(process: Process) -> bool:
    return httpx.get(f"http://{process.addresses['metrics']}/ready", timeout=30).status_code == 200


@pytest.mark.full
def test_streams_go_on_while_workers_and_routers_are_replaced(
    earlier: Path, installed: Path, redis: RedisServer, tmp_path: Path
) -> None:
    ports = {name: free_port() for name in ("prefill-0", "prefill-1", "decode-0", "decode-1")}
    with ExitStack() as stack:

        def start(name: str, *options: str) -> Callable[[], Process]:
            environment = earlier if name.endswith("0") else installed
            return stack.enter_context(
                started(
                    tmp_path, name, "--shutdown-timeout-s", str(WAIT_S), *options, environment=environment
                )
            )

        def start_worker(name: str) -> Callable[[], Process]:
            more = ("--history-redis", redis.url) if name.startswith("prefill") else ()
            return start(name, "--threads", "1", "--listen", f"127.0.0.1:{ports[name]}", *more)

        def start_router(name: str) -> Callable[[], Process]:
            workers = [
                ",".join(f"127.0.0.1:{port}" for name, port in ports.items() if name.startswith(role))
                for role in ("prefill", "decode")
            ]
            pools = ("--prefill-workers", workers[0], "--decode-workers", workers[1])
            return start(name, "--listen", "127.0.0.1:0", "--history-redis", redis.url, *pools)

        def replaced(router: Process, leaving: list[Process], then: Callable[[], object]) -> list[str]:
            """What streams say that run while processes are told to end."""
            begun = threading.Semaphore(0)
            with ThreadPoolExecutor(NUM_STREAMS) as pool:
                streams = [pool.submit(stream, router, index, begun.release) for index in range(NUM_STREAMS)]
                for _ in range(2 * NUM_STREAMS):
                    assert begun.acquire(timeout=WAIT_S)
                for process in leaving:
                    process.popen.send_signal(signal.SIGTERM)
                then()
                return [future.result(WAIT_S) for future in streams]

        waits = [start_worker("prefill-0"), start_worker("decode-0"), start_router("router-0")]
        old_prefill, old_decode, old_router = [wait() for wait in waits]
        until(lambda: is_ready(old_router))
        undisturbed = [stream(old_router, index) for index in range(NUM_STREAMS)]
        assert converse(old_router, 1)["turns"] == 1

        waits = [start_worker("prefill-1"), start_worker("decode-1")]
        new_workers = [wait() for wait in waits]
        until(lambda: all(map(is_ready, new_workers)))
        assert replaced(old_router, [old_prefill, old_decode], lambda: None) == undisturbed
        assert converse(old_router, 2)["turns"] == 2

        new_router = start_router("router-1")()
        until(lambda: is_ready(new_router))
        # while both are there, each goes on from what the other one wrote
        assert converse(new_router, 3)["turns"] == 3
        assert converse(old_router, 4)["turns"] == 4
        answers: list[dict[str, Any]] = []
        texts = replaced(old_router, [old_router], lambda: answers.append(converse(new_router, 5)))
        assert texts == undisturbed
        assert answers[0]["turns"] == 5
        assert answers[0]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert [stream(new_router, index) for index in range(NUM_STREAMS)] == undisturbed
        assert old_router.popen.wait(WAIT_S) == 0


@pytest.fixture(scope="module")
def question() -> tuple[list[int], list[str]]:
    """A prompt that the default method compresses, and the tokens that one process says: a number in it."""
    tokenizer, model = demo_tokenizer(), load_model("demo", device="cpu")
    words = "the pin of the red castle is 5 2 7 1 . " + "the pin of the old barn is 1 3 3 7 . " * 60
    prompt = tokenizer.encode(words + "what is the pin of the red castle ?")
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    tokens = OneProcessGenerator(model).generate(prompt, plan=plan_for("full"), sampling=sampling)
    assembler = TextAssembler(tokenizer)
    return prompt, [assembler.push(token.token_id).token_text for token in tokens]


METHODS = ("default", "full")
PAIRS: dict[str, tuple[Callable[[], str], set[tuple[str, str]]]] = {
    "release": (release_before, set(product(["new"], METHODS))),  # workers are upgraded before routers
    "week": (week_before, set(product(["old", "new"], METHODS))),
    "parameter": (lambda: OTHER_PARAMETER, {("old", "default"), ("new", "default")}),
}
"""Commits, and which router may be refused which method by the workers of the other commit."""


@pytest.mark.full
@pytest.mark.parametrize("pair", PAIRS)
def test_a_router_and_workers_of_two_commits_agree_or_one_is_refused_by_name(
    environment_of: Callable[[str], Path],
    installed: Path,
    question: tuple[list[int], list[str]],
    tmp_path: Path,
    pair: str,
) -> None:
    commit, may_refuse = PAIRS[pair]
    environments = {"old": environment_of(commit()), "new": installed}
    prompt, expected = question
    with ExitStack() as stack:

        def start(name: str, *options: str) -> Callable[[], Process]:
            environment = environments[name.partition("-")[2]]
            return stack.enter_context(started(tmp_path, name, *options, environment=environment))

        names = [f"{role}-{which}" for role in ROLES for which in environments]
        waits = {name: start(name, "--threads", "1") for name in names}
        workers = {name: wait() for name, wait in waits.items()}
        until(lambda: all(map(is_ready, workers.values())))
        for which, others in (("old", "new"), ("new", "old")):
            pools: list[str] = []
            for role in ROLES:
                pools += [f"--{role}-workers", workers[f"{role}-{others}"].addresses["address"]]
            router = start(f"router-{which}", "--listen", "127.0.0.1:0", *pools)()
            for method in METHODS:
                answer = ask(router, prompt, method, len(expected))
                if answer.status_code == 200:
                    assert answer.json()["choices"][0]["logprobs"]["tokens"] == expected
                    continue
                assert answer.status_code == 503, answer.text
                assert (which, method) in may_refuse, answer.text
                if which == "new":
                    said = answer.json()["error"]["message"]
                    assert re.search(r"(prefill|decode) worker 127\.0\.0\.1:\d+\b.*release", said), said


def ask(router: Process, prompt: list[int], method: str, num_tokens: int) -> httpx.Response:
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
    }
    if method != "default":
        body["kv_compression"] = {"method": method}
    return httpx.post(f"http://{router.addresses['address']}/v1/completions", json=body, timeout=WAIT_S)
