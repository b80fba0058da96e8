"""A transport whose every call uses the credentials of the role that makes it in a run of invited members."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

from archipelago.broker.address import with_user
from archipelago.broker.commits import Image
from archipelago.broker.invitation import Role
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Snapshot
from archipelago.broker.redis import roles
from archipelago.broker.redis.transport import RedisTransport, connect

#: The calls whose second argument names the island that makes them. In the other calls it is the first one.
_SECOND = ("lease_range", "leased", "promise_answer", "hand_over")


def _caller(call: str, *arguments: Any) -> str:
    """Return the name of the island that makes a call. Calls that name none are the same for all islands."""
    says = arguments[call in _SECOND] if arguments else "anyone"
    text = getattr(says, "island", None) or getattr(says, "giver", None) or says
    return str(text).partition("/")[0]


def _reading(members: Members, call: str, *arguments: Any) -> RedisTransport:
    if call == "steer":
        return members.as_("operator")
    if call not in ("note", "record_evaluation"):
        return members.as_("viewer")
    writer = getattr(arguments[0], "who", "") or getattr(arguments[0], "by", "")
    return members.as_("merger") if writer in ("", "merger") else members.as_("island", writer)


class Members:
    """The members of one run at one server. Their users are made when they are first needed. They sign nothing."""

    def __init__(self, url: str, run: str) -> None:
        self.run = run
        self._url = url
        self.administrator = connect(url, run)
        self._version = self.administrator.membership.version()
        self._known: dict[tuple[Role, str], RedisTransport] = {}
        self._lock = threading.Lock()

    def as_(self, role: Role, name: str = "") -> RedisTransport:
        """Return the connection of a member of that role."""
        name = name or f"a-{role}"
        with self._lock:  # islands are threads here
            if (role, name) not in self._known:
                user, password = roles.user_of(self.run, name), secrets.token_hex(8)
                rules = roles.rules(role, self.run, name, self._version)
                assert self.administrator.membership.set_user(user, password, rules)
                self._known[role, name] = connect(with_user(self._url, user, password), self.run)
            return self._known[role, name]

    def close(self) -> None:
        for (_, name), transport in self._known.items():
            transport.close()
            self.administrator.membership.remove_user(roles.user_of(self.run, name))
        self.administrator.close()


class MembersTransport:
    """See `broker.transport.Transport`."""

    def __init__(self, members: Members) -> None:
        self.run = members.run
        self.administrator = members.administrator
        self._members = members
        self.island: Any = _Calls("island", lambda *call: members.as_("island", _caller(*call)))
        self.reader: Any = _Calls("reader", lambda *call: _reading(members, *call))
        self.merger: Any = _Calls("merger", lambda *_: members.as_("merger"))

    def create(self, manifest: Manifest, snapshots: Sequence[tuple[Snapshot, bytes]]) -> None:
        self.administrator.create(manifest, snapshots)

    def restore(self, image: Image) -> None:
        self._members.as_("merger").restore(image)

    def close(self) -> None:
        pass


class _Calls:
    """The calls of one client, each made by the connection that `who` returns for it."""

    def __init__(self, client: str, who: Callable[..., RedisTransport]) -> None:
        self._client, self._who = client, who

    def __getattr__(self, call: str) -> Any:
        def made(*arguments: Any, **named: Any) -> Any:
            return getattr(getattr(self._who(call, *arguments), self._client), call)(*arguments, **named)

        return made
