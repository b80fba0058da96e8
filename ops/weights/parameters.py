"""Find a run's newest published parameters: in its Redis, or in the merger's checkpoints."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from archipelago.broker.address import redacted
from archipelago.broker.buckets.folder import is_bucket
from archipelago.broker.errors import ConfigError, DataError, UnknownRunError
from archipelago.broker.invitation import names_redis
from archipelago.broker.manifest import Manifest
from archipelago.broker.process import RUN_VARIABLE, URL_VARIABLE, connect_to, keep_compiled
from archipelago.broker.redis.keys import checked_name
from archipelago.broker.shards.transport import opened

if TYPE_CHECKING:
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

    If no Redis is named, they come from the checkpoints of `up`.

    Args:
        source: A Redis URL or a join file, the name or folder of a run with checkpoints, or the address of one in a
            bucket. The default is $ARCHIPELAGO_URL.
        run: The run's name. The default is $ARCHIPELAGO_RUN, or the only run in that Redis.

    Raises:
        BrokerError: The Redis does not answer or has no such run.
        ConfigError: There is no checkpoint in the folder (`checkpoint.missing`), or no source at all.
    """
    keep_compiled()
    if source is not None and (is_bucket(source) or not names_redis(source)):
        return from_checkpoint(source if is_bucket(source) else _folder(source), run)
    name = run or os.environ.get(RUN_VARIABLE)
    if name and not (source or os.environ.get(URL_VARIABLE)):
        return from_checkpoint(str(RUNS / checked_name(name, "the run name")), name)
    return from_redis(source, run)


def _folder(source: str) -> str:
    """Return the folder of that name, or of the run of that name."""
    is_run = "/" not in source and (RUNS / source).is_dir() and not Path(source).exists()
    return str(RUNS / source) if is_run else source


def from_redis(url: str | None, run: str | None) -> RunParameters:
    """Read the parameters that the merger published last. Raise BrokerError."""
    transport = connect_to(url, run)
    try:
        manifest, whole = opened(transport)

        from archipelago.islands.evaluation import published

        return RunParameters(manifest, *published(whole, manifest), "its Redis")
    finally:
        transport.close()


def from_checkpoint(folder: str, run: str | None) -> RunParameters:
    """Read the newest checkpoint in the folder of a run or of its merger, here or in a bucket.

    Raises:
        BucketError: The bucket cannot be read.
        ConfigError: There is no checkpoint (`checkpoint.missing`).
        UnknownRunError: The checkpoints belong to another run.
    """
    from archipelago.merger.storage import MergerFolder, fetched

    path = Path(folder)
    here = MergerFolder(path / "merger" if (path / "merger").is_dir() else path)
    with fetched(folder) if is_bucket(folder) else nullcontext(here) as kept:
        images, place = kept.newest(), redacted(folder)
    if not images:
        raise ConfigError(
            f"no Redis is named, and there is no checkpoint in {place}",
            "Name the run's Redis (redis://HOST:PORT), or the folder of a run or of its merger, such as runs/demo or "
            "s3://BUCKET/FOLDER/RUN.",
            code="checkpoint.missing",
        )
    manifest = images[0].manifest.of_shard(None)
    if run and manifest.run != run:
        raise UnknownRunError(f"{place} holds checkpoints of run {manifest.run!r}, not of {run!r}", "Name that run.")

    from archipelago.islands.evaluation import assemble

    found = {full.snapshot.fragment: full.published_N for image in images for full in image.fragments}
    round_, step = max(image.round for image in images), max(image.step for image in images)
    origin = f"checkpoint {images[0].number} in {place}"
    vectors = [found[p] for p in range(len(manifest.fragments))]
    return RunParameters(manifest, assemble(manifest, vectors), round_, step, origin)


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
