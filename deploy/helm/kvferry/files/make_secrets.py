"""Makes the secrets of one installation that do not exist yet; runs in the chart's job, in kvferry's image.

    NAME-certs-ROLE   a role's files of `kvferry certs`: router, prefill, decode, metrics
    NAME-certs-ca     the authority's, which renews them
    NAME-keys         keys.toml with hashed keys, and the two keys themselves: api-key, metrics-key
    NAME-redis        url and users.acl of the bundled Redis

    python make_secrets.py NAME NAMESPACE DAYS PART ...     PART: certs, keys, redis

Talks to the API server as the pod's service account may: it creates secrets and changes none.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

ACCOUNT = Path(os.environ.get("ACCOUNT_FOLDER", "/var/run/secrets/kubernetes.io/serviceaccount"))
TIMEOUT_S = 30
EXISTS = 409


class Cluster:
    """The API server's secrets of one namespace."""

    def __init__(self, namespace: str) -> None:
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
        host = f"[{host}]" if ":" in host else host
        scheme = os.environ.get("KUBERNETES_SCHEME", "https")
        self._url = f"{scheme}://{host}:{port}/api/v1/namespaces/{namespace}/secrets"
        self._token = (ACCOUNT / "token").read_text(encoding="ascii").strip()
        self._tls = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt")) if scheme == "https" else None

    def has(self, name: str) -> bool:
        return self._call("GET", f"/{name}", None, accepts=404) != 404

    def create(self, name: str, content: dict[str, bytes], labels: dict[str, str]) -> None:
        data = {key: base64.b64encode(value).decode() for key, value in content.items()}
        metadata = {"name": name, "labels": labels}
        secret = {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata, "data": data}
        status = self._call("POST", "", json.dumps(secret).encode(), accepts=EXISTS)
        sys.stdout.write(f"{name}: {'exists' if status == EXISTS else 'made'}\n")

    def _call(self, method: str, path: str, body: bytes | None, *, accepts: int) -> int:
        """The status. Raises: urllib.error.HTTPError: another error than the accepted one."""
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, data=body, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=self._tls) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            if error.code != accepts:
                raise
            return error.code


def certs(days: str) -> dict[str, dict[str, bytes]]:
    """The files of `kvferry certs`, by folder."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["kvferry", "certs", folder, "--days", days], check=True, stdout=subprocess.DEVNULL)
        return {
            part.name: {file.name: file.read_bytes() for file in part.iterdir()}
            for part in Path(folder).iterdir()
        }


def keys() -> dict[str, bytes]:
    """A key for clients and one for Prometheus, and the file of their hashes that routers read."""
    made = {"api-key": ("default", "chat"), "metrics-key": ("prometheus", "metrics")}
    content: dict[str, bytes] = {}
    entries = ""
    for name, (holder, scope) in made.items():
        key = secrets.token_hex(24)
        digest = hashlib.sha256(key.encode()).hexdigest()
        entries += f'[[key]]\nname = "{holder}"\nhash = "sha256:{digest}"\nscopes = ["{scope}"]\n\n'
        content[name] = key.encode()
    return {**content, "keys.toml": entries.encode()}


def redis(name: str, namespace: str) -> dict[str, bytes]:
    """A password in the URL for services and in the ACL of the server."""
    password = secrets.token_hex(24)
    acl = (
        "user default off\n"
        "user health on nopass resetkeys -@all +ping\n"
        f"user kvferry on >{password} ~kvferry:* &kvferry:* +@all -@admin -@dangerous +info +keys\n"
    )
    url = f"redis://kvferry:{password}@{name}-redis.{namespace}.svc:6379/0"
    return {"url": url.encode(), "users.acl": acl.encode()}


def main() -> None:
    name, namespace, days, *parts = sys.argv[1:]
    cluster = Cluster(namespace)
    labels = {"app.kubernetes.io/name": "kvferry", "app.kubernetes.io/instance": name}
    if "certs" in parts and not cluster.has(f"{name}-certs-router"):
        made = certs(days)
        # The router's last: when it is there, all are.
        for part in sorted(made, key=lambda part: part == "router"):
            cluster.create(f"{name}-certs-{part}", made[part], labels)
    if "keys" in parts:
        cluster.create(f"{name}-keys", keys(), labels)
    if "redis" in parts:
        cluster.create(f"{name}-redis", redis(name, namespace), labels)


if __name__ == "__main__":
    main()
