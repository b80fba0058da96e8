"""A merger's folder on disk: checkpoints and the record of the run. It can restore the run into an empty Redis."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from archipelago.broker.errors import ConfigError, RunExistsError, UnknownRunError
from archipelago.broker.manifest import Manifest
from archipelago.broker.transport import Image, Transport
from archipelago.merger.checkpoint import CheckpointStore, describe
from archipelago.merger.record import Recorder

if TYPE_CHECKING:
    from archipelago.merger.checkpointer import Checkpointer, Spawn

KEEP = 3

log = logging.getLogger(__name__)


class MergerFolder:
    """The folders `checkpoints/` and `record/` of one run."""

    def __init__(self, path: Path, keep: int = KEEP) -> None:
        self.path = path
        self.store = CheckpointStore(path / "checkpoints", keep)
        self.recorder = Recorder(path / "record")

    def checkpointer(
        self, transport: Transport, manifest: Manifest, every_seconds: float, spawn: Spawn | None = None
    ) -> Checkpointer:
        """Return a checkpointer that writes here; it also writes the record if the run has one."""
        from archipelago.merger.checkpointer import (  # loads JAX, which readers of this folder do not need
            Checkpointer,
            in_background,
        )

        recorder = self.recorder if manifest.config.record else None
        return Checkpointer(transport, self.store, recorder, every_seconds, spawn or in_background())

    def bring_back(self, transport: Transport) -> Image | None:
        """Create the run from the newest checkpoint in a Redis that does not have it.

        Returns:
            The image, or None when there is no checkpoint.

        Raises:
            RunExistsError: The run exists.
            UnknownRunError: The checkpoint is of another run (`broker.other-run`).
        """
        image = self.store.load()
        if image is None:
            return None
        if image.manifest.run != transport.run:
            raise UnknownRunError(
                f"{self.path} holds checkpoints of run {image.manifest.run!r}, not of {transport.run!r}",
                f"Name that run with --run {image.manifest.run}, or another folder.",
                code="broker.other-run",
            )
        transport.restore(image)
        self.recorder.go_back(image.round)
        log.warning("the run continues from %s", describe(image))
        return image

    def lost(self, error: UnknownRunError, run: str) -> UnknownRunError:
        """Return the error of a merger whose Redis has lost the run, with what its folder can restore."""
        if error.code != UnknownRunError.code:
            return error
        numbers = self.store.numbers()
        if not numbers:
            remedy = (
                f"{self.path} holds no checkpoint of it, so only `archipelago init` can begin it, from new weights."
            )
            return UnknownRunError(error.what, remedy, code="broker.lost")
        return UnknownRunError(
            error.what,
            f"Continue it from checkpoint {numbers[-1]} of this merger: "
            f"`archipelago init --run {run} --resume {shlex.quote(str(self.path.absolute()))}`, then start the merger "
            "again. Islands that still run go on from there. Without --resume, it would begin from new weights.",
            code="broker.resumable",
        )

    def find_or_bring_back(self, transport: Transport, *, resume: bool) -> Manifest:
        """Return the run's manifest. If Redis does not have the run and `resume` is set, restore it first.

        A run that has lost only its manifest gets that back, and continues from where it is.

        Raises:
            UnknownRunError: There is no run (`broker.unknown-run`), or only in a checkpoint (`broker.resumable`).
            ConfigError: The manifest is damaged (`config.manifest`).
        """
        try:
            return transport.reader.manifest()
        except (UnknownRunError, ConfigError) as error:
            numbers = self.store.numbers()
            if not numbers:
                raise
            if not resume:
                remedy = f"{self.path} holds its checkpoint {numbers[-1]}: continue from there with --resume."
                if isinstance(error, ConfigError):
                    raise ConfigError(error.what, remedy, code=error.code) from None
                raise UnknownRunError(error.what, remedy, code="broker.resumable") from None
        if not self._has_mended(transport):
            try:
                self.bring_back(transport)
            except RunExistsError:
                log.info("another process has restored the run already")
        return transport.reader.manifest()

    def _has_mended(self, transport: Transport) -> bool:
        """Write a lost manifest again if the rest of the run is there, and return whether the run exists now."""
        image = self.store.load()
        if image is None or image.manifest.run != transport.run or not transport.mend_manifest(image.manifest):
            return False
        log.warning(
            "the run had lost its manifest, which is now that of its checkpoints", extra={"code": "repair.manifest"}
        )
        return True
