"""Our worker is a script like any other: it joins, makes steps and syncs, and leaves.

Around that it has an own checkpoint, evaluations, probes and curves.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from archipelago.broker.files import make_untracked
from archipelago.broker.manifest import Manifest
from archipelago.broker.observe.curves import CurveWriter
from archipelago.broker.observe.logs import Origin
from archipelago.broker.observe.losses import loss_unit
from archipelago.broker.observe.probes import Health
from archipelago.broker.observe.progress import progress
from archipelago.broker.process import REPLACED, print_json
from archipelago.islands.options import IslandOptions, is_random, own_task, require_valid
from archipelago.islands.sync.connection.downloads import Arrival
from archipelago.islands.sync.connection.link import Link
from archipelago.islands.sync.evaluator import Evaluator
from archipelago.islands.sync.membership import Membership
from archipelago.islands.sync.script import island_name

if TYPE_CHECKING:
    from archipelago.broker.transport import IslandTransport
    from archipelago.islands.prepared import PreparedIsland
    from archipelago.islands.team.jax_team import JaxTeam
    from archipelago.islands.worker import Island

log = logging.getLogger(__name__)


def run_island(
    options: IslandOptions,
    stopped: Callable[[], bool],
    prepared: PreparedIsland | None = None,
    team: JaxTeam | None = None,
) -> int:
    name = island_name(options.url, options.name, "--name")
    origin = options.log_as(name, options.run, island=name)
    require_valid(options)
    state = WorkerRun(options, name, stopped, origin, prepared, team).train()
    if options.json:
        print_json({"island": name, "run": origin.run, "state": state})
    if state == "replaced":
        return REPLACED
    # An operator who asked the island to leave does not want it back, unlike a launcher that needs its machine.
    return options.stopped_status if state == "left" and stopped() else 0


class WorkerRun(Membership):
    """The membership of our worker."""

    #: What the worker trains, and with which programs.
    _prepared: PreparedIsland
    _curves: CurveWriter | None = None
    _evaluator: Evaluator | None = None

    def __init__(
        self,
        options: IslandOptions,
        name: str,
        stopped: Callable[[], bool],
        origin: Origin,
        standby: PreparedIsland | None = None,
        team: JaxTeam | None = None,
    ) -> None:
        """Note what to join.

        Args:
            origin: The origin of log lines, which takes the run's name.
            team: The processes of an island over several hosts, which this one leads.
        """
        super().__init__(options.run or "", lambda: name, options.connect, options.patience(stopped))
        self._options, self._stopped, self._origin = options, stopped, origin
        self._standby, self._team = standby, team
        self._health = Health()
        options.answer_probes(self._health)
        self._state = ""

    def train(self) -> str:
        """Join, train until the end of the run, a signal or the operator's request, and leave. Return how it left.

        Raises:
            DivergedError: The loss or the parameters are not finite. The island has announced its departure by then.
            ConfigError: A part of the users' task failed; likewise.
        """
        with self:
            stopped, island = self._health.watched(self._stopped, lambda: "training"), self.worker
            while not (stopped() or self.finished):
                self._turn(1, *island.make_step())
            self._health.leave()
        if self._store is not None and self._state == "replaced":
            self._store.close()
        elif self._store is not None:
            with progress("writing the last checkpoint"):
                self._store.finish(self.worker)
        return self._state

    @property
    def worker(self) -> Island:
        """The island, once it has joined."""
        from archipelago.islands.worker import Island

        assert isinstance(self._loop, Island)  # noqa: S101
        return self._loop

    # -- what our worker adds to a membership -------------------------------------------------------------------------

    def _accept(self, transport: IslandTransport, manifest: Manifest, name: str) -> None:
        """Load the task, the data and the programs. Raise MismatchError unless they are those of the run."""
        options, self._origin.run = self._options, manifest.run
        folder = options.folder or Path("runs") / manifest.run / "islands" / name
        task = own_task(options, manifest)
        if self._team is not None:
            self._team.share_manifest(manifest)

        from archipelago.islands.checkpoint import IslandStore
        from archipelago.islands.prepared import prepared_for

        end_of_imports()
        with progress("opening the data and building the model"):
            self._prepared = prepared_for(options, manifest, task, self._standby)
        if self._team is not None:
            self._team.agree()
            self._prepared.team = self._team
        events, has_random_name = None, is_random(options)
        if options.folder or not has_random_name:  # else no later start would find them
            with suppress(OSError):  # An island trains without checkpoints where it cannot write.
                make_untracked(folder)
            bucket = None if has_random_name else options.bucket_folder(manifest.run, "islands", name)
            self._store, events = IslandStore(folder, manifest, bucket), options.event_file(folder)
        self._curves = CurveWriter(events, lambda: point(self.worker))

    def _participant(self, name: str, manifest: Manifest, link: Link, arrivals: Sequence[Arrival]) -> Island:
        on_marker = None if self._store is None else self._store.on_marker
        return self._prepared.island(name, self._incarnation, link, arrivals, on_marker)

    def _warm_up(self) -> None:
        self._evaluator = self._evaluates()
        if self._prepared is not self._standby:  # a standby has compiled everything
            self.worker.warm_up()

    def _join(self) -> None:
        super()._join()
        if self._curves is not None:
            self._curves.start()

    def _evaluates(self) -> Evaluator | None:
        """Start the evaluations of this island; None if it makes none."""
        from archipelago.islands.evaluation import assemble

        prepared, options, link = self._prepared, self._options, self.worker.link
        evaluation = prepared.workload.evaluation() if options.evaluate_every else None
        if evaluation is None:
            return None
        if not prepared.evaluates_here:
            log.info("this island evaluates nothing, because no device of its leader holds the whole model")
            return None
        evaluator = Evaluator(
            link.transport, prepared.manifest, link.who,
            lambda vectors: evaluation(assemble(prepared.manifest, vectors, prepared.place)), link.all_held,
            options.evaluate_every, self._curves,
        )  # fmt: skip
        evaluator.start()
        return evaluator

    def _end(self, state: str) -> None:
        self._state = state
        if self._evaluator is not None and state == "done":
            self._evaluator.stop()
            with progress("evaluating the final parameters"):
                self._evaluator.finish(self._stopped)

    def _close(self) -> None:
        if self._evaluator is not None:
            self._evaluator.stop()
        super()._close()
        if self._curves is not None:
            self._curves.close()  # the last points matter most after a divergence


def end_of_imports() -> None:
    """Begin to collect garbage, if the process has not yet. What was imported lives as long as the process."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def point(island: Island) -> tuple[int, Mapping[str, float]] | None:
    """Return the global step and the values that curves show, or None while the island does not train."""
    beat = island.link.heartbeats.newest
    if beat is None or beat.state != "training":
        return None
    return beat.global_step, {
        "loss": loss_unit(island.manifest.corpus).from_nats(beat.loss),
        "learning_rate": island.learning_rate,
        "tokens_per_second": beat.tokens_per_second,
        "step_seconds": beat.step_seconds or math.nan,
        "staleness": beat.staleness,
    }
