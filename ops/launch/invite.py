"""`archipelago invite` and `archipelago revoke`: make members of a run, with credentials of their own, and end them."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

import tyro

from archipelago.broker import invitation as invitations
from archipelago.broker.address import parse_address
from archipelago.broker.errors import ConfigError
from archipelago.broker.files import make_untracked
from archipelago.broker.invitation import SUFFIX, Invitation, Members, Role
from archipelago.broker.process import RUN_VARIABLE, URL_VARIABLE, connect_to, invitation_at, print_json
from archipelago.ops.launch.administration import ADMIN_FILE, Administrator
from archipelago.ops.launch.rm import living
from archipelago.ops.settings import confirm, say, table_console
from archipelago.ops.watch.doctor.server import is_local, privacy
from archipelago.ops.watch.formatting import new_table

STANDARD_OUTPUT: Final = "-"
#: The command that each role can use first.
_FIRST_VERB: Final = {"island": "island", "merger": "merger", "operator": "status", "viewer": "status"}


@dataclass(frozen=True)
class AdministratorOptions:
    """The options with which `invite` and `revoke` find the run."""

    name: Annotated[str, tyro.conf.Positional] = ""
    """The member's name. An island trains under it."""
    url: Annotated[str | None, tyro.conf.Positional] = None
    """An administrator's URL, or the file admin.join. The default is $ARCHIPELAGO_URL, or FOLDER/RUN/admin.join."""
    run: str | None = None
    """The name of the run. The default is $ARCHIPELAGO_RUN, or the only one there is."""
    folder: Path = Path("runs")
    """The folder with the folders of all runs. RUN/admin.join in it keeps the private key of the run's mergers."""
    json: bool = False
    """Print one JSON object."""

    @contextmanager
    def administrator(self) -> Iterator[Administrator]:
        address = self.url or os.environ.get(URL_VARIABLE) or self._kept()
        invited = invitation_at(address)
        with closing(connect_to(address, self.run)) as transport:
            transport.reader.manifest()  # only a run that exists can have members
            url = invited.url if invited else address
            administrator = Administrator(transport, url, self.folder / transport.run)
            administrator.put_back([self.name])
            yield administrator

    def _kept(self) -> str:
        run = self.run or os.environ.get(RUN_VARIABLE, "*")
        found = sorted(self.folder.glob(f"{run}/{ADMIN_FILE}"))
        if len(found) != 1:
            which = f"there are {len(found)} files" if found else "there is no file"
            raise ConfigError(
                f"no Redis URL was given, and {which} {self.folder / run / ADMIN_FILE}",
                f"Give an administrator's URL (redis://USER:PASSWORD@HOST:PORT) in ${URL_VARIABLE}.",
                code="invitation.no-admin",
            )
        return str(found[0])


@dataclass(frozen=True)
class InviteOptions(AdministratorOptions):
    """Invite a member to a run: create a Redis user with the rights of its role, and write its join file.

    The join file is secret, and stands in for the URL in every verb but `up`: `archipelago island demo.oslo.join`.
    The first invitation of an island or merger turns signatures on: from then on, the run's mergers and islands need
    invitations. Without a name, it lists the members.
    """

    role: Role = "island"
    """What the member may do: train, merge, steer (operator) or only look (viewer)."""
    out: Path | None = None
    """The join file. The default is FOLDER/RUN/RUN.NAME.join, where git ignores it. `-` writes it to standard output.
    """
    replace: bool = False
    """Replace the credentials of a member. The old ones end at once."""
    address: str | None = None
    """The URL under which the member reaches this Redis, if it is not the administrator's; without user and password.
    """
    yes: bool = False
    """Do not ask before the first invitation closes the run to members without join files."""
    user: str = ""
    """With --password-file: the name of the user that was created elsewhere."""
    password_file: Path | None = None
    """Create no user. Write the join file of one that was created elsewhere, with the password in this file."""


@dataclass(frozen=True)
class RevokeOptions(AdministratorOptions):
    """End a membership of a run: delete its Redis user, close its connections, and expel its island."""


def main(options: InviteOptions | RevokeOptions) -> int:
    """Invite a member, list the members, or end a membership."""
    return _revoke(options) if isinstance(options, RevokeOptions) else _invite(options)


def _invite(options: InviteOptions) -> int:
    options = _without_name(options)
    with options.administrator() as administrator:
        if not options.name:
            _list(administrator.membership.all(), options)
            return 0
        file = options.out or _join_file(options, administrator.run)
        if not options.replace and str(file) != STANDARD_OUTPUT and file.exists():
            raise ConfigError(
                f"{file} exists",
                "To renew the member's credentials, give --replace. For another file, give --out.",
                code="invitation.exists",
            )
        was_signed = bool(administrator.membership.all().merger_key)
        closes = not was_signed and options.role in ("island", "merger")
        if closes and (left_out := living(administrator.transport)):
            confirm(
                f"This first invitation closes the run to all without a join file, such as {', '.join(left_out)}.",
                administrator.run, given=options.yes,
            )  # fmt: skip
        invited = administrator.invite(
            options.name, options.role, user=options.user, password=_password(options),
            url=_address(options), may_replace=options.replace,
        )  # fmt: skip
        _hand_out(administrator, invited, file, options)
        if options.json or str(file) == STANDARD_OUTPUT:
            return 0
        if not was_signed and administrator.membership.all().merger_key:
            _explain_first(administrator, options.role)
        for warning in warnings(administrator, invited, created=options.password_file is None):
            say(f"  warning: {warning}")
    return 0


def _revoke(options: RevokeOptions) -> int:
    if not options.name:
        raise ConfigError("no member was named", "Write `archipelago revoke NAME`.", code="config.value")
    with options.administrator() as administrator:
        user = administrator.user_of(options.name)
        member = administrator.membership.all().by_name.get(options.name)
        is_gone, file = administrator.revoke(options.name), _join_file(options, administrator.run)
        kept = administrator.membership.keep() if is_gone else None
    if options.json:
        print_json({"name": options.name, "user": user, "user_deleted": bool(is_gone)})
        return 0 if is_gone else 1
    say(f"{options.name!r} is no member any more: its record is removed")
    if is_gone:
        say(f"  the user {user} is deleted, and its connections are closed")
    if member is None or member.role == "island":
        say("  its island is expelled: the merger refuses what it sends, also what already waits")
    if member is not None and member.role == "merger":
        say("  it still knows the key with which all mergers of the run sign")
    if is_gone and kept == "nowhere":
        say("  this Redis does not keep its users on disk: check its configuration file for that user")
    if file.exists():
        say(f"  {file} is of no use any more: delete it before you invite somebody of that name")
    if not is_gone:
        say(f"  this Redis does not let us delete users: delete {user} where the Redis is managed")
    return 0 if is_gone else 1


def _join_file(options: AdministratorOptions, run: str) -> Path:
    """Return where the join file of a member is by default."""
    return options.folder / run / f"{run}.{options.name}{SUFFIX}"


def _without_name(options: InviteOptions) -> InviteOptions:
    """Treat the first word as the address if it cannot be a name."""
    if "/" in options.name or options.name.endswith(SUFFIX):
        return replace(options, name="", url=options.name)
    return options


def _password(options: InviteOptions) -> str:
    """Return the password of a user that was created elsewhere; empty without one. Raises ConfigError and OSError."""
    if options.password_file is None:
        return ""
    password = options.password_file.read_text(encoding="utf-8", errors="replace").strip()
    if not password:
        raise ConfigError(f"{options.password_file} is empty", "Write the password of the user into it.")
    return password


def _address(options: InviteOptions) -> str:
    """Return the URL under which the member reaches the Redis; empty for the administrator's. Raises ConfigError."""
    if options.address is None:
        return ""
    try:
        parse_address(options.address)
    except ValueError as error:
        raise ConfigError(f"--address cannot be used: {error}", "Write rediss://HOST:PORT.") from None
    return options.address


def _hand_out(administrator: Administrator, invited: Invitation, file: Path, options: InviteOptions) -> None:
    if str(file) == STANDARD_OUTPUT:
        sys.stdout.write(invited.to_json())
        sys.stdout.flush()
        return
    with suppress(OSError):  # Writing the file says what is wrong.
        make_untracked(file.parent)
    invitations.write(file, invited)
    if options.json:
        print_json({"run": invited.run, "name": invited.name, "role": invited.role, "file": str(file)})
        return
    say(f"{invited.name!r} is invited to the run {invited.run!r} as {invited.role}")
    say(f"  {file} holds its password{' and its private key' if invited.private_key else ''}: send it secretly")
    say("  on its machine:")
    name = shlex.quote(file.name)
    is_script = invited.role == "island" and administrator.transport.reader.manifest().has_scripts
    start = (
        f"ARCHIPELAGO_URL={name} python SCRIPT.py" if is_script else f"archipelago {_FIRST_VERB[invited.role]} {name}"
    )
    print(start)  # noqa: T201 - the result


def _explain_first(administrator: Administrator, role: Role) -> None:
    say(f"  the run {administrator.run!r} is signed from now on: mergers and islands without a join file are refused.")
    if role != "merger":
        say("  Invite the merger too, and restart it with its file:")
        say(f"    archipelago invite merger --role merger --run {administrator.run}")
    say(f"  {administrator.file} keeps the private key of the mergers, and the URL of the administrator")


def warnings(administrator: Administrator, invited: Invitation, *, created: bool) -> Iterator[str]:
    """Yield what makes an invitation weaker than it should be."""
    host = urlsplit(invited.url).hostname or ""  # the path of a socket has none
    if is_local(host):
        yield "its URL works on this machine only; give --address rediss://HOST:PORT for members elsewhere"
    findings = privacy(administrator.membership.needs_password(), host, has_tls=invited.url.startswith("rediss"))
    yield from (f"{each.what} {each.remedy}" for each in findings if each.level != "ok")
    if created and administrator.membership.keep() == "nowhere":
        again = "or invite again after a restart, with --replace"
        yield f"this Redis forgets its users when it restarts; give it an `aclfile`, {again}"


def _list(members: Members, options: InviteOptions) -> None:
    if options.json:
        print_json({name: {"role": member.role, "user": member.user} for name, member in members.by_name.items()})
        return
    if not members.by_name and not members.faults:
        say("the run has no members yet: archipelago invite NAME --role island")
        return
    table = new_table("member", "role", "user")
    for name, member in sorted(members.by_name.items()):
        table.add_row(name, member.role, member.user)
    for name, fault in members.faults.items():
        table.add_row(name, "unreadable", fault)
    table_console().print(table)
