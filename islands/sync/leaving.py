"""How a loop leaves its run: at a signal, with its newest progress, or saying why that is not sent; and what it takes.

After SIGTERM, an island leaves at the next step boundary, unless the script handles the signal itself.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

from archipelago.broker.control import IN_WORDS, run_steps
from archipelago.broker.errors import ArchipelagoError, BrokerError, ConfigError, DivergedError
from archipelago.broker.manifest import Manifest
from archipelago.broker.observe.merge_load import warn_of_few_syncs
from archipelago.broker.shards.transport import shards_of
from archipelago.broker.transport import IslandTransport, refusal
from archipelago.islands.sync.evaluator import Merged, newest_merged
from archipelago.islands.sync.participant import Participant

log = logging.getLogger(__name__)

FLUSH_SECONDS = 10.0
FAREWELL_SECONDS = 2.0
#: At the end of the run, an island waits this long for the merger to merge its last contributions.
MERGED_SECONDS = 10.0
#: How often a script that has left looks whether the last rounds are merged, and how many islands an error names.
POLL_SECONDS, NAMED_MAX = 0.2, 4
#: The exit status of a process that SIGTERM has ended.
TERMINATED = 128 + signal.SIGTERM


class StoppedBySignal(SystemExit):
    """The end of a script that SIGTERM has asked to stop. All processes of one island raise it at the same step."""

    def __init__(self) -> None:
        super().__init__(TERMINATED)


class StopSignal:
    """Notices SIGTERM while it is watched."""

    def __init__(self) -> None:
        self.has_arrived = False
        self._is_watched = False
        self._was_told = False
        self._process = os.getpid()

    def watch(self) -> None:
        """Handle the signal from now on, in the main thread only, and only if the script has no handler of its own."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._arrive)
            self._is_watched = True

    def release(self) -> None:
        """Give the signal its default meaning again, unless the script has given it another since."""
        is_main = threading.current_thread() is threading.main_thread()
        if self._is_watched and is_main and signal.getsignal(signal.SIGTERM) == self._arrive:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._is_watched = False

    def require_heard(self, has_arrived: bool) -> None:
        """Raise StoppedBySignal at the second call after a signal, for a loop that ignores `finished`."""
        if has_arrived and self._was_told:
            raise StoppedBySignal
        self._was_told = has_arrived

    def _arrive(self, number: int, _frame: FrameType | None) -> None:
        # A second signal ends the process at once. The first one ends forked processes, such as those of a data loader,
        # and a script that has left the run in another thread, which cannot change the handler.
        if self.has_arrived or not self._is_watched or os.getpid() != self._process:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.has_arrived = True


def frozen_fault(loop: Participant) -> ConfigError | None:
    """Return the error that the parameters are not those of the run any more, before the newest progress is sent."""
    try:
        if loop.parameters.are_there():
            loop.parameters.require_frozen()
    except ConfigError as error:
        return error
    return None


def leave_cleanly(loop: Participant, *, awaits_merge: bool = True) -> str:
    """Send all progress and leave, and say in the log why, and what was lost.

    Parameters that went into a later step are not there any more. Return `done` at the end of the run, `replaced` if a
    newer process has the island's name, else `left`.
    """
    state = "done" if loop.finished else "left"
    if state == "left" and loop.reason:
        log.warning("leaves: %s", leave_reason(loop)[1])
    if not loop.parameters.are_there():
        log.warning("the progress of the newest steps is lost: the parameters of the last `sync` were donated since")
        is_sent, state = give_up(loop, *leave_reason(loop), seconds=FLUSH_SECONDS), "left"
    else:
        is_sent = leave(loop, state, awaits_merge=awaits_merge)
    if not is_sent and (left := loop.link.backlog):  # else it did not take the last heartbeat
        log.warning("the broker did not take %s contributions", left)
    if loop.link.heartbeats.is_replaced:
        state = "replaced"
    log.info("%s after %s steps, %s tokens", state, loop.totals.steps, f"{loop.totals.tokens:,}")
    return state


def leave(
    loop: Participant, state: str = "left", flush_seconds: float = FLUSH_SECONDS, *, awaits_merge: bool = True
) -> bool:
    """Send all progress and announce the departure. Return whether the broker received everything.

    At the end of the run, it first waits for a while until its last contributions are merged, so that the run's
    parameters have them when a script goes on; not if the script then waits for all islands (`final`). An island whose
    name was taken over only writes a note, because its heartbeats are those of another process.
    """
    is_replaced, is_sent = loop.link.heartbeats.is_replaced, True
    if not is_replaced:
        loop.beat("leaving")
        for number in loop.ledger.farewells():
            loop.send(number, farewell=True)
        is_sent = loop.link.drain(flush_seconds)
        if is_sent and loop.finished:
            _await_merge(loop, min(MERGED_SECONDS, flush_seconds) if awaits_merge else None)
    last_state, seconds = "left" if is_replaced else state, min(FAREWELL_SECONDS, flush_seconds)
    return give_up(loop, *leave_reason(loop), last_state, seconds) and is_sent


def _await_merge(loop: Participant, seconds: float | None) -> None:
    """Wait for the merger unless `seconds` is None, and say what the run's parameters lack."""
    if seconds is not None and (left := loop.link.await_decisions(seconds)):
        log.warning(
            "the last %s contributions of this island are not merged yet, so the run's parameters lack them. Redis "
            "keeps them for its merger", left, extra={"code": "island.not-merged"},
        )  # fmt: skip
    log.info("each fragment had %.1f syncs", syncs := loop.link.heard_round / len(loop.ledger.counts))
    warn_of_few_syncs(log, syncs)


def leave_reason(loop: Participant) -> tuple[str, str]:
    """Return why the island leaves, as a note's kind and text."""
    if loop.reason == "stranded":
        return "left", (
            f"no merger served the run while it made {loop.unserved_steps:,} steps, as many as the whole run has. "
            "Its work waits in Redis: start a merger, and then the island again"
        )
    if loop.reason == "replaced":
        return "replaced", "a newer process has this island's name"
    if loop.reason in ("drained", "expelled"):
        return loop.reason, IN_WORDS[loop.link.heartbeats.request]
    return "left", "the run is at its end" if loop.finished else "it was stopped"


def leave_after(loop: Participant, error: BaseException) -> None:
    """Say why the island leaves, and send nothing more, because its parameters may be broken."""
    reason = (
        error.what if isinstance(error, ArchipelagoError) else f"{type(error).__name__}: {error}".removesuffix(": ")
    )
    log.warning("leaves without sending its newest progress: %s", reason)
    give_up(loop, "diverged" if isinstance(error, DivergedError) else "left", reason)


def give_up(loop: Participant, kind: str, reason: str, state: str = "left", seconds: float = FAREWELL_SECONDS) -> bool:
    """Announce the departure with a note of that kind, without sending any progress. Return whether it was sent."""
    loop.link.heartbeats.note(kind, f"after {loop.totals.steps:,} steps: {reason}")
    loop.beat(state)  # wakes the thread that sends the note
    return loop.link.drain(seconds)


# -- the parameters at the end of a run --------------------------------------------------------------------------------


def final_parameters(
    transport: IslandTransport,
    manifest: Manifest,
    sent: Mapping[int, Sequence[str]],
    *,
    is_over: bool,
    deadline: float,
    pause: Callable[[float], None],
) -> Merged:
    """Return the run's parameters, one float32 vector for each fragment, once all that it waits for is merged.

    At the end of the run, that is all contributions of all islands, so that everybody gets the same parameters. Of a
    run that goes on, it is those of this island, and the parameters are the newest.

    Args:
        transport: The connection to the whole run.
        sent: The stream entries of this island's contributions that were undecided when it left, by shard.
        is_over: Whether the run was at its end then. It may be now.
        deadline: When to give up, in seconds of `time.monotonic`.
        pause: Waits between two looks at the run.

    Raises:
        BrokerError: They are not merged in time (`island.not-merged`).
    """
    while why := lacking(transport, manifest, sent, is_over=is_over):
        if time.monotonic() >= deadline:
            run = manifest.run
            raise BrokerError(
                f"the last rounds of the run {run!r} are not merged in time: {why}",
                f"Redis keeps everything. `archipelago status --run {run}` shows the run; without a merger, start "
                f"`archipelago merger --run {run}`. Then call `final` again, or give it a longer `timeout` "
                "(of a trainer's island, `callback.island.final()` and `final_seconds`).",
                code="island.not-merged",
            )
        pause(POLL_SECONDS)
    return newest_merged(transport, manifest)


def lacking(transport: IslandTransport, manifest: Manifest, sent: Mapping[int, Sequence[str]], *, is_over: bool) -> str:
    """Return what is still awaited, in words; empty if it is nothing."""
    reader = transport.reader
    step = max((head.step for head in reader.heads() if head is not None), default=0)
    is_over = is_over or step >= run_steps(manifest.config, reader.control())
    # An island leaves when all that it has sent is stored, so the islands are looked at before the contributions.
    here = [each.heartbeat.island for each in reader.presences() if each.is_live] if is_over else []
    shards = [each.island for each in shards_of(transport)]
    own = [entry for shard, entries in sent.items() for entry in entries if shards[shard].holds(entry)]
    waiting = reader.backlog() if is_over else len(own)
    why = [f"the islands {', '.join(here[:NAMED_MAX])} have not left"] if here else []
    if waiting:
        why.append(f"{waiting} contributions wait")
    if (waiting or not is_over) and not reader.is_served():
        why.insert(
            0, f"no merger serves the run ({refused})" if (refused := refusal(reader)) else "no merger serves it"
        )
    return "; ".join(why)
