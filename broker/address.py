"""Validation of Redis URLs, their parts, and their display without passwords.

| address | the run lies on |
| --- | --- |
| `redis://HOST:PORT/DB`, `rediss://…`, `unix:///PATH` | that server |
| `redis+cluster://HOST:PORT,HOST:PORT`, `rediss+cluster://…` | a Redis Cluster; each HOST is one of its nodes |
| `redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB`, … | the primary of SERVICE; each HOST is a Sentinel |
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

Kind = Literal["server", "cluster", "sentinel"]
SENTINEL_PORT = 26379
REDIS_PORT = 6379


class AddressError(ValueError):
    """The URL is invalid, or the client would misread it. The text quotes no part of it, so it holds no password."""


@dataclass(frozen=True)
class Address:
    """A URL, taken apart.

    Attributes:
        url: The address of the first host as redis-py reads it, with user, password, database and options.
        hosts: All hosts with their ports. Empty for the kind `server`.
        service: The name by which Sentinels know the primary; else empty.
        sentinel_options: User and password for the Sentinels, which have users of their own.
    """

    kind: Kind
    url: str
    hosts: tuple[tuple[str, int], ...] = ()
    service: str = ""
    sentinel_options: tuple[tuple[str, str], ...] = ()


def parse_address(url: str) -> Address:
    """Return the parts of a URL. Raises ValueError for one that is invalid, or that the client would misread."""
    scheme, plus, kind = urlsplit(url).scheme.partition("+")
    if not plus:
        _require_single(url)
        return Address("server", url)
    if scheme not in ("redis", "rediss") or kind not in ("cluster", "sentinel"):
        raise AddressError("it does not begin with redis+cluster://, redis+sentinel:// or the same with rediss")
    parts = urlsplit(url)
    user, at, hosts = parts.netloc.rpartition("@")
    found = tuple(_host(each, SENTINEL_PORT if kind == "sentinel" else REDIS_PORT) for each in hosts.split(","))
    first = f"[{found[0][0]}]" if ":" in found[0][0] else found[0][0]
    service, path = "", parts.path
    if kind == "sentinel":
        _, service, *rest = f"{path}/".split("/", 2)
        if not service:
            raise AddressError("it names no service: redis+sentinel://HOST:PORT,HOST:PORT/SERVICE")
        path = f"/{rest[0].strip('/')}"
    elif path.strip("/") not in ("", "0"):
        raise AddressError("a cluster has only the database 0")
    options = parse_qsl(parts.query)
    query = urlencode([(name, value) for name, value in options if not name.startswith("sentinel_")])
    single = parts._replace(scheme=scheme, netloc=f"{user}{at}{first}:{found[0][1]}", path=path, query=query).geturl()
    _require_single(single)
    of_sentinels = [(name.removeprefix("sentinel_"), value) for name, value in options if name.startswith("sentinel_")]
    if any(name not in ("username", "password") for name, _ in of_sentinels) or (of_sentinels and not service):
        raise AddressError("only sentinel_username and sentinel_password of redis+sentinel:// can begin with sentinel_")
    return Address("cluster" if kind == "cluster" else "sentinel", single, found, service, tuple(of_sentinels))


def _host(text: str, port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname or parts.path or "@" in text:
        raise AddressError("it names no host, or an empty one between two commas")
    return parts.hostname, parts.port or port


def _require_single(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise AddressError("it does not begin with redis://, rediss://, unix://, redis+cluster:// or redis+sentinel://")
    if parts.scheme != "rediss" and any(name.startswith("ssl_") for name, _ in parse_qsl(parts.query)):
        raise AddressError("options that begin with ssl_ are of TLS, with which an address begins with rediss")
    if parts.scheme == "unix":
        if parts.hostname is not None or not parts.path:
            raise AddressError("the path of a socket must be absolute")
    elif not parts.hostname:
        raise AddressError("it names no host")
    elif not re.fullmatch(r"/?\d*", parts.path) or parts.fragment:
        raise AddressError("only the number of a database can follow the host")


def redacted(url: str) -> str:
    """Return the URL without its password, for logs and errors. It may be invalid because of its password."""
    before, at, after = url.rpartition("@")
    scheme, slashes, user = before.rpartition("://")
    if at and not url.startswith("unix:///"):
        url = f"{scheme}{slashes}{user.partition(':')[0] + ':' if ':' in user else ''}***@{after}"
    return re.sub(r"(password=)[^&#]*", r"\1***", url, flags=re.IGNORECASE)


def with_user(url: str, user: str, password: str) -> str:
    """Return the URL with another user and password, and without the options that name files of this machine."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    left_out = ("username", "password", "ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile", "ssl_password")
    options = urlencode([(name, value) for name, value in parse_qsl(parts.query) if name not in left_out])
    return parts._replace(netloc=f"{quote(user, '')}:{quote(password, '')}@{host}", query=options).geturl()


def option(url: str, name: str) -> str:
    """Return an option of the URL, such as `ssl_ca_certs`; empty if it does not have it."""
    return dict(parse_qsl(urlsplit(url).query)).get(name, "")
