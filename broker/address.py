"""Addresses of a Redis: what is read as one, and how it is shown without its password."""

from __future__ import annotations

import re
from urllib.parse import urlsplit


def require_address(url: str) -> None:
    """Raises ValueError for what the client would quietly understand otherwise."""
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise ValueError("it begins with none of redis://, rediss://, unix://")
    if parts.scheme == "unix":
        if parts.hostname is not None or not parts.path:
            raise ValueError("the path of a socket must be absolute")
    elif not parts.hostname:
        raise ValueError("it names no host")
    elif not re.fullmatch(r"/?\d*", parts.path) or parts.fragment:
        raise ValueError("after the host only the number of a database may follow")


def redacted(url: str) -> str:
    """The URL without its password, fit for logs and errors; also where it is no URL because of its password."""
    before, at, after = url.rpartition("@")
    scheme, slashes, user = before.rpartition("://")
    if at and not url.startswith("unix:///"):
        url = f"{scheme}{slashes}{user.partition(':')[0] + ':' if ':' in user else ''}***@{after}"
    return re.sub(r"(password=)[^&#]*", r"\1***", url, flags=re.IGNORECASE)
