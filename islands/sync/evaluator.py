"""Evaluations of the merged parameters by the islands of a run, while they train.

One island at a time holds a lease in Redis and evaluates; if it dies, another one takes over. Evaluations use the
merger's parameters, never an island's own.

Our worker evaluates in a thread of its own, which never makes the training thread wait. The two share the device, so
the evaluation is cut into slices of one batch, and the next evaluation waits until they have taken a small share of the
device's time.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, TypeVar

from archipelago.broker.codecs import Vector
from archipelago.broker.errors import BrokerError, WireError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Evaluation, Snapshot
from archipelago.broker.observe.curves import CurveWriter
from archipelago.broker.observe.losses import LossUnit, loss_unit, rounded
from archipelago.broker.transport import IslandTransport, ReaderTransport
from archipelago.broker.wire import newest
from archipelago.islands.sync.connection.downloads import Arrival

#: The largest share of the device's time that evaluations take.
DEVICE_SHARE: Final = 0.02
#: How long an island that has died keeps the lease.
LEASE_SECONDS: Final = 15.0
#: The time between the beginnings of two evaluations, unless an island has a setting of its own.
EVERY_SECONDS: Final = 15.0
TICK_SECONDS: Final = 1.0
#: How many reported losses wait for a broker that does not answer.
REPORTS_KEPT: Final = 256
#: How long an island waits at the end of a run until its last contributions are merged.
MERGED_SECONDS: Final = 20.0
POLL_SECONDS: Final = 0.1

T = TypeVar("T")

log = logging.getLogger(__name__)


class Measures(NamedTuple):
    """The quality of a model on held-out sequences.

    Attributes:
        bits: Bits per byte of text, without auxiliary terms of the objective. Of a task, its loss in bits.
        accuracy: Share of the targets that the model finds most probable, 0 … 1.
    """

    bits: float
    accuracy: float

    def describe(self, unit: LossUnit) -> str:
        """Return the measures in words, in the run's unit. A task may give no accuracy."""
        right = f", {100 * self.accuracy:.1f} % right" if math.isfinite(self.accuracy) else ""
        return f"{rounded(unit.from_evaluation(self.bits))} {unit.name} on held-out data{right}"


def mean_of(slices: Iterable[Measures]) -> Measures:
    """Return the measures of an evaluation from those of its slices. No number is infinite."""
    all_bits, accuracies = zip(*slices, strict=True)
    bits = math.fsum(all_bits) / len(all_bits)
    return Measures(bits if math.isfinite(bits) else math.nan, math.fsum(accuracies) / len(accuracies))


#: From merged parameters, a float32 vector [N] for each fragment, to the measures of each slice, made one by one.
EvaluateMerged = Callable[[Sequence[Vector]], Iterator[Measures]]


class Merged(NamedTuple):
    """Parameters as a merger has published them: a vector for each fragment, their newest round and global step."""

    vectors: Sequence[Vector]
    round: int
    step: int


def newest_merged(transport: ReaderTransport, manifest: Manifest) -> Merged:
    """Return the newest published parameters."""
    found = [newest(transport.reader, manifest, p) for p in range(len(manifest.fragments))]
    return _merged([part.params_N for part in found], [part.snapshot for part in found])


def _merged(vectors: Sequence[Vector], snapshots: Sequence[Snapshot]) -> Merged:
    return Merged(vectors, max(each.round for each in snapshots), max(each.step for each in snapshots))


class Evaluator:
    """The held-out losses of one island: its evaluations, and those that it reports.

    Args:
        who: The island and its incarnation, as `NAME/INCARNATION`.
        evaluation: Measures merged parameters, slice by slice; None if the island evaluates none.
        arrivals: Returns the newest snapshots that the island holds, as they were published; an empty list if it does
            not hold them all.
        every_seconds: The time between the beginnings of two evaluations.
    """

    def __init__(
        self,
        transport: IslandTransport,
        manifest: Manifest,
        who: str,
        evaluation: EvaluateMerged | None,
        arrivals: Callable[[], Sequence[Arrival]],
        every_seconds: float = EVERY_SECONDS,
        curves: CurveWriter | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._transport, self._manifest, self._who = transport, manifest, who
        self._evaluation, self._arrivals = evaluation, arrivals
        self.evaluates = evaluation is not None
        self._every_seconds, self._curves = every_seconds, curves
        self._clock, self._wall = clock, wall
        self._used_seconds = 0.0  # of the device, by the last evaluation
        self._has_measured = self._has_failed = False
        self._due = -math.inf
        self._round = -1
        self._reported: deque[Evaluation] = deque(maxlen=REPORTS_KEPT)  # the tokens are added when they are sent
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep_working, name="evaluator", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its slice, if any, and free the lease for the islands that still train.

        A thread that hangs in a call ends with the process.
        """
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(2.0)
        _attempt("report the last losses", self.send_reported)
        _attempt("free the lease", self._free_lease)  # it also ends by itself

    def report(self, loss: float, number: int, step: int) -> None:
        """Queue a held-out loss that the loop has measured itself, in the unit of its training loss.

        In an outage, the newest losses wait.
        """
        bits = loss_unit(self._manifest.corpus).recorded(loss)
        self._reported.append(Evaluation(number, step, 0, self._wall(), bits, self._who.partition("/")[0]))

    def turn(self) -> Evaluation | None:
        """Evaluate if this island holds the lease and an evaluation is due. Return the result, if any."""
        began = self._clock()
        if not self.evaluates or not self._holds_lease() or began < self._due:
            return None
        found = self._newest()
        evaluation = self._evaluate(found, self._stopping.is_set) if found else None
        if evaluation is not None:
            self._due = began + max(self._every_seconds, self._used_seconds / DEVICE_SHARE)
            self._round = evaluation.round
        return evaluation

    def finish(
        self,
        stopped: Callable[[], bool],
        seconds: float = MERGED_SECONDS,
        pause: Callable[[float], None] = time.sleep,
    ) -> Evaluation | None:
        """Evaluate the final parameters if no other island still trains, and return the result.

        Wait at most `seconds`, by `pause`, until everything is merged. A failure ends no island.
        """
        if not self.evaluates:
            return None
        return _attempt("evaluate the final parameters", lambda: self._finish(stopped, seconds, pause))

    # -- parts --------------------------------------------------------------------------------------------------------

    def _finish(self, stopped: Callable[[], bool], seconds: float, pause: Callable[[float], None]) -> Evaluation | None:
        deadline = self._clock() + seconds
        while self._transport.reader.backlog() and self._clock() < deadline and not stopped():
            pause(POLL_SECONDS)
        # The lease is free while this island looks at the others. Else two that end together could rely on each other.
        beats = (presence.heartbeat.state for presence in self._transport.reader.presences() if presence.is_live)
        if stopped() or any(state in ("joining", "training") for state in beats):
            return None
        if not self._holds_lease():
            return None
        try:
            found = newest_merged(self._transport, self._manifest)
            known = self._transport.reader.evaluations()
            if known and known[-1].round == found.round:
                return None
            log.info("evaluating the final parameters")
            return self._evaluate(found, stopped)
        finally:
            self._free_lease()

    def _keep_working(self) -> None:
        while not self._stopping.is_set():
            try:
                self.send_reported()
                if not self._has_failed:
                    self.turn()
            except (BrokerError, WireError) as error:  # the next turn may succeed
                log.debug("no evaluation: %s", error.what if isinstance(error, BrokerError) else error.reason)
            except Exception as error:  # noqa: BLE001 - training goes on without evaluations
                log.warning("this island evaluates no more (%.300s); it trains on", error)
                self._has_failed = True
                _attempt("free the lease", self._free_lease)
            self._stopping.wait(TICK_SECONDS)

    def send_reported(self) -> None:
        """Record what `report` has queued. Raises BrokerError; the rest stays queued."""
        while self._reported:
            self._transport.reader.record_evaluation(replace(self._reported[0], tokens=self._merged_tokens()))
            self._reported.popleft()

    def _merged_tokens(self) -> int:
        return self._transport.reader.counters().merged_tokens // len(self._manifest.fragments)

    def _evaluate(self, found: Merged, stopped: Callable[[], bool]) -> Evaluation | None:
        """Evaluate parameters, and record the result. Return None if it was cut short."""
        # An evaluation takes a while, and rounds close meanwhile. Counters go on when an island is killed.
        tokens = self._merged_tokens() if found.round else 0
        measured = self._measure(found.vectors, stopped)
        if measured is None:
            return None
        unit, by = loss_unit(self._manifest.corpus), self._who.partition("/")[0]
        log.info("round %s: %s", found.round, measured.describe(unit), extra={"round": found.round})
        evaluation = Evaluation(found.round, found.step, tokens, self._wall(), measured.bits, by)
        self._transport.reader.record_evaluation(evaluation)
        if self._curves is not None:
            loss = unit.from_evaluation(measured.bits)
            self._curves.put(found.step, {"held_out_loss": loss, "accuracy": measured.accuracy, "round": found.round})
        return evaluation

    def _holds_lease(self) -> bool:
        return self._transport.island.lease_evaluation(self._who, LEASE_SECONDS)

    def _free_lease(self) -> None:
        self._transport.island.lease_evaluation(self._who, 0.0)

    def _newest(self) -> Merged | None:
        """Return the newest published parameters; None if they are known already."""
        if not self._manifest.config.wire.sends_differences:  # then the island keeps no exact copy
            rounds = [head.round for head in self._transport.reader.heads() if head is not None]
            is_new = bool(rounds) and max(rounds) != self._round
            return newest_merged(self._transport, self._manifest) if is_new else None
        arrivals = self._arrivals()
        if not arrivals:
            return None
        merged = _merged([arrival.params_N for arrival in arrivals], [arrival.snapshot for arrival in arrivals])
        return None if merged.round == self._round else merged

    def _measure(self, vectors: Sequence[Vector], stopped: Callable[[], bool]) -> Measures | None:
        """Evaluate slice by slice. Return None if the lease is lost or the time is over before the end."""
        found, seconds = list[Measures](), list[float]()
        self._used_seconds = 0.0
        goes_on, began = not stopped() and self._holds_lease(), time.perf_counter()
        if not goes_on or self._evaluation is None:
            return None
        for measured in self._evaluation(vectors):
            if not goes_on:
                return None
            found.append(measured)
            if self._has_measured:  # the first call may compile, which takes no device time
                seconds.append(time.perf_counter() - began)
                # The fastest slice is the one that waited the least for inner steps on the same device.
                self._used_seconds = len(found) * min(seconds)
            self._has_measured = True
            # Only another slice needs the lease. One that took longer than a lease still counts if it was the last.
            goes_on, began = not stopped() and self._holds_lease(), time.perf_counter()
        return mean_of(found)


def _attempt(what: str, call: Callable[[], T]) -> T | None:
    """Return the result of a call. A failure is only logged, because an island trains without evaluations, too."""
    try:
        return call()
    except (BrokerError, WireError) as error:
        log.debug("cannot %s: %s", what, error)
    except Exception as error:  # noqa: BLE001 - such as a device without memory for another copy of the parameters
        log.warning("this island cannot %s (%.300s)", what, error)
    return None
