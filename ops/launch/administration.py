"""Invite members to a run and revoke them, with the connection of an administrator of its Redis."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

from archipelago.broker import invitation as invitations
from archipelago.broker import signing
from archipelago.broker.address import option, with_user
from archipelago.broker.control import DRAIN, EXPEL, island_field
from archipelago.broker.errors import ConfigError
from archipelago.broker.files import PRIVATE, make_untracked, write_atomically
from archipelago.broker.invitation import ADMIN, SUFFIX, Invitation, Member, Members, Role, key_text, raw_key
from archipelago.broker.redis import roles
from archipelago.broker.redis.administration import delete_island, sign_stored
from archipelago.broker.redis.keys import checked_name
from archipelago.broker.redis.transport import RedisTransport
from archipelago.broker.shards.transport import opened
from archipelago.broker.transport import ReaderClient
from archipelago.ops.launch.embedded_redis import RedisServer
from archipelago.ops.settings import say

ADMIN_FILE: Final = f"{ADMIN}{SUFFIX}"
MEMBERS_FILE: Final = "members.json"
#: The folder, in the run's folder, with the join files of the processes that `up` starts.
JOINS: Final = "joins"
PASSWORD_BYTES: Final = 32
#: The roles whose members sign what they send. The first invitation of one of them turns signatures on.
SIGNING_ROLES: Final = ("island", "merger")


class Administrator:
    """Changes who belongs to a run, with an administrator's connection and its URL.

    The file `admin.join` in the run's folder keeps the private key of the run's mergers. The file MEMBERS_FILE beside
    it keeps the records of its members, which no checkpoint has, because only administrators may write them.
    """

    def __init__(self, transport: RedisTransport, url: str, folder: Path) -> None:
        self.transport, self.membership, self.run = transport, transport.membership, transport.run
        self._url = url
        self.file = folder / ADMIN_FILE
        found = self.membership.all()  # Revoking the last member leaves the key.
        self._has_lost = not (found.by_name or found.faults or found.merger_key)

    def user_of(self, name: str) -> str:
        """Return the name of the Redis user that a member has, or would get."""
        member = self.membership.all().by_name.get(name)
        return (member.user if member else "") or roles.user_of(self.run, name)

    # -- the mergers' key ---------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Create the key of the run's mergers unless there is one.

        From then on the run is signed, and so is what Redis holds of it already. The private key and the URL are kept
        in the file `admin.join`.
        """
        invited, announced = self.transport.invitation, self.membership.all().merger_key
        private = self._kept_key() or (invited.private_key if invited is not None and invited.role == ADMIN else "")
        if not announced and not private:
            private = key_text(signing.generate()[0])
        if private:
            make_untracked(self.file.parent)
            kept = Invitation(self._url, self.run, ADMIN, ADMIN, private, public_text(private), self._authority())
            invitations.write(self.file, kept)
            announced = self.membership.offer_merger_key(public_text(private))
            if announced != public_text(private):
                raise ConfigError(
                    f"the run {self.run!r} has another merger key than {self.file}",
                    "Use the file of the person who made the run's first invitation. If the run is a new one with an "
                    "old name, move this file away.",
                    code="invitation.merger-key",
                )
            for shard in self._shards():
                sign_stored(shard.connection, shard.chunks, shard.merger.lease, raw_key(private))

    def _shards(self) -> list[RedisTransport]:
        """Return the connections to all shards of the run; to the first one before it exists."""
        if self.transport.reader.uid() is None:
            return [self.transport]
        manifest = self.transport.reader.manifest()
        return [self.transport, *(self.transport.of_shard(shard) for shard in range(1, manifest.shards))]

    @property
    def _reader(self) -> ReaderClient:
        """A reader of the whole run."""
        return opened(self.transport)[1].reader

    def _kept_key(self) -> str:
        """Return the private key of the run's mergers; empty if this folder does not have it."""
        if not self.file.exists():
            return ""
        kept = invitations.read(self.file)
        return kept.private_key if kept.run == self.run else ""

    def _authority(self) -> str:
        """Return the certificate of the authority that this connection trusts, as PEM; empty for the system's."""
        invited = self.transport.invitation
        if invited is not None:
            return invited.ca_certificate
        path = option(self._url, "ssl_ca_certs")
        try:
            return Path(path).read_text(encoding="ascii") if path else ""
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the certificate {path}: {error}", "Check ssl_ca_certs.") from error

    # -- members ------------------------------------------------------------------------------------------------------

    def invite(
        self,
        name: str,
        role: Role,
        *,
        user: str = "",
        password: str = "",
        url: str = "",
        may_replace: bool = False,
        kept_key: str = "",
    ) -> Invitation:
        """Make someone a member, and return the invitation.

        Args:
            user: The name of its Redis user; empty for the one that we choose.
            password: The password of a user that was created elsewhere; empty to create the user here.
            url: The URL under which the member reaches the Redis; empty for the administrator's own.
            may_replace: Whether a member of that name gets new credentials. The old ones end.
            kept_key: The private key that an island keeps while it is a member with it, so that its work stays valid.
                Requests to drain or expel it stay, too.

        Raises:
            ConfigError: There is a member of that name, the key of the mergers is elsewhere, or the server does not let
                us create the user.
        """
        checked_name(name, "the name")
        members = self.membership.all()
        if not may_replace and (name in members.by_name or name in members.faults):
            raise ConfigError(
                f"{name!r} is a member of the run {self.run!r} already",
                "Give --replace to replace its credentials (its present join file then ends), or choose another name.",
                code="invitation.exists",
            )
        user, creates_user = user or roles.user_of(self.run, name), not password
        password = password or secrets.token_urlsafe(PASSWORD_BYTES)
        rules = roles.rules(role, self.run, name, self.membership.version(), self.transport.reader.manifest().shards)
        denied = ConfigError(
            "this Redis does not let this user create other users",
            f"Create the user {user} where the Redis is managed, and then give its password: `--password-file FILE`. "
            f"Its rules are {' '.join(rules)}. Or use the URL of an administrator.",
            code="invitation.no-admin",
        )
        if creates_user and self.membership.users() is None:
            raise denied  # before the run is signed
        if role in SIGNING_ROLES:
            self.open()
        known, (private, public) = members.by_name.get(name), self._keys_for(role)
        if known and role == "island" and kept_key and known.key == public_text(kept_key):
            private, public = kept_key, known.key
        if creates_user and not self.membership.set_user(user, password, rules):
            raise denied
        self.membership.put({name: Member(role, public, user)})
        self._keep_records()
        # One of that name may have left earlier. What was asked of an island that has a join file here stays.
        if not kept_key and self._reader.control().get(island_field(name)) in (DRAIN, EXPEL):
            self._reader.steer({island_field(name): ""})
        return Invitation(
            with_user(url or self._url, user, password), self.run, name, role, private,
            self.membership.all().merger_key, self._authority(),
        )  # fmt: skip

    def _keys_for(self, role: Role) -> tuple[str, str]:
        """Return the private and the public key of a new member; both are empty for a role that signs nothing."""
        if role == "island":
            private, public = signing.generate()
            return key_text(private), key_text(public)
        if role != "merger":
            return "", ""
        kept = self._kept_key()
        if not kept:
            raise ConfigError(
                f"the private key of the mergers of the run {self.run!r} is not in {self.file}",
                "Invite mergers from where the run's first invitation was made, or copy that file from there.",
                code="invitation.merger-key",
            )
        return kept, public_text(kept)

    def revoke(self, name: str) -> bool | None:
        """End a membership: its user, its connections and its record. An island is expelled, and its keys are deleted.

        Return whether the user is gone; None if the server does not let us delete it. Raises ConfigError if there is
        no such member.
        """
        members, user = self.membership.all(), self.user_of(name)
        was_user = self.membership.remove_user(user)
        if name not in (*members.by_name, *members.faults) and not was_user:
            raise ConfigError(
                f"the run {self.run!r} has no member {name!r}",
                f"Its members are {', '.join(sorted(members.by_name))}." if members.by_name else "It has no members.",
                code="invitation.no-member",
            )
        member = members.by_name.get(name)
        if member is None or member.role == "island":
            self._reader.steer({island_field(name): EXPEL})
            for shard in self._shards():
                delete_island(shard.connection, name)
        self.membership.remove(name)
        self._keep_records()
        return None if was_user is None else True

    # -- a Redis that has lost the members ----------------------------------------------------------------------------

    def _keep_records(self) -> None:
        records = {name: member.to_json() for name, member in self.membership.all().by_name.items()}
        make_untracked(self.file.parent)
        content = json.dumps({"uid": self.transport.reader.uid(), "members": records})
        write_atomically(self.file.with_name(MEMBERS_FILE), content, mode=PRIVATE)

    def put_back(self, renewed: Collection[str]) -> None:
        """Put the members back if this Redis knew nothing of them, and say so.

        Name those whose users are lost. They need new credentials (`invite --replace`), but for the `renewed`, who get
        new ones now.
        """
        if self._has_lost and (names := self._put_records_back()):
            say(f"this Redis had lost the members of the run {self.run!r}: {', '.join(names)} are put back")
        users, members = self.membership.users(), self.membership.all().by_name
        own = {name: member.user or roles.user_of(self.run, name) for name, member in members.items()}
        lost = [name for name in sorted(own) if users is not None and own[name] not in users and name not in renewed]
        if lost:
            say(f"this Redis has no users for {', '.join(lost)}: invite each of them again, with --replace")

    def _put_records_back(self) -> list[str]:
        file = self.file.with_name(MEMBERS_FILE)
        try:
            kept = json.loads(file.read_text(encoding="utf-8"))
            members = Members.of(kept["members"]).by_name if kept["uid"] == self.transport.reader.uid() else {}
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"this Redis has lost the members of the run {self.run!r}, and {file} cannot be read ({error!r:.80})",
                "Put back a copy of that file. Or move it away, and invite each member again.",
                code="invitation.lost",
            ) from None
        if members:
            signs = any(member.role in SIGNING_ROLES for member in members.values()) and self._kept_key()
            self.membership.put(members, public_text(signs) if signs else "")
            if signs:
                self.open()
        return sorted(members)


def public_text(private: str) -> str:
    """Return the public key of a private key, both in base64."""
    return key_text(signing.public_key(raw_key(private)))


def administrator_at(server: RedisServer, run: str, folder: Path) -> Invitation:
    """Return what connects to a server of our own as its administrator, with the key of the run's mergers."""
    file = folder / ADMIN_FILE
    private = invitations.read(file).private_key if file.exists() else ""
    private = private or key_text(signing.generate()[0])
    return Invitation(server.url, run, ADMIN, ADMIN, private, public_text(private), server.address.certificate)


def invite_ours(administrator: Administrator, url: str, islands: Iterable[str]) -> dict[str, str]:
    """Invite the processes that `up` starts, and return their join files by name. This renews passwords."""
    ours: list[tuple[str, Role]] = [("merger", "merger"), ("standby", "viewer")]
    joins = {}
    for name, role in [*ours, *((island, "island") for island in islands)]:
        file = (administrator.file.parent / JOINS / f"{name}{SUFFIX}").absolute()
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A join file that was lost is no reason to stop, but a member of another role is somebody else's.
        known = administrator.membership.all().by_name.get(name)
        is_ours = file.exists() or (role != "island" and known is not None and known.role == role)
        key = invitations.read(file).private_key if file.exists() else ""
        invited = administrator.invite(name, role, url=url, may_replace=is_ours, kept_key=key)
        invitations.write(file, invited)
        joins[name] = str(file)
    administrator.membership.keep()
    return joins
