"""Invitations to a run: the join file of one member, and what the run's Redis keeps about its members.

A join file is one JSON object. It stands in for the URL in every verb: `archipelago island demo.oslo.join`. It holds
a password and usually a private key, so only its owner can read it. All keys are Ed25519 keys as 32 raw bytes in
base64.

The hash `members` of a run has one field for each member. Its field `@merger` is the public key of the run's mergers,
which they share. Only administrators can write the hash.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar, get_args

from annotated_types import Predicate
from pydantic import ConfigDict, StringConstraints, ValidationError

from archipelago.broker.address import parse_address
from archipelago.broker.errors import ConfigError, WireError, fault_in
from archipelago.broker.files import PRIVATE, write_atomically
from archipelago.broker.messages import Name, adapter
from archipelago.broker.redis.keys import is_name

Role = Literal["island", "merger", "operator", "viewer"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)
#: The role in the join file of an administrator, who invites members. An administrator is not a member, and may use all
#: commands of the Redis.
ADMIN: Final = "admin"
#: The ending of the names of join files.
SUFFIX: Final = ".join"
#: The field of the hash of members with the public key that all mergers of the run share. No member can have this name.
MERGER_KEY: Final = "@merger"
FILE_BYTES_MAX: Final = 64 << 10
#: A reader ignores further members.
MEMBERS_MAX: Final = 4096
Stored = TypeVar("Stored")
#: 32 bytes in base64, or nothing.
Key = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9+/]{43}=)?$")]


@dataclass(frozen=True)
class Invitation:
    """The content of one join file.

    Attributes:
        url: The URL of the Redis with this member's user name and password.
        name: The name of the member, which is the island's name.
        private_key: The key that the member signs with, in base64: an island's own, or the one that all mergers of the
            run share, which `admin` hands on to them. Empty for the other roles.
        merger_key: The public key of the run's mergers, in base64.
        ca_certificate: The certificate authority that signed the server's certificate, as PEM. Empty if the system's
            authorities apply, or without TLS.
        expires: Nothing. Earlier versions wrote a time. This version does not enforce one, so it refuses such a file.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    url: Annotated[str, Predicate(lambda url: bool(parse_address(url)))] = field(repr=False)
    run: Name
    name: Name
    role: Role | Literal["admin"]
    private_key: Key = field(default="", repr=False)
    merger_key: Key = ""
    ca_certificate: str = field(default="", repr=False)
    archipelago: Literal[1] = 1
    expires: None = None

    @property
    def island(self) -> str:
        """The name of the island that this file belongs to; empty for every other role."""
        return self.name if self.role == "island" else ""

    def to_json(self) -> str:
        return _written(self, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Invitation:
        """Parse the content of a join file. Raises WireError."""
        return _parsed(cls, text)


@dataclass(frozen=True)
class Member:
    """One member of a run, as its Redis keeps it.

    Attributes:
        key: The public key that checks what the member signs, in base64; empty if it signs nothing.
        user: The name of the Redis user that the member logs in as.
        expires: Nothing. A member whose time an earlier version has bounded is no member.
    """

    role: Role
    key: Key = ""
    user: str = ""
    expires: None = None

    def to_json(self) -> str:
        return _written(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Member:
        """Parse the value of a member's field; unknown parts are ignored. Raises WireError."""
        return _parsed(cls, text)


@dataclass(frozen=True)
class Members:
    """All members of a run.

    Attributes:
        merger_key: The public key of the run's mergers, in base64; empty if islands and mergers sign nothing.
        faults: What is wrong with the fields that cannot be read, by their names. Such a field admits no member.
    """

    by_name: Mapping[str, Member] = field(default_factory=dict)
    merger_key: str = ""
    faults: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, fields: Mapping[str, str]) -> Members:
        """Parse the fields of the hash of members."""
        found: dict[str, Member] = {}
        faults: dict[str, str] = {}
        merger_key = ""
        for name, text in islice(fields.items(), MEMBERS_MAX):
            try:
                if name == MERGER_KEY:
                    merger_key = _parsed(Key, json.dumps(text))
                elif is_name(name):
                    found[name] = Member.from_json(text)
                else:
                    raise WireError(f"{name!r:.80} is not a name")
            except WireError as error:
                faults[name] = error.reason
        return cls(found, merger_key, faults)


def raw_key(text: str) -> bytes:
    return base64.b64decode(text)


def key_text(raw: bytes) -> str:
    """Return a raw key as join files and Redis keep it."""
    return base64.b64encode(raw).decode()


def is_join_file(address: str) -> bool:
    """Return whether an address is the path of a join file, not a URL."""
    return "://" not in address


def names_redis(target: str) -> bool:
    """Return whether a target is a URL or a join file, where a verb also takes the name or the folder of a run.

    No name has a colon. HOST:PORT is meant as a URL, and reading it as a join file says how to write one.
    """
    return ":" in target or target.endswith(SUFFIX)


def write(path: Path, invitation: Invitation) -> None:
    """Write a join file that only its owner can read. Raises ConfigError."""
    try:
        write_atomically(path, invitation.to_json(), mode=PRIVATE)
    except OSError as error:
        raise ConfigError(
            f"cannot write the join file {path}: {error.strerror}", "Choose another place with --out.",
            code="invitation.file",
        ) from error  # fmt: skip


def read(path: Path) -> Invitation:
    """Read a join file. Raises ConfigError if there is none, others can read it, or its content is damaged."""
    try:
        with path.open("rb") as file:
            found = path.stat()
            content = file.read(FILE_BYTES_MAX + 1) if stat.S_ISREG(found.st_mode) else b""
    except OSError as error:
        raise ConfigError(
            f"cannot read the join file {str(path)!r:.200}: {error.strerror}",
            "Give the path of a file that `archipelago invite` wrote, or a URL such as redis://HOST:PORT.",
            code="invitation.file",
        ) from error
    if found.st_mode & _others(found.st_uid):
        raise ConfigError(
            f"other users of this machine can read the join file {path}, which holds a password",
            f"Run `chmod 600 {path}`. If others may have read it, ask for a new one: "
            "`archipelago invite NAME --replace`.",
            code="invitation.file",
        )
    try:
        if len(content) > FILE_BYTES_MAX:
            raise WireError(f"it is larger than {FILE_BYTES_MAX} bytes")
        return Invitation.from_json(content)
    except WireError as error:
        raise ConfigError(
            f"the join file {path} cannot be used: {error.reason}",
            "Ask for a new one, which `archipelago invite` makes.",
            code="invitation.invalid",
        ) from None


def _others(owner: int) -> int:
    """Return the permissions that a join file of this user must not give.

    An orchestrator mounts secrets as files of root that a process can only read through its group.
    """
    is_ours = owner == os.geteuid()
    return stat.S_IRWXO | (stat.S_IRWXG if is_ours else stat.S_IWGRP)


def _written(stored: Invitation | Member, indent: int | None = None) -> str:
    """Return the JSON of all fields that have a value."""
    values = dataclasses.asdict(stored)
    return json.dumps({name: value for name, value in values.items() if value is not None}, indent=indent)


def _parsed(kind: type[Stored], text: str | bytes) -> Stored:
    """Parse JSON. Raises WireError."""
    try:
        return adapter(kind).validate_json(text)  # type: ignore[no-any-return, arg-type]
    except ValidationError as error:
        raise WireError(fault_in(error)) from None
