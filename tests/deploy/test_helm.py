"""The Helm chart: valid for real tools, and of ports, paths, options, metrics and secrets that exist."""

from __future__ import annotations

import base64
import hashlib
import http.server
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml
from kvtest.lanes import some
from kvtest.ports import free_port
from kvtest.redis_server import server_binary
from prometheus_client import CollectorRegistry

from kvferry.services.launcher.cli import app, command_line
from kvferry.services.launcher.config import CONFIGS
from kvferry.services.router.api.operations import unkeyed
from kvferry.services.router.http.access import KeyFile
from kvferry.shared.device.kernel_paths import KernelQuarantine
from kvferry.shared.process.command_line import check_environment, variable_name
from kvferry.shared.telemetry.metrics import CERTIFICATE_EXPIRY, DecodeMetrics, PrefillMetrics, RouterMetrics
from kvferry.shared.telemetry.metrics_server import serve_metrics
from kvferry.shared.trust.certs import CLIENT_ROLES, PEERS, ROLES, Certs, tls_name
from kvferry.tools.certs import make_certs

helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
schemas = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")

REPOSITORY = Path(__file__).parents[2]
DEPLOY = REPOSITORY / "deploy"
CHART = DEPLOY / "helm" / "kvferry"
ENTRYPOINT = (REPOSITORY / "docker" / "entrypoint.sh").read_text(encoding="utf-8")
VERSIONS = ("1.28", "1.30", "1.32", "1.34", "1.37")
CUSTOM = {
    "ServiceMonitor": "monitoring.coreos.com/v1",
    "PrometheusRule": "monitoring.coreos.com/v1",
    "Certificate": "cert-manager.io/v1",
    "Issuer": "cert-manager.io/v1",
    "ScaledObject": "keda.sh/v1alpha1",
}
"""Kinds of operators, whose schemas are not Kubernetes' own."""
HEALTHCHECK = "/usr/local/lib/kvferry/healthcheck.py"
Item = dict[str, Any]


def _load_render() -> Any:
    spec = importlib.util.spec_from_file_location("render", DEPLOY / "helm" / "render.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


render = _load_render()

CHOICES: dict[str, Item] = {
    "gpu": {},
    "cpu": render.values_of("cpu"),
    "cert-manager": {"certs": {"from": "cert-manager"}},
    "hpa": {"autoscaling": {"kind": "hpa"}},
    "keda": {"autoscaling": {"kind": "keda"}},
    "own-secrets": {
        "certs": {"from": "existing"},
        "apiKeys": {"existingSecret": "mine"},
        "redis": {"existingSecret": "cluster"},
        "huggingFaceSecret": "hub",
        "otlpEndpoint": "http://collector.tracing.svc:4317",
        "networkPolicy": {"clientNamespaces": ["web", "batch"]},
    },
    "disk": {
        "prefill": {"historyDisk": "100Gi"}, "storageClass": "fast", "models": {"existingClaim": "models"},
    },
    "small": {
        "router": {"replicas": 1, "insecure": True}, "redis": {"bundled": False},
        "monitoring": {"enabled": False}, "networkPolicy": {"enabled": False},
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=CHOICES)
def items(request: pytest.FixtureRequest) -> list[Item]:
    rendered: list[Item] = render.render(CHOICES[request.param])
    return rendered


def of_kind(items: list[Item], *kinds: str) -> list[Item]:
    return [item for item in items if item["kind"] in kinds]


def pods(items: list[Item]) -> Iterator[tuple[str, Item]]:
    """The component and pod template of everything that runs pods."""
    for item in of_kind(items, "Deployment", "StatefulSet", "Job"):
        yield item["metadata"]["labels"]["app.kubernetes.io/component"], item["spec"]["template"]


def services(items: list[Item]) -> dict[str, Item]:
    """The container of each of our services."""
    return {role: pod["spec"]["containers"][0] for role, pod in pods(items) if role in CONFIGS}


# ---- valid for the tools ---------------------------------------------------------------------------------


def test_helm_lints_the_chart_without_a_warning() -> None:
    report = helm.lint(CHART, strict=True)
    assert report["errors"] == []
    assert [m for m in report["messages"] if m["severity"] > 1] == []


@pytest.mark.parametrize("version", some(VERSIONS, VERSIONS[0], VERSIONS[-1]))
def test_every_object_passes_kubernetes_schema_strictly(items: list[Item], version: str) -> None:
    for item in items:
        if item["kind"] in CUSTOM:
            assert item["apiVersion"] == CUSTOM[item["kind"]]
        else:
            schemas.validate(item, version, strict=True)


def test_strict_schemas_refuse_an_unknown_field() -> None:
    (deployment,) = of_kind(render.render({}), "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(schemas.ValidationError):
        schemas.validate(deployment, VERSIONS[0], strict=True)


@pytest.mark.parametrize("variant", ["gpu", "cpu"])
def test_the_plain_manifests_are_what_the_chart_renders(variant: str) -> None:
    committed = (DEPLOY / "kubernetes" / f"{variant}.yaml").read_text(encoding="utf-8")
    assert committed == render.manifest(render.values_of(variant)), "run deploy/helm/render.py"


def test_names_are_unique_and_the_version_is_the_projects(items: list[Item]) -> None:
    names = [(item["kind"], item["metadata"]["name"]) for item in items]
    assert len({*names}) == len(names)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["version"] == chart["appVersion"] == project["version"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"redis": {"bundled": False}}, "several routers need one"),
        ({"autoscaling": {"kind": "vpa"}}, "it must be none, hpa or keda"),
    ],
)
def test_values_that_cannot_work_are_refused(values: Item, message: str) -> None:
    with pytest.raises(helm.HelmRenderError, match=message):
        render.render(values)


# ---- policies --------------------------------------------------------------------------------------------


def test_pods_are_hardened_limited_and_pinned(items: list[Item]) -> None:
    for role, pod in pods(items):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, role
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, role
        assert spec["automountServiceAccountToken"] is (role == "secrets")
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True, role
            assert security["allowPrivilegeEscalation"] is False, role
            assert security["capabilities"] == {"drop": ["ALL"]}, role
            assert container["resources"]["limits"]["memory"], role
            assert container["resources"]["requests"]["cpu"], role
            assert re.search(r":[\w.-]*\d+\.\d+\.\d+", container["image"]), role
            if role != "secrets":
                assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys(), role


def test_services_spread_drain_and_survive_evictions(items: list[Item]) -> None:
    budgets = {
        b["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"]
        for b in of_kind(items, "PodDisruptionBudget")
    }
    assert budgets == {*CONFIGS}
    for role, pod in pods(items):
        if role not in CONFIGS:
            continue
        spec, labels = pod["spec"], pod["metadata"]["labels"]
        assert {constraint["topologyKey"] for constraint in spec["topologySpreadConstraints"]} == {
            "kubernetes.io/hostname", "topology.kubernetes.io/zone",
        }  # fmt: skip
        for constraint in spec["topologySpreadConstraints"]:
            assert constraint["labelSelector"]["matchLabels"].items() <= labels.items()
        drain_s = float(environment(spec["containers"][0])["KVFERRY_SHUTDOWN_TIMEOUT_S"])
        pre_stop = spec["containers"][0].get("lifecycle", {}).get("preStop", {}).get("exec", {})
        waits_s = float(pre_stop["command"][1]) if pre_stop else 0.0
        assert spec["terminationGracePeriodSeconds"] >= drain_s + waits_s + 30


def test_policies_let_in_what_the_services_need_and_no_more(items: list[Item]) -> None:
    policies = {
        p["metadata"]["name"].removeprefix("kvferry-"): p["spec"] for p in of_kind(items, "NetworkPolicy")
    }
    if not policies:
        return
    for role, container in services(items).items():
        spec = policies[role]
        assert spec["policyTypes"] == ["Ingress", "Egress"]
        allowed = {port["port"] for rule in spec["ingress"] for port in rule["ports"]}
        assert allowed == {port["containerPort"] for port in container["ports"]}
        if role != "router":
            assert all(rule["from"] for rule in spec["ingress"]), "workers are open to nobody else"


# ---- what the code has -----------------------------------------------------------------------------------


def environment(container: Item) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in container["env"] if "value" in variable}


def test_variables_are_options_of_their_service_with_valid_values(items: list[Item]) -> None:
    for role, container in services(items).items():
        settings = CONFIGS[role]  # type: ignore[index]
        fields = {variable_name(field): field for field in settings.model_fields}
        names = {variable["name"] for variable in container["env"] if variable["name"].startswith("KVFERRY_")}
        assert names <= fields.keys(), role
        given = {name: value for name, value in environment(container).items() if name in fields}
        check_environment(command_line.known, given)
        settings(**{fields[name]: value for name, value in given.items() if value})


def test_ports_are_those_of_the_images_entry_point(items: list[Item]) -> None:
    assert "kvferry router --listen 0.0.0.0:8000" in ENTRYPOINT
    number = dict(re.findall(r"^\s+(prefill|decode)\) number=(\d)", ENTRYPOINT, re.MULTILINE))
    for name, port in (("listen", "900"), ("metrics-listen", "920"), ("block-listen", "tcp://0.0.0.0:910")):
        assert re.search(rf"--{name} \S*{re.escape(port)}\$number", ENTRYPOINT), name
    expected = {"router": {"http": 8000}} | {
        role: {"control": int(f"900{n}"), "blocks": int(f"910{n}"), "metrics": int(f"920{n}")}
        for role, n in number.items()
    }
    found = {
        role: {port["name"]: port["containerPort"] for port in container["ports"]}
        for role, container in services(items).items()
    }
    assert found == expected
    for item in of_kind(items, "Service"):
        role = item["spec"]["selector"]["app.kubernetes.io/component"]
        if role in expected:
            for port in item["spec"]["ports"]:
                assert port["targetPort"] in expected[role]
                assert role == "router" or port["port"] == expected[role][port["name"]]


def test_probes_ask_paths_that_answer(items: list[Item]) -> None:
    router_paths = {getattr(route, "path", "") for route in unkeyed.routes}
    server = serve_metrics(CollectorRegistry(), "127.0.0.1:0", problem=lambda: "")
    try:
        for role, container in services(items).items():
            paths = {}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                if role == "router":
                    asked = container[probe]["httpGet"]
                    assert asked["port"] == "http"
                    paths[probe] = asked["path"]
                    assert asked["path"] in router_paths
                else:
                    *command, paths[probe] = container[probe]["exec"]["command"]
                    assert command == ["python", "-I", HEALTHCHECK], "the command of the image's own check"
                    with urllib.request.urlopen(
                        f"http://{server.address}{paths[probe]}", timeout=10
                    ) as reply:
                        assert reply.status == 200
            assert paths["readinessProbe"] == "/ready"
    finally:
        server.close()


def test_routers_find_workers_by_the_headless_services_names(items: list[Item]) -> None:
    arguments = services(items)["router"]["args"]
    assert arguments[0] == "router"
    by_entry_point = ["--prefill-workers", "prefill:9001", "--decode-workers", "decode:9002"]
    _, bound, _ = app["router"].parse_args([*by_entry_point, *arguments[1:]])
    headless = {
        item["metadata"]["name"]: {port["name"]: port["port"] for port in item["spec"]["ports"]}
        for item in of_kind(items, "Service")
        if item["spec"].get("clusterIP") == "None"
    }
    for role in ("prefill", "decode"):
        (name,) = [
            set["spec"]["serviceName"]
            for set in of_kind(items, "StatefulSet")
            if set["metadata"]["name"].endswith(role)
        ]
        port = headless[name]["control"]
        assert bound.kwargs[f"{role}_workers"] == f"{name}.{render.NAMESPACE}.svc:{port}"


def test_queries_name_metrics_that_the_services_have(items: list[Item]) -> None:
    known = {
        name
        for source in (
            *(make().registry for make in (RouterMetrics, PrefillMetrics, DecodeMetrics)),
            KernelQuarantine("decode"),
        )
        for family in source.collect()
        for name in (family.name, *(f"{family.name}_{end}" for end in ("total", "bucket", "sum", "count")))
    }
    recorded = {
        rule["record"]
        for path in (DEPLOY / "prometheus" / "rules").glob("*.yml")
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
        if "record" in rule
    }
    queries = [t["metadata"]["query"] for o in of_kind(items, "ScaledObject") for t in o["spec"]["triggers"]]
    defined = set()
    for item in of_kind(items, "ConfigMap"):
        if "config.yaml" in item["data"]:
            rules = yaml.safe_load(item["data"]["config.yaml"])["externalRules"]
            defined = {rule["name"]["as"] for rule in rules}
            queries += [query for rule in rules for query in (rule["metricsQuery"], rule["seriesQuery"])]
    for item in of_kind(items, "PrometheusRule"):
        queries += [rule["expr"] for group in item["spec"]["groups"] for rule in group["rules"]]
    for query in queries:
        for name in re.findall(r"[\w:]*kvferry[\w:]*", query):
            assert name in known | recorded | {CERTIFICATE_EXPIRY}, query
    wanted = {
        m["external"]["metric"]["name"]
        for h in of_kind(items, "HorizontalPodAutoscaler")
        for m in h["spec"]["metrics"]
    }
    assert wanted == defined
    for item in of_kind(items, "HorizontalPodAutoscaler", "ScaledObject"):
        target = item["spec"]["scaleTargetRef"]
        (scaled,) = [s for s in of_kind(items, "StatefulSet") if s["metadata"]["name"] == target["name"]]
        assert "replicas" not in scaled["spec"], "an autoscaler's number would be overwritten"


def test_config_maps_have_every_dashboard_under_the_label_that_grafana_looks_for(items: list[Item]) -> None:
    label = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))["monitoring"][
        "dashboardLabel"
    ]
    found = {
        name: json.loads(text)
        for item in of_kind(items, "ConfigMap")
        if label in item["metadata"]["labels"]
        for name, text in item["data"].items()
    }
    files = (DEPLOY / "grafana" / "dashboards").glob("*.json")
    dashboards = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in files}
    assert found == (dashboards if of_kind(items, "PrometheusRule") else {})


def test_monitors_select_ports_of_services_by_the_jobs_that_rules_know(items: list[Item]) -> None:
    for monitor in of_kind(items, "ServiceMonitor"):
        labels = monitor["spec"]["selector"]["matchLabels"]
        role = labels[monitor["spec"]["jobLabel"]]
        assert role in CONFIGS
        (port,) = [endpoint["port"] for endpoint in monitor["spec"]["endpoints"]]
        matched = [s for s in of_kind(items, "Service") if labels.items() <= s["metadata"]["labels"].items()]
        assert len(matched) == 1
        assert port in {service_port["name"] for service_port in matched[0]["spec"]["ports"]}


# ---- secrets ---------------------------------------------------------------------------------------------


def needed_secrets(items: list[Item]) -> dict[str, set[str]]:
    """The secrets that pods and monitors read, with their keys; no keys where all are mounted."""
    found: dict[str, set[str]] = {}
    for _, pod in pods(items):
        for volume in pod["spec"]["volumes"]:
            sources = [source["secret"] for source in volume.get("projected", {}).get("sources", [])]
            sources += (
                [{"name": volume["secret"]["secretName"], **volume["secret"]}] if "secret" in volume else []
            )
            for source in sources:
                found.setdefault(source["name"], set()).update(
                    item["key"] for item in source.get("items", [])
                )
        for container in pod["spec"]["containers"]:
            for variable in container.get("env", []):
                if "valueFrom" in variable:
                    reference = variable["valueFrom"]["secretKeyRef"]
                    found.setdefault(reference["name"], set()).add(reference["key"])
    for monitor in of_kind(items, "ServiceMonitor"):
        for endpoint in monitor["spec"]["endpoints"]:
            tls = endpoint.get("tlsConfig")
            if tls is not None:
                for secret in (tls["ca"]["secret"], tls["cert"]["secret"], tls["keySecret"]):
                    found.setdefault(secret["name"], set()).add(secret["key"])
            if "authorization" in endpoint:
                credentials = endpoint["authorization"]["credentials"]
                found.setdefault(credentials["name"], set()).add(credentials["key"])
    return found


class ApiServer:
    """Stands in for the API server's secrets: refuses other paths, other tokens, and names that exist."""

    def __init__(self) -> None:
        self.secrets: dict[str, dict[str, bytes]] = {}
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply(200 if self.path.rpartition("/")[2] in outer.secrets else 404)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                schemas.validate(body, VERSIONS[-1], strict=True)
                name = body["metadata"]["name"]
                if name in outer.secrets:
                    self._reply(409)
                    return
                outer.secrets[name] = {key: base64.b64decode(text) for key, text in body["data"].items()}
                self._reply(201)

            def _reply(self, status: int) -> None:
                right = self.path.startswith("/api/v1/namespaces/kvferry/secrets")
                if not right or self.headers["Authorization"] != "Bearer a-token":
                    status = 403
                self.send_response(status)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """The secrets that the chart's job makes, run as in the pod; a second run changes none."""
    account = tmp_path_factory.mktemp("account")
    (account / "token").write_text("a-token\n")
    (job,) = of_kind(render.render({}), "Job")
    container = job["spec"]["template"]["spec"]["containers"][0]
    api = ApiServer()
    try:
        variables = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "ACCOUNT_FOLDER": str(account),
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(api.port),
            "KUBERNETES_SCHEME": "http",
        }
        command = [sys.executable, CHART / "files" / "make_secrets.py", *container["args"]]
        for said in ("made", "exists"):
            before = dict(api.secrets)
            done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=800)
            assert done.returncode == 0, done.stderr
            assert said in done.stdout
            assert not before or api.secrets == before
    finally:
        api.close()
    return api.secrets


def test_every_secret_is_made_by_the_job_or_cert_manager_or_is_ones_own(
    items: list[Item], made: dict[str, dict[str, bytes]]
) -> None:
    by_cert_manager = {c["spec"]["secretName"] for c in of_kind(items, "Certificate")}
    for name, keys in needed_secrets(items).items():
        if name in ("mine", "cluster", "hub"):
            continue
        if name in by_cert_manager:
            assert keys == {"ca.crt", "tls.crt", "tls.key"}
        else:
            assert keys <= made[name].keys(), name


def test_services_read_their_keys_from_what_is_mounted(
    items: list[Item], made: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    """With cert-manager its certificate in place of ours: the same names, of files that it makes."""
    make_certs(tmp_path / "other", days=1, everything=False)
    theirs = {"ca.crt": "ca.pem", "tls.crt": "tls.pem", "tls.key": "tls.key"}
    for role, pod in pods(items):
        if role not in ROLES:
            continue
        container = pod["spec"]["containers"][0]
        volumes = {"certs": role} | ({"metrics-certs": "metrics"} if role in PEERS else {})
        for name, of_role in volumes.items():
            folder = tmp_path / "mounted" / role / of_role
            folder.mkdir(parents=True)
            (certs,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == name]
            for source in certs["projected"]["sources"]:
                secret = source["secret"]
                content = made.get(secret["name"]) or {
                    key: (tmp_path / "other" / of_role / file).read_bytes() for key, file in theirs.items()
                }
                paths = {item["key"]: item["path"] for item in secret.get("items", [])} or {
                    key: key for key in content
                }
                for key, path in paths.items():
                    (folder / path).write_bytes(content[key])
            (mount,) = [
                volume_mount["mountPath"]
                for volume_mount in container["volumeMounts"]
                if volume_mount["name"] == name
            ]
            assert mount == f"{environment(container)['KVFERRY_CERTS']}/{of_role}"
        keys = Certs(str(tmp_path / "mounted" / role), role)  # type: ignore[arg-type]
        if role in PEERS:
            assert keys.block_keys().secret
            keys.server_credentials()
            keys.server_context()
            Certs(str(tmp_path / "mounted" / role), "metrics").client_context()


def test_certificates_have_the_names_and_uses_of_kvferry_certs(items: list[Item]) -> None:
    for certificate in of_kind(items, "Certificate"):
        spec = certificate["spec"]
        if spec.get("isCA"):
            continue
        role = spec["secretName"].rpartition("-")[2]
        assert spec["dnsNames"] == [tls_name(role)]
        assert f"{'client' if role in CLIENT_ROLES else 'server'} auth" in spec["usages"]


def test_the_keys_of_the_job_open_the_router(made: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_bytes(made["kvferry-keys"]["keys.toml"])
    file = KeyFile(tmp_path / "keys.toml")
    for name, scope in (("api-key", "chat"), ("metrics-key", "metrics")):
        key = file.find(hashlib.sha256(made["kvferry-keys"][name]).hexdigest())
        assert key is not None
        assert key.allows(scope)
        assert not key.allows("admin")


def test_the_bundled_redis_takes_the_password_of_the_url(
    made: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    (server,) = [
        i for i in of_kind(render.render({}), "StatefulSet") if i["metadata"]["name"] == "kvferry-redis"
    ]
    container = server["spec"]["template"]["spec"]["containers"][0]
    (tmp_path / "users.acl").write_bytes(made["kvferry-redis"]["users.acl"])
    arguments = [
        {"/run/kvferry/redis/users.acl": str(tmp_path / "users.acl"), "/data": str(tmp_path)}.get(
            argument, argument
        )
        for argument in container["args"]
    ]
    port = free_port()
    process = subprocess.Popen([server_binary(), *arguments, "--port", str(port)], stdout=subprocess.DEVNULL)
    try:
        url = (
            made["kvferry-redis"]["url"]
            .decode()
            .replace("kvferry-redis.kvferry.svc:6379", f"127.0.0.1:{port}")
        )
        client = redis.Redis.from_url(url, retry=redis.retry.Retry(redis.backoff.ConstantBackoff(0.1), 100))
        assert client.set("kvferry:{a}:b", "c")
        assert client.info("server")
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.set("other", "c")
        assert container["command"] == ["redis-server"]
        health = redis.Redis(port=port, username="health", password="any")
        assert "--user health --pass any" in container["readinessProbe"]["exec"]["command"][2]
        assert health.ping()
    finally:
        process.terminate()
        process.wait(30)
