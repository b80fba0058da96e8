"""What each role may do in Redis, as rules of its access control lists (ACL). All functions are pure.

| role | reads | writes |
| --- | --- | --- |
| viewer | the run | nothing |
| operator | the run | requests to the run |
| island | the run | its own keys; it appends to its streams, and `XADD` can shorten these |
| merger | the run | the run, except the records of its members |

A role has the same rights in all shards of a run. Only an administrator can invite members and create runs. Every role
reads the whole run, including what other islands have sent, and the names of all runs at the server; a merger reads the
names of all its keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from archipelago.broker.invitation import ROLES, Role
from archipelago.broker.redis.keys import REGISTRY, Keys

#: The first version that has the command with which the client library introduces itself.
SETINFO: Final = (7, 2)

#: Commands without keys. None of them changes anything at the server.
_KEYLESS: Final = ("PING", "TIME", "INFO", "MULTI", "EXEC", "DISCARD", "UNWATCH", "CLUSTER|SLOTS")
_READS: Final = (
    "WATCH", "EXISTS", "TYPE", "TTL", "PTTL", "GET", "STRLEN", "GETRANGE", "HGET", "HMGET", "HGETALL", "HEXISTS",
    "HLEN", "HSTRLEN", "HSCAN", "SMEMBERS", "SISMEMBER", "SCARD", "SSCAN", "XRANGE", "XREVRANGE", "XREAD", "XLEN",
    "XINFO|STREAM", "MEMORY|USAGE",
)  # fmt: skip
_KEY_WRITES: Final = ("SET", "DEL", "UNLINK", "EXPIRE", "PEXPIRE", "PERSIST")
_HASH_WRITES: Final = ("HSET", "HSETNX", "HDEL", "HINCRBY")
_SET_WRITES: Final = ("SADD", "SREM")
_STREAM_WRITES: Final = ("XADD", "XDEL", "XTRIM")


@dataclass(frozen=True)
class Grant:
    """The right to use some commands, `COMMAND` or `COMMAND|SUBCOMMAND`, on keys with some patterns."""

    commands: tuple[str, ...]
    keys: tuple[str, ...]


def user_of(run: str, name: str) -> str:
    """Return the name of a member's Redis user. A name cannot contain `~`, so no two members share a user."""
    return f"{run}~{name}"


def grants(role: Role, keys: Keys, name: str) -> list[Grant]:
    """Return what the member of that name and role may do, the reading grant first."""
    tag, reading = keys.tag, Grant(_READS, (f"{keys.tag}:*", REGISTRY))
    if role == "operator":
        return [reading, Grant(("HSET", "HDEL"), (keys.control,))]
    if role == "merger":
        everything = (*_KEY_WRITES, "RENAME", *_HASH_WRITES, *_SET_WRITES, *_STREAM_WRITES, "EVAL")
        # All keys of the run except `members`: only an administrator decides who belongs to a run.
        but_members = (f"{tag}:[^m]*", f"{tag}:m:*", keys.manifest)
        return [reading, Grant(everything, but_members), Grant(("SADD",), (REGISTRY,))]
    if role == "viewer":
        return [reading]
    return [
        reading,
        Grant(("XADD",), (keys.updates(name), *keys.said(name))),
        Grant(("SET",), (keys.evaluator, f"{tag}:taken:*")),
        Grant(_KEY_WRITES, (f"{tag}:c:{name}:*",)),
        Grant(_KEY_WRITES + _HASH_WRITES + _SET_WRITES, (keys.island(name), keys.name(name))),
        Grant(("SADD",), (keys.islands,)),
        # The first to write a field keeps it.
        Grant(("HSETNX",), (keys.corpora,)),
        # Islands hand each other the state of their optimisers. The receiving island checks it, and deletes it.
        Grant(("HSETNX", "HSET", "HDEL", "EXPIRE"), (keys.requests,)),
        Grant(("HSET", "DEL", "UNLINK", "EXPIRE"), (f"{tag}:handover:*",)),
        Grant(("UNLINK",), (f"{keys.handover_chunks('*')}*",)),
    ]


def rules(role: Role, run: str, name: str, version: tuple[int, ...], shards: int = 1) -> list[str]:
    """Return the arguments of ACL SETUSER, without those about the password, for a server of that version."""
    every = Keys.patterns(run, shards)
    reading, *writing = map(_joined, zip(*(grants(role, keys, name) for keys in every), strict=True))
    keyless = [*_KEYLESS, *(["CLIENT|SETINFO"] if version >= SETINFO else [])]
    begin = ["reset", "on", "resetchannels", "-@all"]
    root = [*_allowed(keyless), *_allowed(reading.commands), *(f"%R~{key}" for key in reading.keys)]
    selectors = ([*_allowed(grant.commands), *(f"~{key}" for key in grant.keys)] for grant in writing)
    return [*begin, *root, *(f"({' '.join(words)})" for words in selectors)]


def _joined(alike: Sequence[Grant]) -> Grant:
    """Return the rights of a role on the keys of several shards as one."""
    return replace(alike[0], keys=tuple(dict.fromkeys(key for grant in alike for key in grant.keys)))


def _allowed(commands: Sequence[str]) -> Iterator[str]:
    return (f"+{command.lower()}" for command in commands)


# -- examples of commands ---------------------------------------------------------------------------------------------

#: Arguments that make each command complete, with `*` in place of the key.
_ARGUMENTS: Final[dict[str, str]] = {
    "SET": "* x", "EXPIRE": "* 1", "PEXPIRE": "* 1", "GETRANGE": "* 0 1", "HGET": "* x", "HMGET": "* x",
    "HEXISTS": "* x", "HSTRLEN": "* x", "SISMEMBER": "* x", "SSCAN": "* 0", "HSCAN": "* 0", "RENAME": "* *",
    "XRANGE": "* - +", "XREVRANGE": "* + -",
    "XREAD": "STREAMS * 0", "HSET": "* x x", "HSETNX": "* x x", "HDEL": "* x",
    "HINCRBY": "* x 1", "SADD": "* x", "SREM": "* x", "XADD": "* ID x x", "XDEL": "* 0-1", "XTRIM": "* MAXLEN 1",
    "EVAL": "CODE 1 *",
}  # fmt: skip
_PLACEHOLDERS: Final = {"ID": "*", "CODE": "return 1"}


def needed_commands(role: Role | None, keys: Keys, name: str) -> list[tuple[Any, ...]]:
    """Return one complete command for every right of a role, or of all of them, to ask a server whether it permits it.

    WATCH is left out, because it cannot be queued in a transaction.
    """
    out: dict[tuple[Any, ...], None] = dict.fromkeys((command,) for command in ("PING", "TIME", "INFO"))
    for grant in (grant for each in ([role] if role else ROLES) for grant in grants(each, keys, name)):
        for command in grant.commands:
            if command != "WATCH":
                keys_like = (pattern.replace("[^m]", "x").replace("*", "checkup:0") for pattern in grant.keys)
                out |= dict.fromkeys(example(command, key) for key in keys_like)
    return list(out)


def example(command: str, key: str) -> tuple[str, ...]:
    """Return a complete command on a key."""
    words = _ARGUMENTS.get(command, "*").split()
    return (*command.split("|"), *(key if word == "*" else _PLACEHOLDERS.get(word, word) for word in words))
