"""Validation of Redis URLs, and their display without passwords."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, quote, urlencode, urlsplit


def require_address(url: str) -> None:
    """Raise ValueError for a URL that is invalid, or that the Redis client would silently misread."""
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise ValueError("it does not begin with redis://, rediss:// or unix://")
    if parts.scheme == "unix":
        if parts.hostname is not None or not parts.path:
            raise ValueError("the path of a socket must be absolute")
    elif not parts.hostname:
        raise ValueError("it names no host")
    elif not re.fullmatch(r"/?\d*", parts.path) or parts.fragment:
        raise ValueError("only the number of a database can follow the host")


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
