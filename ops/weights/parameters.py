"""Find a run's newest published parameters: in its Redis, or in the merger's checkpoints."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from archipelago.broker.address import redacted
from archipelago.broker.buckets.folder import is_bucket
from archipelago.broker.errors import ConfigError, DataError, UnknownRunError, UnreachableError
from archipelago.broker.invitation import names_redis
from archipelago.broker.manifest import Manifest
from archipelago.broker.process import RUN_VARIABLE, URL_VARIABLE, connect_to, keep_compiled
from archipelago.broker.redis.keys import checked_name
from archipelago.broker.shards.transport import opened
from archipelago.broker.wire import unpack
from archipelago.ops.settings import say

if TYPE_CHECKING:
    from archipelago.broker.commits import Image
    from archipelago.islands.data.tokenizer import TextTokenizer
    from archipelago.islands.models.registry import Params

#: The folder in which `up` keeps its runs.
RUNS = Path("runs")


@dataclass(frozen=True)
class RunParameters:
    """A run's newest published parameters.

    Attributes:
        manifest: The run's manifest.
        params: The parameters.
        round: The newest round that is merged into them.
        step: The run's step.
        origin: Where they were found, in words.
    """

    manifest: Manifest
    params: Params
    round: int
    step: int
    origin: str


def find(source: str | None, run: str | None) -> RunParameters:
    """Find a run's newest published parameters.

    If no Redis is named, or it does not answer or has lost the run, they come from the checkpoints of `up`.

    Args:
        source: A Redis URL or a join file, the name or folder of a run with checkpoints, or the address of one in a
            bucket. The default is $ARCHIPELAGO_URL.
        run: The run's name. The default is $ARCHIPELAGO_RUN, or the only run in that Redis.

    Raises:
        BrokerError: The Redis does not answer or has no such run, and there is no checkpoint.
        ConfigError: There is no checkpoint in the folder (`checkpoint.missing`), or no source at all.
    """
    keep_compiled()
    if source is not None and is_bucket(source):
        return from_bucket(source, run)
    if source is not None and not names_redis(source):
        return from_checkpoint(_folder(source), run)
    name = run or os.environ.get(RUN_VARIABLE)
    folder = RUNS / checked_name(name, "the run name") if name else None
    if folder is not None and not (source or os.environ.get(URL_VARIABLE)):
        return from_checkpoint(folder, name)
    try:
        return from_redis(source, run)
    except (UnreachableError, UnknownRunError) as error:
        if folder is None or not _checkpoints(folder):
            raise
        say(f"{error.what.rstrip('.')}. The newest checkpoint in {folder} is used instead.")
        return from_checkpoint(folder, name)


def _folder(source: str) -> Path:
    """Return the folder of that name, or of the run of that name."""
    here, of_run = Path(source), RUNS / source
    return of_run if "/" not in source and of_run.is_dir() and not here.exists() else here


def from_redis(url: str | None, run: str | None) -> RunParameters:
    """Read the parameters that the merger published last. Raise BrokerError."""
    transport = connect_to(url, run)
    try:
        manifest, whole = opened(transport)

        from archipelago.islands.evaluation import published

        return RunParameters(manifest, *published(whole, manifest), "its Redis")
    finally:
        transport.close()


def from_checkpoint(folder: Path, run: str | None) -> RunParameters:
    """Read the newest checkpoint in the folder of a run, of its merger, or of the checkpoints themselves.

    Raises:
        ConfigError: There is no checkpoint (`checkpoint.missing`).
        UnknownRunError: The checkpoints belong to another run.
    """
    place = _checkpoints(folder)
    if place is None or (image := _newest(place)) is None:
        raise ConfigError(
            f"no Redis is named, and there is no checkpoint in {folder}",
            "Name the run's Redis (redis://HOST:PORT), or a folder that `up` or the merger wrote, such as runs/demo.",
            code="checkpoint.missing",
        )
    return _of_image(image, run, str(place))


def _of_image(image: Image, run: str | None, place: str) -> RunParameters:
    manifest = image.manifest
    if run and manifest.run != run:
        raise UnknownRunError(f"{place} holds checkpoints of run {manifest.run!r}, not of {run!r}", "Name that run.")

    from archipelago.islands.evaluation import assemble

    vectors = [unpack(payload, size) for (_, payload), size in zip(image.snapshots, manifest.sizes, strict=True)]
    step = max(snapshot.step for snapshot, _ in image.snapshots)
    origin = f"checkpoint {image.number} in {place}"
    return RunParameters(manifest, assemble(manifest, vectors), image.round, step, origin)


def from_bucket(address: str, run: str | None) -> RunParameters:
    """Read the newest checkpoint in the folder of a run in a bucket, or in that of its merger.

    Raises:
        BucketError: The bucket cannot be read.
        ConfigError: There is no checkpoint (`checkpoint.missing`).
        UnknownRunError: The checkpoints belong to another run.
    """
    from archipelago.merger.storage import fetched

    with fetched(address) as folder:
        if (image := folder.load()) is not None:
            return _of_image(image, run, redacted(address))
    raise ConfigError(
        f"there is no checkpoint in {redacted(address)}",
        "Name the folder of a run or of its merger, such as s3://BUCKET/FOLDER/RUN.",
        code="checkpoint.missing",
    )


def _newest(place: Path) -> Image | None:
    """Return the newest checkpoint in a folder `checkpoints`, with all shards of the run."""
    from archipelago.merger.checkpoint import CheckpointStore
    from archipelago.merger.storage import MergerFolder

    image = MergerFolder(place.parent).load() if place.name == "checkpoints" else CheckpointStore(place).load()
    if image is not None and image.manifest.whole is not None:
        raise ConfigError(
            f"{place} holds the checkpoints of one shard of run {image.manifest.run!r}",
            "Name the folder of the run, or that of its merger, which has those of all shards.",
            code="checkpoint.one-shard",
        )
    return image


def _checkpoints(folder: Path) -> Path | None:
    """Return the folder of checkpoints in or at `folder`."""
    from archipelago.merger.checkpoint import CheckpointStore

    places = (folder / "merger" / "checkpoints", folder / "checkpoints", folder)
    return next((place for place in places if CheckpointStore(place).numbers()), None)


def tokenizer_of(manifest: Manifest) -> TextTokenizer:
    """Return the tokenizer of the run's model.

    Raises:
        DataError: This machine does not have the corpus that holds it (`data.missing`), or has one of that name with
            another tokenizer (`tokenizer.different`).
    """
    from archipelago.islands.data.corpus import open_corpus
    from archipelago.islands.data.tokenizer import byte_tokenizer

    if not manifest.corpus.tokenizer:
        return byte_tokenizer()
    corpus = open_corpus(manifest.corpus.name)
    if corpus.tokenizer != manifest.corpus.tokenizer:
        raise DataError(
            f"the corpus {corpus.name!r} on this machine has another tokenizer than the run's",
            "Copy the run's corpus to this machine.",
            code="tokenizer.different",
        )
    return corpus.open_tokenizer()
