"""`archipelago revoke`: end a membership of a run."""

from __future__ import annotations

from dataclasses import dataclass

from archipelago.broker.errors import ConfigError
from archipelago.broker.process import print_json
from archipelago.ops.launch.invite import AdministratorOptions
from archipelago.ops.settings import say


@dataclass(frozen=True)
class RevokeOptions(AdministratorOptions):
    """End a membership of a run: delete its Redis user, close its connections, and expel its island."""


def main(options: RevokeOptions) -> int:
    """Revoke a membership."""
    if not options.name:
        raise ConfigError("no member was named", "Write `archipelago revoke NAME`.", code="invitation.no-name")
    with options.administrator() as administrator:
        user = administrator.user_of(options.name)
        member = administrator.members().by_name.get(options.name)
        is_gone = administrator.revoke(options.name)
        kept = administrator.keep_users() if is_gone else None
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
    if not is_gone:
        say(f"  this Redis does not let us delete users: delete {user} where the Redis is managed")
    return 0 if is_gone else 1
