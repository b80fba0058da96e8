"""The greeting between two processes of an island: each proves that it is no stranger, and they compare versions."""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Mapping

from archipelago.broker.errors import ConfigError
from archipelago.islands.hosts.frames import Connection, Frame
from archipelago.islands.hosts.membership import Membership

#: A process that has just connected says who it is within this time.
HELLO_SECONDS = 10.0


def proof(key: bytes, *parts: str) -> str:
    """Return what only a process can compute that knows the key."""
    return hmac.new(key, "\0".join(parts).encode(), "sha256").hexdigest()


def matches(found: str, expected: str) -> bool:
    """Return whether a proof is the expected one, in a time that tells nothing about it."""
    return hmac.compare_digest(found.encode(), expected.encode())


def no_arrays() -> int:
    """Return the most bytes of the arrays of a greeting, or of what another process says to the leader."""
    return 0


def greet(connection: Connection, place: Membership, about: Mapping[str, str], key: bytes) -> None:
    challenge = connection.receive(no_arrays, HELLO_SECONDS).text(0)
    own, text = secrets.token_hex(32), json.dumps(dict(about))
    rank, hosts = place.rank, place.hosts
    connection.send(
        Frame("hello", (rank, hosts, text, own, proof(key, challenge, str(rank), str(hosts), text, own)))
    )  # fmt: skip
    answer = connection.receive(no_arrays, HELLO_SECONDS)
    if answer.kind == "refused":
        raise ConfigError(answer.text(0), answer.text(1), code=answer.text(2))
    if answer.kind != "welcome" or not matches(answer.text(0), proof(key, own)):
        raise ConfigError(
            f"what answers at {place.address} is not the leader of this island",
            "Check --coordinator, and give all hosts of an island the same Redis URL or join file.",
            code="hosts.stranger",
        )


def disagreement(what: str, own: str, rank: int, other: str) -> ConfigError:
    """Return the error of hosts that have not the same."""
    return ConfigError(
        f"the hosts of this island disagree: host 0 has {what} {own}, and host {rank} has {other}",
        "Install the same versions, and start all hosts with the same flags and as many devices.",
        code="hosts.disagree",
    )
