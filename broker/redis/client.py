"""Create clients of redis-py, and reject addresses and credentials that cannot work.

The client never retries. A retried XADD after a stall would make two entries, so callers retry explicitly, and
identities make their retries idempotent.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import redis
from redis.backoff import NoBackoff
from redis.connection import PythonRespSerializer, SSLConnection
from redis.retry import Retry

RedisClient = redis.Redis
#: `away`: nothing answers at the address, or a server that does not accept the password. `loading`: it reads its data.
State = Literal["away", "loading", "ready"]

SOCKET_SECONDS = 20.0
#: A server of this machine that does not answer for this long is away.
LOCAL_SECONDS = 1.0
#: A host that acknowledges nothing for this long is treated as gone, where the system can tell.
SILENT_SECONDS = 8
#: The errors of OpenSSL for a certificate that is valid, and issued for another host name or IP address.
_MISMATCHES = (62, 64)
#: Larger arguments are written to the socket directly, without a copy into the command.
CUTOFF_BYTES = 6000


class TlsConnection(SSLConnection):
    """A TLS connection to a server whose certificate is issued for its host, or for one of some other names.

    Some clusters tell the IP addresses of their nodes, while the certificates hold only the name by which users reach
    the cluster. `tests/integration/test_tls_clusters.py` checks that redis-py still calls the private methods below.

    Args:
        names: These other names: the hosts of the address that led to the server.
    """

    def __init__(self, names: Sequence[str] = (), **options: Any) -> None:
        super().__init__(**options)
        self._names = names
        self._expected = ""

    def _connect(self) -> Any:
        mismatches = []
        for name in dict.fromkeys((self.host, *self._names)):
            self._expected = name
            try:
                return super()._connect()  # type: ignore[no-untyped-call]
            except ssl.SSLCertVerificationError as error:
                if error.verify_code not in _MISMATCHES:
                    raise
                mismatches.append(error)
        raise mismatches[0]

    def _wrap_socket_with_ssl(self, sock: socket.socket) -> ssl.SSLSocket:
        # redis-py expects the certificate of `host`.
        host, self.host = self.host, self._expected
        sock.settimeout(self.socket_connect_timeout)  # a server without TLS never answers
        try:
            secured = self._secured(sock)
        finally:
            self.host = host
        secured.settimeout(self.socket_timeout)
        return secured

    def _secured(self, sock: socket.socket) -> ssl.SSLSocket:
        secured: ssl.SSLSocket = super()._wrap_socket_with_ssl(sock)  # type: ignore[no-untyped-call]
        return secured


class PinnedConnection(TlsConnection):
    """A TLS connection to a server whose certificate comes from one authority, and from no authority of the system.

    The library can only add an authority to those of the system. This one is a certificate as PEM.
    """

    def __init__(self, authority: str, **options: Any) -> None:
        super().__init__(**options)
        # It requires a certificate, and checks the name of the host.
        self._context = ssl.create_default_context(cadata=authority)

    def _secured(self, sock: socket.socket) -> ssl.SSLSocket:
        return self._context.wrap_socket(sock, server_hostname=self.host)


def client_at(url: str, authority: str = "") -> RedisClient:
    """Return a client of that address, not yet connected.

    Args:
        authority: The only certificate authority to trust, as PEM; empty for those of the system and of the URL.

    Raises:
        ValueError, TypeError: The address or one of its options cannot be used.
    """
    tcp: dict[str, Any] = {
        "socket_connect_timeout": 5.0, "socket_keepalive": True, "socket_keepalive_options": _keepalive(),
    }  # fmt: skip
    client = redis.Redis.from_url(
        url,
        protocol=2,  # RESP3 begins with HELLO, which old servers and some proxies do not know
        socket_timeout=SOCKET_SECONDS,
        retry=Retry(NoBackoff(), 0),
        retry_on_error=[],
        # The packer of hiredis copies large arguments twice.
        command_packer=PythonRespSerializer(CUTOFF_BYTES, _encoded),
        **({} if url.startswith("unix:") else tcp),
    )
    pool = client.connection_pool
    if url.startswith("rediss:"):
        pool.connection_class = PinnedConnection if authority else TlsConnection
        pool.connection_kwargs |= {"authority": authority} if authority else {}
    try:
        pool.connection_class(**pool.connection_kwargs)  # this does not connect, but it checks the options
    except (redis.RedisError, ssl.SSLError) as error:
        raise ValueError(str(error)) from None
    if url.startswith("rediss:"):
        _require_credentials(pool.connection_kwargs)
    return client


def state_of(url: str, authority: str = "") -> tuple[State, int]:
    """Return the state of a server of this machine, and its process ID; 0 if it is away."""
    try:
        with client_at(url, authority) as client:
            client.connection_pool.connection_kwargs["socket_timeout"] = LOCAL_SECONDS
            found = client.info()
        return "loading" if found["loading"] else "ready", found["process_id"]
    except (redis.RedisError, OSError, ValueError, LookupError):
        return "away", 0


def fake_client(name: str) -> RedisClient:
    """Return a client of a fake server inside this process; one name always gives the same server."""
    import fakeredis

    client: RedisClient = fakeredis.FakeRedis(host=name, port=1, protocol=2)
    return client


def _keepalive() -> dict[int, int]:
    """Return the TCP options by which the system ends a connection to a silent host, as far as it has them.

    A slow link still acknowledges packets, so this may be much shorter than SOCKET_SECONDS.
    """
    wanted = {
        "TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": SILENT_SECONDS - 3,
        "TCP_USER_TIMEOUT": SILENT_SECONDS * 1000,  # keepalive probes idle connections, this limits unacknowledged data
    }  # fmt: skip
    return {getattr(socket, name): value for name, value in wanted.items() if hasattr(socket, name)}


def _require_credentials(options: Mapping[str, Any]) -> None:
    """Raise ValueError for TLS files that cannot be used; the client would report most of them as an outage."""
    context = ssl.create_default_context()
    context.minimum_version = options.get("ssl_min_version", context.minimum_version)
    ca = {kind: options.get(f"ssl_ca_{name}") for kind, name in (("cafile", "certs"), ("capath", "path"))}
    certificate, key = options.get("ssl_certfile"), options.get("ssl_keyfile")
    try:
        if any(ca.values()):
            context.load_verify_locations(**ca)
    except OSError as error:  # SSLError is an OSError, too
        raise ValueError(f"ssl_ca_certs or ssl_ca_path: {error.strerror}") from None
    try:
        if certificate or key:
            context.load_cert_chain(certificate or "", key, options.get("ssl_password") or "")
    except OSError as error:
        raise ValueError(f"ssl_certfile, ssl_keyfile or ssl_password: {error.strerror}") from None


def _encoded(value: Any) -> bytes | memoryview:
    """Return an argument as bytes. Raises TypeError for types that none of our commands takes."""
    if isinstance(value, bytes | memoryview):
        return value
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value).encode()
    raise TypeError(f"{type(value).__name__} is not an argument of a command")
