"""A checkpoint of a whole run: the images of its shards."""

from __future__ import annotations

from collections.abc import Sequence

from archipelago.broker.errors import RunExistsError
from archipelago.broker.messages import Snapshot
from archipelago.broker.shards.reader import combined_state, merged_everywhere, summed_books
from archipelago.broker.shards.transport import of_shard
from archipelago.broker.transport import Image, Transport

#: The code of the error that a shard of the run is left, in another state than that of the checkpoint.
SHARD_EXISTS = "broker.shard-exists"


def restore(transport: Transport, images: Sequence[Image]) -> None:
    """Create the run from a checkpoint: each shard in a transaction of its own, shard 0 last, as `create` does.

    Only the first process to begin restores the run. A shard that an interrupted process has restored from the same
    checkpoint stays as it is.

    Args:
        transport: The connection to the run.
        images: The part of each shard, in order.

    Raises:
        RunExistsError: The run exists, or another state of one of its shards.
    """
    home = images[0].manifest
    for image in reversed(images):
        shard = of_shard(transport, home.whole or home, image.manifest.shard)
        try:
            shard.restore(image)
        except RunExistsError as error:
            if not image.manifest.shard:
                raise
            if shard.reader.uid() != image.manifest.uid or shard.reader.merger_state() != image.state:
                raise RunExistsError(
                    f"shard {image.manifest.shard} of the run {transport.run!r} is here, in another state than that of "
                    f"checkpoint {image.number}",
                    "Shards go back together, or work would count twice. If no other process restores the run now, "
                    f"stop its mergers, delete what is left with `archipelago rm {transport.run}`, and try again.",
                    code=SHARD_EXISTS,
                ) from error


def whole_image(images: Sequence[Image]) -> Image:
    """Return the image of a whole run, to be read by people, from those of its shards.

    Its fragments and rounds are those of the run. That of a run with one shard is its only one.
    """
    home = images[0]
    if (manifest := home.manifest.whole) is None:
        return home
    layout = manifest.shard_layout
    placed: dict[int, tuple[tuple[Snapshot, bytes], bytes]] = {}
    for shard, image in enumerate(images):
        for (snapshot, payload), outer in zip(image.snapshots, image.outers, strict=True):
            placed[layout.fragments[shard][snapshot.fragment]] = (layout.in_run(shard, snapshot), payload), outer
    tape = [layout.in_run(shard, entry) for shard, image in enumerate(images) for entry in image.tape]
    return Image(
        manifest=manifest,
        number=home.number,
        snapshots=tuple(placed[p][0] for p in range(layout.count)),
        outers=tuple(placed[p][1] for p in range(layout.count)),
        state=combined_state({shard: image.state for shard, image in enumerate(images)}, layout),
        books=summed_books([image.books for image in images]),
        cursors=merged_everywhere([image.cursors for image in images]),
        tape=tuple(sorted(tape, key=lambda entry: (entry.unix_seconds, entry.round))),
        evaluations=home.evaluations,
        pending=tuple(
            (layout.in_run(shard, contribution), payload)
            for shard, image in enumerate(images)
            for contribution, payload in image.pending
        ),
    )
