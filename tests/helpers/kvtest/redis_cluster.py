"""A real Redis Cluster for tests: six server processes, three masters with a replica each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from redis.crc import key_slot

from kvtest.redis_server import RedisServer
from kvtest.waiting import until

NODE_TIMEOUT_MS = 1000
NUM_MASTERS = 3
NUM_SLOTS = 16384
_OPTIONS = (
    "--cluster-enabled", "yes", "--cluster-node-timeout", str(NODE_TIMEOUT_MS),
    "--repl-diskless-sync-delay", "0", "--cluster-replica-validity-factor", "0",
)  # fmt: skip


@dataclass(kw_only=True)
class RedisCluster:
    """The first three nodes begin as masters; the replica of node `i` is node `i + 3`."""

    nodes: list[RedisServer]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def master_of(self, key: str) -> RedisServer:
        """The node that serves a key, before any failover."""
        return self.nodes[key_slot(key.encode()) * NUM_MASTERS // NUM_SLOTS]

    def replica_of(self, master: RedisServer) -> RedisServer:
        return self.nodes[self.nodes.index(master) + NUM_MASTERS]

    @classmethod
    @contextlib.contextmanager
    def running(cls) -> Iterator[RedisCluster]:
        """A cluster that serves every slot and whose replicas are in step; removed at the end."""
        with contextlib.ExitStack() as stack:
            nodes = [stack.enter_context(RedisServer.running(*_OPTIONS)) for _ in range(2 * NUM_MASTERS)]
            cluster = cls(nodes=nodes)
            cluster._join()
            yield cluster

    def _join(self) -> None:
        ids = [_ask(node, "CLUSTER", "MYID").decode() for node in self.nodes]
        for index, node in enumerate(self.nodes[:NUM_MASTERS]):
            first, beyond = (-(-NUM_SLOTS * edge // NUM_MASTERS) for edge in (index, index + 1))
            _ask(node, "CLUSTER", "ADDSLOTSRANGE", first, beyond - 1)
            _ask(node, "CLUSTER", "SET-CONFIG-EPOCH", index + 1)
        for node in self.nodes[1:]:
            _ask(self.nodes[0], "CLUSTER", "MEET", "127.0.0.1", node.port, node.cluster_port)
        until(lambda: all(_info(node, "cluster_known_nodes") == "6" for node in self.nodes))
        for index in range(NUM_MASTERS):
            _ask(self.nodes[index + NUM_MASTERS], "CLUSTER", "REPLICATE", ids[index])
        until(lambda: all(_info(node, "cluster_state") == "ok" for node in self.nodes))
        until(lambda: all(_is_in_step(node) for node in self.nodes[NUM_MASTERS:]))


def _ask(node: RedisServer, *command: str | int) -> Any:
    with node.client() as client:
        return client.execute_command(*command)


def _info(node: RedisServer, field: str) -> str:
    with node.client() as client:
        return str(client.cluster("INFO")[field])


def _is_in_step(replica: RedisServer) -> bool:
    with replica.client() as client:
        return client.info("replication").get("master_link_status") == "up"
