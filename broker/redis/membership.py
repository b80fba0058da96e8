"""The members of a run at its Redis: their records, and the users that they log in as."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import redis

from archipelago.broker.errors import BrokerError
from archipelago.broker.invitation import MERGER_KEY, Member, Members
from archipelago.broker.redis.connection import RedisConnection
from archipelago.broker.redis.replies import text_fields

#: Where a server keeps its users over a restart. `nowhere`: it forgets them.
Kept = Literal["aclfile", "config", "nowhere"]
#: The server's answers to a command of an administrator that it does not know, or does not permit.
_NO_ADMIN = "unknown command|unknown subcommand|NOPERM|no permissions|disabled|not allowed|not supported"


class Membership:
    """Reads the records of a run's members. With an administrator's connection, it also changes them."""

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection
        self._redis, self._keys = connection.redis, connection.keys

    def all(self) -> Members:
        """Return all members."""
        found: Any = {}
        with self._connection.forgiving(self._keys.members, "a hash"):
            found = self._redis.hgetall(self._keys.members)
        return Members.of(text_fields(found))

    def version(self) -> tuple[int, ...]:
        """Return the version of the server, as Redis counts it."""
        text = str(self._connection.info("server").get("redis_version", "0"))
        return tuple(int(part) for part in re.findall(r"\d+", text)[:3])

    # -- records ------------------------------------------------------------------------------------------------------

    def put(self, name: str, member: Member) -> None:
        """Add a member, or replace its record."""
        with self._connection.translated():
            self._redis.hset(self._keys.members, name, member.to_json())

    def remove(self, name: str) -> bool:
        """Remove a member's record. Return whether there was one."""
        with self._connection.translated():
            return bool(self._redis.hdel(self._keys.members, name))

    def offer_merger_key(self, key: str) -> str:
        """Set the public key of the run's mergers unless there is one, and return the one that holds."""
        with self._connection.translated():
            self._redis.hsetnx(self._keys.members, MERGER_KEY, key)
            found: bytes = self._redis.hget(self._keys.members, MERGER_KEY)
        return found.decode("utf-8", "replace")

    # -- users --------------------------------------------------------------------------------------------------------

    def may_administer(self) -> bool:
        """Return whether the server lets this connection read and change its users."""
        return self._administer("ACL", "USERS") is not None

    def set_user(self, user: str, password: str, rules: Sequence[str]) -> bool:
        """Create or replace a user. Its present connections end. Return False if a server does not permit that."""
        begin, *rest = rules  # `reset` removes passwords, so it comes first
        if None in self._everywhere("ACL", "SETUSER", user, begin, f">{password}", *rest):
            return False
        self._everywhere("CLIENT", "KILL", "USER", user)
        return True

    def remove_user(self, user: str) -> bool | None:
        """Delete a user, which ends its connections, too.

        Returns:
            Whether there was such a user; None if a server does not permit it.
        """
        gone = self._everywhere("ACL", "DELUSER", user)
        return None if None in gone else any(gone)

    def is_open(self) -> bool:
        """Return whether clients without a password may do anything, as far as this connection may know it."""
        found = self._administer("ACL", "LIST") or []
        words: list[bytes] = next((line.split() for line in found if line.startswith(b"user default ")), [])
        return b"on" in words and b"nopass" in words

    def keep(self) -> Kept:
        """Let the servers write their users to their disks, and return where they are."""
        if None not in self._everywhere("ACL", "SAVE"):
            return "aclfile"
        return "config" if None not in self._everywhere("CONFIG", "REWRITE") else "nowhere"

    def _everywhere(self, *command: str) -> list[Any]:
        """Return the answers of all servers. Each has users of its own: a replica does not take those of its primary.

        A replica without them would refuse every member once it is promoted.
        """
        with self._connection.translated():
            return [self._administer(*command, node=node) for node in self._connection.servers.nodes()]

    def _administer(self, *command: str, node: Any = None) -> Any:
        """Return the answer to a command of an administrator; None if the server does not know or permit it."""
        try:
            with self._connection.translated():
                return (node or self._redis).execute_command(*command)
        except BrokerError as error:
            cause = error.__cause__
            denied = isinstance(cause, redis.exceptions.NoPermissionError) or re.search(
                _NO_ADMIN, str(cause), re.IGNORECASE
            )
            no_file = command[1] in ("SAVE", "REWRITE") and isinstance(cause, redis.ResponseError)
            if denied or no_file:
                return None
            raise
