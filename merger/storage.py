"""A merger's folder on disk: its checkpoints, and the record of the run. And the way back from there into a Redis."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from archipelago.broker.errors import RunExistsError, UnknownRunError
from archipelago.broker.manifest import Manifest
from archipelago.broker.transport import Image, Transport
from archipelago.merger.checkpoint import CheckpointStore, describe
from archipelago.merger.record import Recorder

if TYPE_CHECKING:
    from archipelago.merger.checkpointer import Checkpointer, Spawn

KEEP = 3

log = logging.getLogger(__name__)


class MergerFolder:
    """`checkpoints/` and `record/` of one run."""

    def __init__(self, path: Path, keep: int = KEEP) -> None:
        self.path = path
        self.store = CheckpointStore(path / "checkpoints", keep)
        self.recorder = Recorder(path / "record")

    def checkpointer(
        self, transport: Transport, manifest: Manifest, every_seconds: float, spawn: Spawn | None = None
    ) -> Checkpointer:
        """Takes the run's checkpoints here, and its record if it has one."""
        from archipelago.merger.checkpointer import (  # needs JAX, and readers of this folder do not
            Checkpointer,
            in_background,
        )

        recorder = self.recorder if manifest.config.record else None
        return Checkpointer(transport, self.store, recorder, every_seconds, spawn or in_background())

    def bring_back(self, transport: Transport) -> Image | None:
        """Makes the run in a Redis that does not have it, from the newest checkpoint; None where there is none.

        Raises RunExistsError when the run is there, and UnknownRunError when the checkpoint is another run's.
        """
        image = self.store.load()
        if image is None:
            return None
        if image.manifest.run != transport.run:
            raise UnknownRunError(
                f"{self.path} holds checkpoints of run {image.manifest.run!r}, not of {transport.run!r}",
                f"Name that run with --run {image.manifest.run}, or another folder.",
            )
        transport.restore(image)
        self.recorder.go_back(image.round)
        log.warning("the run goes on from %s", describe(image))
        return image

    def find_or_bring_back(self, transport: Transport, *, resume: bool) -> Manifest:
        """The run's manifest, from Redis; where that lost the run and `resume` says so, from the newest checkpoint.

        Raises UnknownRunError where there is no run to be had; it says so when a checkpoint could bring it back.
        """
        try:
            return transport.reader.manifest()
        except UnknownRunError as error:
            numbers = self.store.numbers()
            if not numbers:
                raise
            if not resume:
                raise UnknownRunError(
                    error.what, f"{self.path} holds its checkpoint {numbers[-1]}: go on from there with --resume."
                ) from None
        try:
            self.bring_back(transport)
        except RunExistsError:
            log.info("another one has brought the run back already")
        return transport.reader.manifest()
