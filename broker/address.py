"""Validation of Redis URLs, and their display without passwords."""

from __future__ import annotations

import re
from urllib.parse import urlsplit


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
