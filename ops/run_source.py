"""Open the run that a user names: at its Redis, in the folder of `up`, or from a checkpoint, here or in a bucket."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import tyro

from archipelago.broker.address import redacted
from archipelago.broker.buckets.folder import is_bucket
from archipelago.broker.errors import BrokerError, ConfigError, UnknownRunError
from archipelago.broker.invitation import names_redis
from archipelago.broker.memory.transport import MemoryBroker
from archipelago.broker.observe.progress import progress
from archipelago.broker.process import RUN_VARIABLE, URL_VARIABLE, RunAddress, connect_to
from archipelago.broker.redis.keys import checked_name
from archipelago.broker.shards.transport import restore
from archipelago.broker.transport import ReaderTransport
from archipelago.ops.launch.administration import ADMIN_FILE
from archipelago.ops.launch.embedded_redis import start_server, url_of_running

if TYPE_CHECKING:
    from archipelago.merger.storage import MergerFolder

#: The origin of a run that is read where its merger writes it.
ITS_REDIS = "its Redis"
#: The folder in which `up` keeps its runs.
RUNS = Path("runs")


class FoundRun(NamedTuple):
    """A run that was found.

    Attributes:
        folder: Its folder on this machine, if it was found there.
        origin: Where it was found, in words.
        address: How commands name its Redis: a join file, or a URL without a password; empty for $ARCHIPELAGO_URL.
    """

    transport: ReaderTransport
    folder: Path | None
    origin: str
    address: str = "URL"


@dataclass(frozen=True)
class RunSource(RunAddress):
    """The options with which a verb that reads a run finds it."""

    url: Annotated[str | None, tyro.conf.Positional] = None
    """The URL of a Redis, a join file, or the name or folder of a run of `up`. A name whose folder has no Redis is that
    of a run at $ARCHIPELAGO_URL, which is also the default; without it, that is the folder of the run that is named.
    """

    def open(self) -> AbstractContextManager[FoundRun]:
        return open_run(self.url, self.run)


@contextmanager
def open_run(source: str | None, run: str | None) -> Iterator[FoundRun]:
    """Yield the run that a user names. In a folder of `up`, it is read from its own Redis, which is started if needed.

    Args:
        source: A Redis URL or a join file, the name or folder of a run, or the address of one in a bucket. A name whose
            folder has no Redis, such as a merger's, is that of a run at $ARCHIPELAGO_URL if the run is there. This is
            the default, and without it the folder of `run`. The file admin.join in a folder of `up` stands for it.
        run: The name of the run. The default is $ARCHIPELAGO_RUN, or the only run at that place.

    Raises:
        BrokerError: The Redis does not answer or has no such run.
        BucketError: The bucket cannot be read.
        ConfigError: There is no checkpoint (`checkpoint.missing`), or nothing is named.
        UnknownRunError: The checkpoints belong to another run.
    """
    name, has_redis, kept = run or os.environ.get(RUN_VARIABLE), bool(os.environ.get(URL_VARIABLE)), None
    file = Path(source or "")
    if file.name == ADMIN_FILE and (file.parent / "redis").is_dir():
        source = f"{file.parent}/"  # of `up`, which may have ended
    elif source is None and name and not has_redis:
        source = str(RUNS / checked_name(name, "the run name"))
    elif source and has_redis and run in (None, source) and _is_at_redis(source):
        kept, source, run = _folder_of(source) / "merger", None, source
    with ExitStack() as stack:
        if source is not None and is_bucket(source):
            from archipelago.merger.storage import fetched

            yield _restored(stack.enter_context(fetched(source)), run, redacted(source), None)
        elif source is None or names_redis(source):
            transport = _connected(stack, source, run)
            if run and kept is not None and run not in transport.reader.runs() and _has_checkpoint(kept):
                yield _in_folder(stack, kept.parent, run)  # its Redis has it no more
            else:
                yield FoundRun(transport, None, ITS_REDIS, shown(source or ""))
        else:
            yield _in_folder(stack, _folder_of(source), run)


def _has_checkpoint(folder: Path) -> bool:
    from archipelago.merger.storage import MergerFolder

    return bool(MergerFolder(folder).store.numbers())


def _is_at_redis(source: str) -> bool:
    """Return whether this is the name of a run at a Redis. A folder of that name may be that of a merger of it."""
    if "/" in source or names_redis(source):
        return False
    folder = _folder_of(source)
    return not folder.exists() or (folder.parent == RUNS and not (folder / "redis").exists())


def _folder_of(source: str) -> Path:
    """Return the folder of the run of that name, or the folder of that name."""
    is_run = "/" not in source and ((RUNS / source).is_dir() or not Path(source).exists())
    return RUNS / checked_name(source, "the run") if is_run else Path(source)


def _in_folder(stack: ExitStack, path: Path, run: str | None) -> FoundRun:
    from archipelago.merger.storage import MergerFolder

    if not (path / "redis").is_dir():
        return _restored(MergerFolder(path / "merger" if (path / "merger").is_dir() else path), run, str(path), path)
    try:
        address = address_of(path) or stack.enter_context(start_server(path / "redis")).url
    except OSError as error:
        raise BrokerError(f"cannot read {path}: {error.strerror}", "Run this as the user that started `up`.") from None
    transport = _connected(stack, address, path.resolve().name)
    if path.resolve().name not in transport.reader.runs() and _has_checkpoint(path / "merger"):
        return _restored(MergerFolder(path / "merger"), run, str(path), path)  # its Redis has it no more
    return FoundRun(transport, path, ITS_REDIS, shown(address))


def _connected(stack: ExitStack, url: str | None, run: str | None) -> ReaderTransport:
    with progress("waiting for Redis"):  # one that answers TLS with silence takes 20 s
        return stack.enter_context(closing(connect_to(url, run)))


def _restored(kept: MergerFolder, run: str | None, place: str, folder: Path | None) -> FoundRun:
    """Return a run from its newest checkpoint, which is restored in memory."""
    images = kept.newest()
    if not images:
        raise ConfigError(
            f"no Redis is named, and there is no checkpoint in {place}",
            "Name the run's Redis (redis://HOST:PORT), or the folder of a run or of its merger, such as runs/demo or "
            "s3://BUCKET/FOLDER/RUN.",
            code="checkpoint.missing",
        )
    own = images[0].manifest.run
    if run and run != own:
        raise UnknownRunError(f"{place} holds checkpoints of run {own!r}, not of {run!r}", "Name that run.")
    transport = MemoryBroker().connect(own)
    restore(transport, images)
    return FoundRun(transport, folder, f"checkpoint {images[0].number} in {place}")


def shown(address: str) -> str:
    """Return a URL or a join file as commands may show it: `URL` in place of one with a password."""
    return address if redacted(address) == address else "URL"


def address_of(path: Path) -> str:
    """Return the address of the Redis in a run's folder; empty if it does not run. Raises as `url_of_running`."""
    url = url_of_running(path / "redis")
    admin = path / ADMIN_FILE
    return str(admin) if url and admin.exists() else url
