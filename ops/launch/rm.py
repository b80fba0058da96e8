"""`archipelago rm`: delete a run, from a Redis or with its folder."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from archipelago.broker.errors import BrokerError, ConfigError, UnknownRunError
from archipelago.broker.process import URL_VARIABLE, connect_to, print_json
from archipelago.broker.redis.administration import Deletion, shards_with_keys
from archipelago.broker.redis.keys import checked_name
from archipelago.broker.redis.transport import RedisTransport
from archipelago.broker.shards.transport import opened
from archipelago.broker.transport import ReaderClient
from archipelago.ops.launch.embedded_redis import CONFIG
from archipelago.ops.settings import say
from archipelago.ops.watch.formatting import ago
from archipelago.ops.watch.run_list import address_of, entry_of, idle_seconds, is_run_folder

#: Without its Redis, a run counts as live if its processes have written into its folder within this time.
QUIET_SECONDS = 120.0


@dataclass(frozen=True)
class RmOptions:
    """Delete a run. With a URL, delete all its keys in that Redis, and the Redis users of its members.

    Without a URL, delete the folder of a run of `up`, with its Redis, checkpoints, logs and reports. It asks for the
    run's name first. Runs whose processes live are not deleted.
    """

    run: Annotated[str, tyro.conf.Positional]
    """The name of the run."""
    url: Annotated[str | None, tyro.conf.Positional] = None
    """An administrator's URL, or the file admin.join. The default is $ARCHIPELAGO_URL."""
    folder: Path = Path("runs")
    """The folder with the folders of runs."""
    yes: bool = False
    """Delete without asking."""
    force: bool = False
    """Delete a run although processes of it live. They then end with errors."""
    json: bool = False
    """Print one JSON object."""


def main(options: RmOptions) -> int:
    """Delete the run."""
    name = checked_name(options.run, "the run name")
    address = options.url or os.environ.get(URL_VARIABLE)
    folder = options.folder / name
    if not address:
        return _remove_folder(options, folder)
    transport = connect_to(address, name)
    try:
        return _remove_keys(options, transport, folder)
    finally:
        transport.close()


def _remove_keys(options: RmOptions, transport: RedisTransport, folder: Path) -> int:
    run, where = transport.run, transport.connection.where
    deletions = [Deletion(shard.connection) for shard in shards_to_delete(transport)]
    if not sum(deletion.found() for deletion in deletions):
        here = ", ".join(transport.reader.runs()) or "none"
        raise UnknownRunError(
            f"there is no run {run!r} at {where} (runs there: {here})", "`archipelago runs` lists them."
        )
    if (alive := living(transport)) and not options.force:
        raise BrokerError(
            f"processes of the run {run!r} live: {', '.join(alive)}",
            "Stop them first, with SIGTERM or Ctrl-C. --force deletes the run nevertheless.",
            code="run.alive",
        )
    _confirm(options, f"all keys of the run {run!r} at {where}{_described(transport)}")
    users = deletions[-1].delete_users()
    count = sum(deletion.delete() for deletion in deletions)
    if options.json:
        print_json({"run": run, "keys": count, "users": users, "folder": None})
    say(f"run {run!r} is deleted: {count:,} keys" + (f", and the users {', '.join(users)}" if users else ""))
    if alive:
        say(f"  {', '.join(alive)} may write some keys again until they end; repeat the command then")
    if is_run_folder(folder):
        say(f"  the folder {folder} stays, with checkpoints, logs and reports")
    return 0


def _remove_folder(options: RmOptions, folder: Path) -> int:
    if not is_run_folder(folder) or folder.is_symlink():
        raise ConfigError(
            f"no Redis URL was given, and {folder} is no folder of a run",
            f"Give the URL of the run's Redis as the second argument, or in ${URL_VARIABLE}. `archipelago runs` lists "
            "runs.",
            code="rm.no-run",
        )
    if address_of(folder):
        raise BrokerError(
            f"the Redis of {folder} runs, so `archipelago up` does too",
            "Stop it first, with Ctrl-C.",
            code="run.alive",
        )
    idle = idle_seconds(folder)
    if not (folder / "redis" / CONFIG).exists() and idle < QUIET_SECONDS and not options.force:
        raise BrokerError(
            f"the run in {folder} has a Redis elsewhere, and something wrote into the folder {ago(idle)} ago",
            "Stop its processes first and wait two minutes, or give the URL of its Redis. --force deletes the folder "
            "nevertheless.",
            code="run.alive",
        )
    _confirm(options, f"the folder {folder} with the run's Redis, checkpoints, logs and reports")
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be deleted ({error.strerror or error})", "May this user write there?", code="rm.folder"
        ) from None
    if options.json:
        print_json({"run": options.run, "keys": 0, "users": [], "folder": str(folder)})
    say(f"{folder} is deleted")
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
    status = reader.merger_status()
    out = [f"the merger {holder}" for holder in (status.holders if status else ())]
    out += [f"the standby {standby.name}" for standby in reader.standbys()]
    return out + [f"the island {p.heartbeat.island}" for p in reader.presences() if p.is_live]


def _described(transport: RedisTransport) -> str:
    try:
        entry = entry_of(transport, "redis")
    except (BrokerError, ConfigError):
        return ""
    active = f", last active {ago(entry.idle_seconds)} ago" if entry.idle_seconds == entry.idle_seconds else ""
    return f" ({entry.model}, round {entry.round:,}, step {entry.step:,} of {entry.steps:,}{active})"


def _confirm(options: RmOptions, what: str) -> None:
    """Ask for the run's name on a terminal. Raise ConfigError unless it is typed, or --yes was given."""
    if options.yes:
        return
    if sys.stdin is not None and sys.stdin.isatty():
        sys.stderr.write(f"This deletes {what}. Nothing can bring it back.\nType the name of the run to delete it: ")
        sys.stderr.flush()
        if sys.stdin.readline().strip() == options.run:
            return
        raise ConfigError("nothing was deleted, because another name was typed", code="rm.unconfirmed")
    raise ConfigError(f"nothing was deleted: this would delete {what}", "Confirm it with --yes.", code="rm.unconfirmed")
