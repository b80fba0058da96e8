"""Invitations to a run: the join file of one member, and what the run's Redis keeps about its members.

A join file is one JSON object. It stands in for the URL in every verb: `archipelago island demo.oslo.join`. It holds
a password and usually a private key, so only its owner can read it. All keys are Ed25519 keys as 32 raw bytes in
base64.

The hash `members` of a run has one field for each member. Its field `@merger` is the public key of the run's mergers,
which they share. Only administrators can write the hash.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, get_args

from archipelago.broker.address import parse_address, redacted
from archipelago.broker.errors import ConfigError, WireError
from archipelago.broker.files import PRIVATE, write_atomically
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
KEY_BYTES: Final = 32
FILE_BYTES_MAX: Final = 64 << 10
#: A reader ignores further members.
MEMBERS_MAX: Final = 4096
_FORMAT: Final = 1


@dataclass(frozen=True)
class Invitation:
    """The content of one join file.

    Attributes:
        url: The URL of the Redis with this member's user name and password.
        run: The name of the run.
        name: The name of the member, which is the island's name.
        role: What the member may do.
        private_key: The key that the member signs with, in base64: an island's own, or the one that all mergers of the
            run share, which `admin` hands on to them. Empty for the other roles.
        merger_key: The public key of the run's mergers, in base64.
        ca_certificate: The certificate authority that signed the server's certificate, as PEM. Empty if the system's
            authorities apply, or without TLS.
    """

    url: str = field(repr=False)
    run: str
    name: str
    role: Role | Literal["admin"]
    private_key: str = field(default="", repr=False)
    merger_key: str = ""
    ca_certificate: str = field(default="", repr=False)

    @property
    def island(self) -> str:
        """The name of the island that this file belongs to; empty for every other role."""
        return self.name if self.role == "island" else ""

    def to_json(self) -> str:
        """Return the content of the join file."""
        return json.dumps({"archipelago": _FORMAT, **dataclasses.asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Invitation:
        """Parse the content of a join file. Raises WireError."""
        values = _object(text)
        if values.pop("archipelago", None) != _FORMAT:
            raise WireError("it is not a join file of this version")
        _require_lasting(values)
        names = {each.name for each in dataclasses.fields(cls)}
        if unknown := values.keys() - names:
            raise WireError(f"it has an unknown field {min(unknown)!r:.40}")
        invitation = cls(**{"url": "", "run": "", "name": "", "role": "", **values})
        invitation._require_valid()
        return invitation

    def _require_valid(self) -> None:
        texts = (self.url, self.run, self.name, self.role, self.private_key, self.merger_key, self.ca_certificate)
        if not all(isinstance(text, str) for text in texts):
            raise WireError("one of its fields is not text")
        for name in (self.run, self.name):
            if not is_name(name):
                raise WireError(f"{name!r:.80} is not a name")
        if self.role != ADMIN:
            _require_role(self.role)
        for key in (self.private_key, self.merger_key):
            if key:
                raw_key(key)
        try:
            parse_address(self.url)
        except ValueError as error:
            raise WireError(f"its url {redacted(self.url)!r:.80} cannot be used: {error}") from None


@dataclass(frozen=True)
class Member:
    """One member of a run, as its Redis keeps it.

    Attributes:
        role: What the member may do.
        key: The public key that checks what the member signs, in base64; empty if it signs nothing.
        user: The name of the Redis user that the member logs in as.
    """

    role: Role
    key: str = ""
    user: str = ""

    def to_json(self) -> str:
        """Return the value of the member's field."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Member:
        """Parse the value of a member's field; unknown parts are ignored. Raises WireError."""
        values = _object(text)
        _require_lasting(values)
        member = cls(**{"role": "", **{k: v for k, v in values.items() if k in cls.__dataclass_fields__}})
        if not all(isinstance(text, str) for text in (member.key, member.user)):
            raise WireError("one of its fields is not text")
        _require_role(member.role)
        if member.key:
            raw_key(member.key)
        return member


@dataclass(frozen=True)
class Members:
    """All members of a run.

    Attributes:
        by_name: The members.
        merger_key: The public key of the run's mergers, in base64; empty if the run has none.
        faults: What is wrong with the fields that cannot be read, by their names. Such a field admits no member.
    """

    by_name: Mapping[str, Member] = field(default_factory=dict)
    merger_key: str = ""
    faults: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_signed(self) -> bool:
        """Whether the run's islands and mergers sign what they send."""
        return bool(self.merger_key)

    @classmethod
    def of(cls, fields: Mapping[str, str]) -> Members:
        """Parse the fields of the hash of members."""
        found: dict[str, Member] = {}
        faults: dict[str, str] = {}
        merger_key = ""
        for name, text in list(fields.items())[:MEMBERS_MAX]:
            try:
                if name == MERGER_KEY:
                    raw_key(text)
                    merger_key = text
                elif is_name(name):
                    found[name] = Member.from_json(text)
                else:
                    raise WireError(f"{name!r:.80} is not a name")
            except WireError as error:
                faults[name] = error.reason
        return cls(found, merger_key, faults)


def raw_key(text: str) -> bytes:
    """Return the raw bytes of a key. Raises WireError unless it is 32 bytes in base64."""
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise WireError("a key is not base64") from None
    if len(raw) != KEY_BYTES:
        raise WireError(f"a key has {len(raw)} bytes instead of {KEY_BYTES}")
    return raw


def key_text(raw: bytes) -> str:
    """Return a raw key as join files and Redis keep it."""
    return base64.b64encode(raw).decode()


def is_join_file(address: str) -> bool:
    """Return whether an address is the path of a join file, not a URL."""
    return "://" not in address


def names_redis(target: str) -> bool:
    """Return whether a target is a URL or a join file, where a verb also takes the name or the folder of a run."""
    return "://" in target or target.endswith(SUFFIX)


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
    """Read a join file.

    Raises:
        ConfigError: There is no such file, others can read it, or its content is damaged.
    """
    try:
        with path.open("rb") as file:
            found = path.stat()
            mode = found.st_mode
            content = file.read(FILE_BYTES_MAX + 1) if stat.S_ISREG(mode) else b""
    except OSError as error:
        raise ConfigError(
            f"cannot read the join file {str(path)!r:.200}: {error.strerror}",
            "Give the path of a file that `archipelago invite` wrote, or a URL such as redis://HOST:PORT.",
            code="invitation.no-file",
        ) from error
    if mode & _others(found.st_uid):
        raise ConfigError(
            f"other users of this machine can read the join file {path} (mode {stat.S_IMODE(mode):o}), which holds a "
            "password",
            f"Run `chmod 600 {path}`. If others may have read it, ask for a new one: "
            "`archipelago invite NAME --replace`.",
            code="invitation.open",
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


def _object(text: str | bytes) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise WireError("it is not JSON") from None
    if not isinstance(values, dict):
        raise WireError("it is not a JSON object")
    return values


def _require_role(role: object) -> None:
    if role not in ROLES:
        raise WireError(f"there is no role {role!r:.40}")


def _require_lasting(values: dict[str, Any]) -> None:
    """Remove the expiry that earlier versions wrote. Raise WireError if it is a time, which nothing would enforce."""
    if values.pop("expires", None) is not None:
        raise WireError("it has an expiry, which only earlier versions enforce")
