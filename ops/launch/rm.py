"""`archipelago rm`: delete a run from a Redis."""

from __future__ import annotations

import os
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from archipelago.broker.errors import BrokerError, ConfigError, UnknownRunError, few_of
from archipelago.broker.process import URL_VARIABLE, connect_to, print_json
from archipelago.broker.redis.administration import delete_shard, delete_users, has_keys, shards_with_keys
from archipelago.broker.redis.keys import checked_name
from archipelago.broker.redis.transport import RedisTransport
from archipelago.broker.shards.transport import opened
from archipelago.broker.transport import ReaderClient
from archipelago.ops.settings import confirm, say


@dataclass(frozen=True)
class RmOptions:
    """Delete a run: all its keys in a Redis, and the Redis users of its members.

    It asks for the run's name first. Runs whose processes live are not deleted. A run of `up` is its folder, such as
    runs/demo: once `up` has ended, delete that. Checkpoints and logs of other runs stay in their folders, too.
    """

    run: Annotated[str, tyro.conf.Positional]
    """The name of the run."""
    url: Annotated[str | None, tyro.conf.Positional] = None
    """An administrator's URL, or the file admin.join. The default is $ARCHIPELAGO_URL."""
    yes: bool = False
    """Delete without asking."""
    force: bool = False
    """Delete a run although processes of it live. They then end with errors."""
    json: bool = False
    """Print one JSON object."""


def main(options: RmOptions) -> int:
    name = checked_name(options.run, "the run name")
    folder = Path("runs") / name
    if not (options.url or os.environ.get(URL_VARIABLE)) and (folder / "redis").is_dir():
        raise ConfigError(
            "no Redis URL was given",
            f"Give it as the second argument. A run of `up` that has ended lies in {folder}. Delete its Redis alone, "
            f"and `up --resume` goes on from its checkpoints: rm -r {folder}/redis. Or delete all: rm -r {folder}",
            code="config.which-run",
        )
    with closing(connect_to(options.url, name)) as transport:
        return _remove(options, transport)


def _remove(options: RmOptions, transport: RedisTransport) -> int:
    run, where = transport.run, transport.connection.where
    shards = [shard.connection for shard in shards_to_delete(transport)]
    if not any(map(has_keys, shards)):
        here = few_of(transport.reader.runs())
        raise UnknownRunError(
            f"there is no run {run!r} at {where} (runs there: {here})", "`archipelago runs` lists them."
        )
    if (alive := living(transport)) and not options.force:
        raise BrokerError(
            f"processes of the run {run!r} live: {', '.join(alive)}",
            "Stop them first, with SIGTERM or Ctrl-C. --force deletes the run nevertheless.",
            code="run.alive",
        )
    what = f"This deletes all keys of the run {run!r} at {where}."
    confirm(what, run, given=options.yes)
    users = delete_users(transport.connection)
    count = sum(map(delete_shard, shards))
    if options.json:
        print_json({"run": run, "keys": count, "users": users})
    say(f"run {run!r} is deleted: {count:,} keys" + (f", and the users {', '.join(users)}" if users else ""))
    if (folder := Path("runs") / run / "merger").exists():
        say(f"  {folder} keeps its checkpoints, from which a merger with --resume goes on; to begin anew, move it away")
    if alive:
        say(f"  {', '.join(alive)} may write some keys again until they end; repeat the command then")
    return 0


def shards_to_delete(transport: RedisTransport) -> list[RedisTransport]:
    """Return the connections to all shards of a run, the last one first. A damaged run may have no manifest."""
    try:
        numbers = set(range(transport.reader.manifest().shards))
    except (BrokerError, ConfigError):
        numbers = shards_with_keys(transport.connection)
    return [*(transport.of_shard(shard) for shard in sorted(numbers - {0}, reverse=True)), transport]


def living(transport: RedisTransport) -> list[str]:
    """Return the processes of a run that live, in words."""
    reader: ReaderClient = transport.reader
    with suppress(BrokerError, ConfigError):  # a run that is half deleted has no manifest
        reader = opened(transport)[1].reader
    out = [f"the merger {holder}" for holder in reader.merger_status().holders]
    out += [f"the standby {standby.name}" for standby in reader.standbys()]
    return out + [f"the island {p.heartbeat.island}" for p in reader.presences() if p.is_live]
