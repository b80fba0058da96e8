"""Find the server that holds a run: the only one, the primary that Sentinels name, or the owner of a cluster's slot.

All keys of a run lie in one slot, so one server holds all of them at any time. The client of a run is therefore an
ordinary client of redis-py, whose connections ask where that server is each time they connect. redis-py has such a
pool for Sentinels, and `ClusterNodes` answers its question for a cluster.

A server that no longer holds the run answers with an error (MOVED, READONLY, …). Its connection then ends as if the
server was lost: the caller sees an outage and tries again, and the next connection finds the new server. We follow no
redirection of a single command (ASK). While a slot moves key by key, a transaction would find its keys on two servers.
So nothing is written at the new owner before it owns the whole slot, and the run pauses until then.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import redis
from redis.cluster import parse_cluster_slots
from redis.connection import Connection
from redis.crc import key_slot
from redis.sentinel import Sentinel, SentinelConnectionPool, SentinelManagedConnection

from archipelago.broker.address import Address, Kind, parse_address
from archipelago.broker.redis.client import RedisClient, TlsConnection, client_at

#: How long a node or Sentinel may take to say where a primary is.
ASKED_SECONDS = 2.0
_ASKING = {"socket_timeout": ASKED_SECONDS, "socket_connect_timeout": ASKED_SECONDS}
#: What a server answers that does not hold the key now, or does not take writes for it.
_ELSEWHERE = (
    redis.exceptions.AskError,  # and MovedError
    redis.exceptions.TryAgainError,
    redis.exceptions.ClusterDownError,  # and MasterDownError
    redis.exceptions.ReadOnlyError,
)
#: The answer to a command that waits when its server becomes a replica.
_DEMOTED = "instance state changed"

Place = tuple[str, int]


class FollowingConnection(SentinelManagedConnection):
    """A connection to the server that holds a key now. It ends when that server answers that another one does."""

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)
        except redis.ResponseError as error:
            if not isinstance(error, _ELSEWHERE) and _DEMOTED not in str(error):
                raise
            self.disconnect()  # type: ignore[no-untyped-call]
            raise redis.ConnectionError(f"{type(error).__name__}: {error}") from error


class Servers:
    """The only server of an address."""

    kind: Kind = "server"

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    def client(self, key: str) -> RedisClient:
        """Return a client of the server that holds the key. It belongs to this object."""
        return self._client

    def nodes(self) -> Iterator[RedisClient]:
        """Yield a client of each server that has a copy of the data or may take it over, primaries first."""
        yield self._client

    def close(self) -> None:
        self._client.close()


class ClusterNodes:
    """The nodes of a cluster, as redis-py's pool for Sentinels asks them. `hosts` are those of the address."""

    def __init__(self, hosts: Sequence[Place], options: dict[str, Any], connection_class: type[Connection]) -> None:
        self._seeds = tuple(hosts)
        self._known = deque(hosts)
        self._options, self._class = options, connection_class
        self._lock = threading.Lock()

    def discover_master(self, key: str) -> Place:
        """Return the primary that owns the slot of a key."""
        slot = key_slot(key.encode())
        for (first, last), found in self.slots().items():
            if first <= slot <= last:
                return found["primary"][0], int(found["primary"][1])
        raise redis.ConnectionError(f"no node of the cluster owns the slot {slot}")

    def places(self) -> list[Place]:
        """Return all nodes, primaries first."""
        found = list(self.slots().values())
        nodes = [each["primary"] for each in found] + [node for each in found for node in each["replicas"]]
        return list(dict.fromkeys((host, int(port)) for host, port in nodes))

    def slots(self) -> dict[tuple[int, int], dict[str, Any]]:
        """Return the primary and the replicas of each range of slots.

        Each call begins with another node. A node that is cut off from the others may not know that it has lost its
        slots; its view then leads to a server that refuses commands, and the next call asks another one.
        """
        with self._lock:
            self._known.rotate(-1)
            asked = list(dict.fromkeys([*self._known, *self._seeds]))
        error: Exception = redis.ConnectionError("it has no nodes")
        for place in asked:
            with closing(self.client(place)) as client:
                try:
                    answer = client.execute_command("CLUSTER SLOTS")  # type: ignore[no-untyped-call]
                except (redis.ConnectionError, redis.TimeoutError, OSError) as fault:
                    error = fault
                    continue
            found = parse_cluster_slots(answer, current_host=place[0])
            nodes = [node for each in found.values() for node in (each["primary"], *each["replicas"])]
            with self._lock:
                known = {(host, int(port)) for host, port in nodes}
                kept = [each for each in self._known if each in known]
                self._known = deque([*kept, *sorted(known - {*kept})])
            return found
        raise error

    def client(self, place: Place) -> RedisClient:
        """Return a client of one node, which the caller closes."""
        return _client_of(place, self._class, self._options | _ASKING)


class ClusterServers(Servers):
    """The servers of a cluster."""

    kind: Kind = "cluster"

    def __init__(self, address: Address, authority: str) -> None:
        self._class, self._options = _template(address, authority)
        self._nodes = ClusterNodes(address.hosts, self._options, self._class)
        self._clients: dict[int, RedisClient] = {}
        self._lock = threading.Lock()

    def client(self, key: str) -> RedisClient:
        slot = key_slot(key.encode())
        with self._lock:
            if slot not in self._clients:
                self._clients[slot] = _following(key, self._nodes, self._class, self._options)
            return self._clients[slot]

    def nodes(self) -> Iterator[RedisClient]:
        for place in self._nodes.places():
            with closing(self._nodes.client(place)) as client:
                yield client

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


class Sentinels(Sentinel):
    """Sentinels as redis-py's pool asks them. Where none names a primary, its own class hides why."""

    def discover_master(self, service_name: str) -> Place:
        """Return the primary of a service."""
        error: Exception = redis.ConnectionError(f"no Sentinel knows a primary named {service_name!r} that is up")
        for index, client in enumerate(self.sentinels):
            try:
                known: Any = client.sentinel_masters()
            except (redis.ConnectionError, redis.TimeoutError) as fault:
                error = fault
                continue
            state = known.get(service_name)
            if state and self.check_master_state(state, service_name):  # type: ignore[no-untyped-call]
                self.sentinels[0], self.sentinels[index] = client, self.sentinels[0]  # it is asked first from now on
                return state["ip"], state["port"]
        raise error


class SentinelServers(Servers):
    """The primary that Sentinels name, and its replicas."""

    kind: Kind = "sentinel"

    def __init__(self, address: Address, authority: str) -> None:
        self._class, self._options = _template(address, authority)
        self._service = address.service
        mine = {"username", "password", "db"}  # those of the data servers
        options = {name: value for name, value in self._options.items() if name not in mine} | _ASKING
        options |= dict(address.sentinel_options)
        self._sentinels = Sentinels([])  # type: ignore[no-untyped-call]
        self._sentinels.sentinels = [_client_of(place, self._class, options) for place in address.hosts]
        super().__init__(_following(self._service, self._sentinels, self._class, self._options))

    def nodes(self) -> Iterator[RedisClient]:
        primary = self._sentinels.discover_master(self._service)
        for place in (primary, *self._sentinels.discover_slaves(self._service)):  # type: ignore[no-untyped-call]
            with closing(_client_of(place, self._class, self._options | _ASKING)) as client:
                yield client

    def close(self) -> None:
        super().close()
        for client in self._sentinels.sentinels:  # Sentinel.close is younger than the oldest redis-py that we accept
            client.close()


def servers_at(url: str, authority: str = "") -> Servers:
    """Return the servers of an address, not yet connected. Arguments and errors are those of `client_at`."""
    address = parse_address(url)
    if address.kind == "cluster":
        return ClusterServers(address, authority)
    if address.kind == "sentinel":
        return SentinelServers(address, authority)
    return Servers(client_at(url, authority))


def _template(address: Address, authority: str) -> tuple[type[Connection], dict[str, Any]]:
    """Return the class and the options of connections to one host of the address."""
    with closing(client_at(address.url, authority)) as client:
        pool = client.connection_pool
        options = {name: value for name, value in pool.connection_kwargs.items() if name not in ("host", "port")}
        if issubclass(pool.connection_class, TlsConnection):
            options["names"] = [host for host, _ in address.hosts]
        return pool.connection_class, options


def _client_of(place: Place, connection_class: type[Connection], options: dict[str, Any]) -> RedisClient:
    host, port = place
    pool = redis.ConnectionPool(connection_class=connection_class, host=host, port=port, **options)
    return redis.Redis.from_pool(pool)  # which closes the pool with the client


def _following(name: str, asked: Any, connection_class: type[Connection], options: dict[str, Any]) -> RedisClient:
    """Return a client of the server that `asked.discover_master(name)` names at each connection."""
    following = type("Following", (FollowingConnection, connection_class), {})
    pool = SentinelConnectionPool(name, asked, connection_class=following, **options)  # type: ignore[no-untyped-call]
    return redis.Redis.from_pool(pool)  # which closes the pool with the client
