"""Evaluation on held-out data, in bits per byte of text.

The loss is given per byte, so that models with different tokenizers are comparable: nats per token, times the tokens
of the held-out text over its bytes, over ln 2. Evaluations use the merger's parameters, never an island's own.

While a run trains, one of its islands at a time holds a lease in Redis and evaluates; if it dies, another one takes
over. The evaluation runs in a thread of its own and never makes the training thread wait. The two share the device, so
the evaluation is cut into slices of one batch, and the next evaluation waits until they have taken a small share of the
device's time.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from archipelago.broker.codecs import Vector
from archipelago.broker.config import RunConfig
from archipelago.broker.errors import BrokerError, WireError
from archipelago.broker.manifest import LossUnit, Manifest, loss_unit
from archipelago.broker.messages import Evaluation
from archipelago.broker.observe.curves import CurveWriter
from archipelago.broker.transport import IslandTransport, ReaderTransport
from archipelago.broker.wire import newest
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.data.ranges import held_out
from archipelago.islands.data.tokenizer import Tokens
from archipelago.islands.models.interface import Model, Params
from archipelago.islands.sync.connection.inbox import Arrival

BATCH = 32

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
        return f"{unit.from_evaluation(self.bits):.4f} {unit.name} on held-out data{right}"


#: From parameters to the measures of each slice, which are made one by one: each is a short call of the device.
Evaluate = Callable[[Params], Iterator[Measures]]


def in_slices(model: Model, held_out_NxT1: Tokens, batch_size: int, bytes_per_token: float = 1.0) -> Evaluate:
    """Return the evaluation of a model on held-out sequences, in slices of at most `batch_size` sequences.

    It reads a whole number of batches of 32 sequences, or one batch if there are fewer. The first slice compiles.
    """
    whole = min(BATCH, len(held_out_NxT1))
    used = len(held_out_NxT1) // whole * whole
    size = math.gcd(used, batch_size) if used % min(used, batch_size) else min(used, batch_size)
    batches = jax.device_put(list(held_out_NxT1[:used].reshape(used // size, size, -1)))
    bits_per_nat = 1.0 / math.log(2.0) / bytes_per_token

    @jax.jit
    def nats_and_accuracy(params: Params, tokens_BxT1: jax.Array) -> jax.Array:
        tokens_BxT1 = tokens_BxT1.astype(jnp.int32)
        right = jnp.argmax(model.logits(params, tokens_BxT1[:, :-1]), axis=-1) == tokens_BxT1[:, 1:]
        return jnp.stack([model.loss(params, tokens_BxT1), jnp.mean(right, dtype=jnp.float32)])

    def evaluation(params: Params) -> Iterator[Measures]:
        for batch in batches:
            nats, accuracy = np.asarray(nats_and_accuracy(params, batch)).tolist()
            yield Measures(nats * bits_per_nat, accuracy)

    return evaluation


class CorpusEvaluation:
    """The evaluation of one of our models on the validation text of a corpus, or on another held-out text of it."""

    def __init__(self, config: RunConfig, corpus: OpenCorpus, text: Tokens | None = None) -> None:
        self._config, self._bytes_per_token = config, corpus.bytes_per_token
        self._text = corpus.valid if text is None else text
        self._evaluation: Evaluate | None = None

    def __call__(self, params: Params) -> Iterator[Measures]:
        """Return the measures of each slice. Raises DataError for a text too short."""
        from archipelago.islands.models.registry import build

        if self._evaluation is None:
            data, model = self._config.data, build(self._config.model)
            text = held_out(self._text, data.held_out_sequences, data.sequence_length)
            self._evaluation = in_slices(model, text, data.batch_size, self._bytes_per_token)
        return self._evaluation(params)


def mean_of(slices: Iterable[Measures]) -> Measures:
    """Return the measures of an evaluation from those of its slices. No number is infinite."""
    all_bits, accuracies = zip(*slices, strict=True)
    bits = math.fsum(all_bits) / len(all_bits)
    return Measures(bits if math.isfinite(bits) else math.nan, math.fsum(accuracies) / len(accuracies))


def assemble(manifest: Manifest, vectors: Sequence[Vector], place: Callable[[Any], Params] = jax.device_put) -> Params:
    """Return parameters by name from one flat vector for each fragment. `place` brings them to the devices."""
    # Slicing on the host compiles nothing. Slicing on the device compiles a program for each tensor.
    parts = {
        tensor.name: vector_N[offset : offset + tensor.size].reshape(tensor.shape)
        for rows, vector_N in zip(manifest.layout, map(np.asarray, vectors), strict=True)
        for tensor, offset in rows
    }
    params: Params = place(dict(sorted(parts.items())))
    return params


def published(
    transport: ReaderTransport, manifest: Manifest, place: Callable[[Any], Params] = jax.device_put
) -> tuple[Params, int, int]:
    """Return the newest published parameters, the last round in them, and their global step."""
    found = [newest(transport.reader, manifest, p) for p in range(len(manifest.fragments))]
    last, step = max(part.snapshot.round for part in found), max(part.snapshot.step for part in found)
    return assemble(manifest, [part.params_N for part in found], place), last, step


# -- by the islands of a run, while they train -------------------------------------------------------------------------

#: The largest share of the device's time that evaluations take.
DEVICE_SHARE: Final = 0.02
#: How long an island that has died keeps the lease.
LEASE_SECONDS: Final = 15.0
TICK_SECONDS: Final = 1.0
#: How long an island waits at the end of a run until its last contributions are merged.
MERGED_SECONDS: Final = 20.0
POLL_SECONDS: Final = 0.1

T = TypeVar("T")


class Evaluator:
    """The evaluations of one island.

    Args:
        transport: The connection to the broker.
        manifest: The run.
        who: The island and its incarnation, as `NAME/INCARNATION`.
        evaluation: Measures parameters, slice by slice.
        arrivals: Returns the newest snapshots that the island holds, as they were published; an empty list if it does
            not hold them all.
        every_seconds: The time between the beginnings of two evaluations.
        curves: Receives each result.
        clock: Monotonic seconds.
        wall: Seconds of the wall clock, for the record.
        place: Brings parameters to the island's devices.
    """

    def __init__(
        self,
        transport: IslandTransport,
        manifest: Manifest,
        who: str,
        evaluation: Evaluate,
        arrivals: Callable[[], Sequence[Arrival]],
        every_seconds: float,
        curves: CurveWriter | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        place: Callable[[Any], Params] = jax.device_put,
    ) -> None:
        self._transport, self._manifest, self._who = transport, manifest, who
        self._evaluation, self._arrivals = evaluation, arrivals
        self._every_seconds, self._curves = every_seconds, curves
        self._clock, self._wall, self._place = clock, wall, place
        self._used_seconds = 0.0  # of the device, by the last evaluation
        self._has_measured = False
        self._due = -math.inf
        self._round = -1
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep_evaluating, name="evaluator", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its slice, if any, and free the lease for the islands that still train.

        A thread that hangs in a call ends with the process.
        """
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(2.0)
        _attempt("free the lease", self._free_lease)  # it also ends by itself

    def turn(self) -> Evaluation | None:
        """Evaluate if this island holds the lease and an evaluation is due. Return the result, if any."""
        began = self._clock()
        if not self._holds_lease() or began < self._due:
            return None
        found = self._newest()
        evaluation = self._evaluate(found, self._stopping.is_set) if found else None
        if evaluation is not None:
            self._due = began + max(self._every_seconds, self._used_seconds / DEVICE_SHARE)
            self._round = evaluation.round
        return evaluation

    def finish(self, stopped: Callable[[], bool]) -> Evaluation | None:
        """Evaluate the final parameters if no other island still trains. Return the result, if any.

        A failure ends no island.
        """
        return _attempt("evaluate the final parameters", lambda: self._finish(stopped))

    # -- parts --------------------------------------------------------------------------------------------------------

    def _finish(self, stopped: Callable[[], bool]) -> Evaluation | None:
        deadline = self._clock() + MERGED_SECONDS
        while self._transport.reader.backlog() and self._clock() < deadline and not stopped():
            time.sleep(POLL_SECONDS)
        # The lease is free while this island looks at the others. Else two that end together could rely on each other.
        beats = (presence.heartbeat.state for presence in self._transport.reader.presences() if presence.is_live)
        if stopped() or any(state in ("joining", "training") for state in beats):
            return None
        if not self._holds_lease():
            return None
        try:
            newest = published(self._transport, self._manifest, self._place)
            known = self._transport.reader.evaluations()
            if known and known[-1].round == newest[1]:
                return None
            log.info("evaluating the final parameters")
            return self._evaluate(newest, stopped)
        finally:
            self._free_lease()

    def _keep_evaluating(self) -> None:
        while not self._stopping.is_set():
            try:
                self.turn()
            except (BrokerError, WireError) as error:  # the next turn may succeed
                log.debug("no evaluation: %s", error.what if isinstance(error, BrokerError) else error.reason)
            except Exception as error:  # noqa: BLE001 - training goes on without evaluations
                log.warning("this island evaluates no more (%.300s); it trains on", error)
                return
            self._stopping.wait(TICK_SECONDS)

    def _evaluate(self, found: tuple[Params, int, int], stopped: Callable[[], bool]) -> Evaluation | None:
        """Evaluate parameters of a round and step, and record the result. Return None if it was cut short."""
        params, number, step = found
        # An evaluation takes a while, and rounds close meanwhile. Counters go on when an island is killed.
        tokens = self._transport.reader.counters().merged_tokens // len(self._manifest.fragments) if number else 0
        measured = self._measure(params, stopped)
        return self._record(measured, number, step, tokens) if measured else None

    def _holds_lease(self) -> bool:
        return self._transport.island.lease_evaluation(self._who, LEASE_SECONDS)

    def _free_lease(self) -> None:
        self._transport.island.lease_evaluation(self._who, 0.0)

    def _newest(self) -> tuple[Params, int, int] | None:
        """Return the newest published parameters, their round and their step; None if they are known already."""
        if not self._manifest.config.wire.sends_differences:  # then the island keeps no exact copy
            rounds = [head.round for head in self._transport.reader.heads() if head is not None]
            is_new = bool(rounds) and max(rounds) != self._round
            return published(self._transport, self._manifest, self._place) if is_new else None
        arrivals = self._arrivals()
        if not arrivals or max(arrival.snapshot.round for arrival in arrivals) == self._round:
            return None
        params = assemble(self._manifest, [arrival.params_N for arrival in arrivals], self._place)
        snapshots = [arrival.snapshot for arrival in arrivals]
        return params, max(snapshot.round for snapshot in snapshots), max(snapshot.step for snapshot in snapshots)

    def _measure(self, params: Params, stopped: Callable[[], bool]) -> Measures | None:
        """Evaluate slice by slice. Return None if the lease is lost or the time is over before the end."""
        found, seconds = list[Measures](), list[float]()
        self._used_seconds = 0.0
        goes_on, began = not stopped() and self._holds_lease(), time.perf_counter()
        if not goes_on:
            return None
        for measured in self._evaluation(params):
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

    def _record(self, measured: Measures, number: int, step: int, tokens: int) -> Evaluation:
        unit = loss_unit(self._manifest.corpus)
        loss = unit.from_evaluation(measured.bits)
        log.info("round %s: %s", number, measured.describe(unit), extra={"round": number})
        by = self._who.partition("/")[0]
        found = Evaluation(number, step, tokens, self._wall(), measured.bits, by)
        self._transport.reader.record_evaluation(found)
        if self._curves is not None:
            self._curves.put(step, {"held_out_loss": loss, "accuracy": measured.accuracy, "round": number})
        return found


def _attempt(what: str, call: Callable[[], T]) -> T | None:
    """Return the result of a call. A failure is only logged, because an island trains without evaluations, too."""
    try:
        return call()
    except (BrokerError, WireError) as error:
        log.debug("cannot %s: %s", what, error)
    except Exception as error:  # noqa: BLE001 - such as a device without memory for another copy of the parameters
        log.warning("this island cannot %s (%.300s)", what, error)
    return None
