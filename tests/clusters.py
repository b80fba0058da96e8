"""A Redis Cluster and a primary with Sentinels for tests.

They are of the Valkey that an installed package brings, or of the machine's Redis, which has TLS.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from archipelago.broker.machine import LOOPBACK, free_port
from archipelago.broker.redis.keys import Keys
from archipelago.ops.launch import parent_death
from archipelago.ops.launch.embedded_redis import find_program
from tests.certificates import Identity

Until = Callable[..., None]

PASSWORD = secrets.token_hex(8)
#: How long a node may be silent before its replica replaces it, as the others or the Sentinels decide. A loaded machine
#: rarely stops a process for so long, and the tests that wait for an election do so a few times only.
SILENT_MS = 2000
#: The same without replicas. Nothing replaces a node then: the others refuse all requests for as long as it is silent,
#: and on a loaded machine a node may be silent for seconds.
PATIENT_MS = 60_000


@dataclass(frozen=True)
class Tls:
    """What servers need to speak TLS to clients and to each other, and nothing else.

    Attributes:
        program: A server that has TLS.
        authority: The authority that signed the certificate of the servers.
        server: That certificate. It must be valid for clients, too, because the nodes of a cluster are that to others.
    """

    program: Path
    authority: Identity
    server: Identity

    def options(self, port: int) -> list[str]:
        """Return the options of a server."""
        files = {"ca-cert": self.authority.certificate, "cert": self.server.certificate, "key": self.server.key}
        named = [word for name, path in files.items() for word in (f"--tls-{name}-file", str(path))]
        ports = ["--port", "0", "--tls-port", str(port)]
        return [*ports, "--tls-replication", "yes", "--tls-auth-clients", "no", *named]


@dataclass
class Node:
    """One server process. It can be killed and started again on its folder."""

    folder: Path
    options: Sequence[str]
    tls: Tls | None = None
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        options: dict[str, Any] = {"password": PASSWORD, "protocol": 2, "socket_timeout": 60.0}
        options |= {"ssl": True, "ssl_ca_certs": str(self.tls.authority.certificate)} if self.tls else {}
        self.client: Any = redis.Redis(LOOPBACK, self.port, **options)
        self.start()

    def start(self) -> None:
        program = self.tls.program if self.tls else find_program().path
        assert program is not None
        ports = self.tls.options(self.port) if self.tls else ["--port", str(self.port)]
        argv = [str(program), *self.options, *ports, "--dir", str(self.folder), "--bind", LOOPBACK]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(parent_death.command(argv), stdout=log, stderr=log, cwd=self.folder)

    def answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except (redis.ConnectionError, redis.TimeoutError):
            return False

    def kill(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def role(self) -> str:
        """Return `master` or `slave`, as the node itself says."""
        return str(self.client.role()[0].decode())

    def is_synced(self) -> bool:
        """Return whether this replica has a live link to its primary."""
        info = self.client.info("replication")
        return bool(info["role"] == "slave" and info["master_link_status"] == "up")

    def follows(self, primary: Node) -> bool:
        """Return whether this is a running replica of a primary, with a live link to it."""
        return self.is_running and self.is_synced() and self.client.info("replication")["master_port"] == primary.port

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """Keep this replica from following its primary, which goes on alone: a wrong password refuses every try."""
        self.client.config_set("masterauth", "wrong")
        self.client.execute_command("CLIENT", "KILL", "TYPE", "master")
        yield
        self.client.config_set("masterauth", PASSWORD)

    def end(self) -> None:
        if self.is_running:
            self.kill()
        self.client.close()


def data_options(*more: str) -> list[str]:
    """Return the options of a server with a password that keeps nothing on disk."""
    return ["--requirepass", PASSWORD, "--masterauth", PASSWORD, "--save", "", "--appendonly", "no",
            "--repl-diskless-sync-delay", "0", "--loglevel", "warning", *more]  # fmt: skip


class Cluster:
    """Three primaries, each with `replicas` replicas, which replace a primary that is silent for `silent_ms`."""

    def __init__(
        self, folder: Path, until: Until, replicas: int = 0, tls: Tls | None = None, silent_ms: int = SILENT_MS
    ) -> None:
        self._until, self.tls, self._silent_ms = until, tls, silent_ms if replicas else PATIENT_MS
        self.nodes = [self._node(folder / str(index)) for index in range(3 * (1 + replicas))]
        try:
            self._make_one()
        except BaseException:  # Else the servers would run on, and fail another test, which finds them.
            self.end()
            raise

    def _make_one(self) -> None:
        """Make one cluster of the nodes."""
        for index, node in enumerate(self.nodes):
            self.nodes[index] = self._answering(node)
        self.ids = {node.port: node.client.execute_command("CLUSTER MYID").decode() for node in self.nodes}
        share = -(-REDIS_CLUSTER_HASH_SLOTS // 3)
        for index, node in enumerate(self.nodes[:3]):
            last = min(REDIS_CLUSTER_HASH_SLOTS, (index + 1) * share) - 1
            node.client.execute_command("CLUSTER", "ADDSLOTSRANGE", index * share, last)
            node.client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
        self._until(self._have_met, "the nodes to meet")
        for index, node in enumerate(self.nodes[3:]):
            node.client.execute_command("CLUSTER", "REPLICATE", self.ids[self.nodes[index % 3].port])
        self._until(lambda: all(self._is_ok(node) for node in self.nodes), "the cluster to be ready")
        self._until(lambda: all(node.is_synced() for node in self.nodes[3:]), "the replicas to follow")

    def _node(self, folder: Path) -> Node:
        # Without the validity factor 0, a replica that was cut off for long would never be elected.
        cluster = ["--cluster-enabled", "yes", "--cluster-node-timeout", str(self._silent_ms)]
        cluster += ["--cluster-replica-validity-factor", "0", "--cluster-port", str(free_port())]
        return Node(folder, data_options(*cluster, *(["--tls-cluster", "yes"] if self.tls else [])), self.tls)

    def _answering(self, node: Node) -> Node:
        """Return the node once it answers, or another one if a process took one of its ports before it did."""
        self._until(lambda: node.answers() or not node.is_running, f"node {node.folder} to answer")
        if node.is_running:
            return node
        said = (node.folder / "log").read_text()
        assert "Failed listening on port" in said, said
        node.end()
        return self._answering(self._node(node.folder.with_name(f"{node.folder.name}-again")))

    def _have_met(self) -> bool:
        """Let each node meet those that it does not know, and return whether all knew all.

        It is for calling again: a node forgets one that does not answer a handshake within `silent_ms`.
        """
        known = [node.client.execute_command("CLUSTER NODES") for node in self.nodes]
        for node, found in zip(self.nodes, known, strict=True):
            for other in self.nodes:
                if f"{LOOPBACK}:{other.port}" not in found:
                    bus = int(other.options[other.options.index("--cluster-port") + 1])
                    node.client.execute_command("CLUSTER", "MEET", LOOPBACK, other.port, bus)
        unready = any("handshake" in each["flags"] for found in known for each in found.values())
        return not unready and all(len(found) == len(self.nodes) for found in known)

    def _is_ok(self, node: Node) -> bool:
        info = node.client.execute_command("CLUSTER INFO")
        return info["cluster_state"] == "ok" and int(info["cluster_known_nodes"]) == len(self.nodes)

    @property
    def url(self) -> str:
        """The address, which names all nodes."""
        scheme, options = ("rediss", f"?ssl_ca_certs={self.tls.authority.certificate}") if self.tls else ("redis", "")
        return f"{scheme}+cluster://:{PASSWORD}@{','.join(f'{LOOPBACK}:{node.port}' for node in self.nodes)}{options}"

    def owner(self, run: str, shard: int = 0) -> Node:
        """Return the primary that owns the slot of a shard of a run."""
        return self.holder(Keys(run, shard).manifest)

    def holder(self, key: str) -> Node:
        """Return the primary that owns the slot of a key, as it says itself."""
        slot = key_slot(key.encode())
        for node in self.nodes:
            if node.is_running and node.role() == "master" and slot in self.slots_of(node):
                return node
        raise LookupError(f"no running primary owns the slot {slot}")

    def slots_of(self, node: Node) -> set[int]:
        """Return the slots that a node says it owns."""
        own = node.client.execute_command("CLUSTER NODES")[f"{LOOPBACK}:{node.port}"]["slots"]
        return {slot for first, *last in own for slot in range(int(first), int((last or [first])[0]) + 1)}

    def pair(self, run: str, shard: int = 0) -> tuple[Node, Node]:
        """Return the primary that owns the slot of a shard of a run, and a replica, as soon as that one follows it.

        On a loaded machine, a node may be silent for so long that its replica replaces it without a fault of a test.
        """
        found: list[tuple[Node, Node]] = []

        def is_there() -> bool:
            with suppress(LookupError):
                primary = self.owner(run, shard)
                found.extend((primary, node) for node in self.nodes if node is not primary and node.follows(primary))
            return bool(found)

        self._until(is_there, f"a primary of {run} with a replica")
        return found[0]

    def promote(self, replica: Node) -> None:
        """Make a replica the primary of its slots, without asking the others, who may have elected it meanwhile."""
        try:
            replica.client.execute_command("CLUSTER", "FAILOVER", "TAKEOVER")
        except redis.ResponseError:
            if replica.role() != "master":
                raise
        self._until(lambda: replica.role() == "master", "the replica to take over")

    def move_slot(self, slot: int, old: Node, new: Node) -> None:
        """Move a slot key by key, as `redis-cli --cluster reshard` does it."""
        old_id, new_id = self.ids[old.port], self.ids[new.port]
        new.client.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", old_id)
        old.client.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", new_id)
        while keys := old.client.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 1):
            old.client.execute_command("MIGRATE", LOOPBACK, new.port, "", 0, 5000, "AUTH", PASSWORD, "KEYS", *keys)
        for node in (new, old, *self.nodes):
            if node.is_running and node.role() == "master":
                node.client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", new_id)

    def end(self) -> None:
        for node in self.nodes:
            node.end()


class Watched:
    """One primary with a replica, and three Sentinels that replace one that is silent for `silent_ms`."""

    def __init__(self, folder: Path, until: Until, tls: Tls | None = None, silent_ms: int = SILENT_MS) -> None:
        self._until, self.tls = until, tls
        self.primary = Node(folder / "primary", data_options(), tls)
        until(self.primary.answers, "the primary to answer")
        follows = data_options("--replicaof", f"{LOOPBACK} {self.primary.port}")
        self.replica = Node(folder / "replica", follows, tls)
        until(self.replica.answers, "the replica to answer")
        until(self.replica.is_synced, "the replica to follow")  # Sentinels ask for replicas only every ten seconds.
        self.sentinels = []
        for index in range(3):
            home = folder / f"sentinel-{index}"
            config = folder / f"sentinel-{index}.conf"
            config.write_text(
                f"sentinel monitor mine {LOOPBACK} {self.primary.port} 2\n"
                f"sentinel auth-pass mine {PASSWORD}\n"
                f"sentinel down-after-milliseconds mine {silent_ms}\n"
                "sentinel failover-timeout mine 3000\n"
                f"requirepass {PASSWORD}\n"
                f"sentinel sentinel-pass {PASSWORD}\n"
            )
            self.sentinels.append(Node(home, [str(config), "--sentinel"], tls))
        for node in self.sentinels:
            until(node.answers, f"{node.folder} to answer")
        until(lambda: all(self._knows_all(node) for node in self.sentinels), "the Sentinels to meet")

    def _knows_all(self, sentinel: Node) -> bool:
        state = sentinel.client.sentinel_masters()["mine"]
        return bool(state["num-other-sentinels"] == 2 and state["num-slaves"] == 1)

    def is_copied(self) -> bool:
        """Return whether the replica has everything that the primary has, whichever is which."""
        infos = [node.client.info("replication") for node in (self.primary, self.replica)]
        return bool(infos[0]["master_repl_offset"] == infos[1]["master_repl_offset"])

    @property
    def url(self) -> str:
        """The address, which names all Sentinels."""
        hosts = ",".join(f"{LOOPBACK}:{node.port}" for node in self.sentinels)
        scheme, options = ("rediss", f"&ssl_ca_certs={self.tls.authority.certificate}") if self.tls else ("redis", "")
        return f"{scheme}+sentinel://:{PASSWORD}@{hosts}/mine?sentinel_password={PASSWORD}{options}"

    def end(self) -> None:
        for node in (*self.sentinels, self.primary, self.replica):
            node.end()
