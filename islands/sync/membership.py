"""The membership of a training loop in a run: it joins, syncs between two steps, and leaves.

Everything here is the same for our worker and for scripts in any framework. Each of them adds its tensors, its replica,
and what it trains with.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import closing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from archipelago.broker.codecs import Vector
from archipelago.broker.control import require_welcome
from archipelago.broker.errors import ArchipelagoError, ConfigError, require_number
from archipelago.broker.manifest import Manifest
from archipelago.broker.observe.progress import progress
from archipelago.broker.process import Patience, compiled_once
from archipelago.broker.redis.transport import RedisTransport
from archipelago.broker.shards.transport import whole
from archipelago.broker.transport import IslandTransport
from archipelago.islands.sync.connection.downloads import Arrival, require_same_run
from archipelago.islands.sync.connection.link import Link
from archipelago.islands.sync.evaluator import Merged
from archipelago.islands.sync.leaving import StopSignal, final_parameters, frozen_fault, leave_after, leave_cleanly
from archipelago.islands.sync.participant import Participant
from archipelago.islands.sync.recovery import Newcomer
from archipelago.islands.sync.script import Clock, Joined, checked_counts, require_loss
from archipelago.islands.turn_log import MeasuredTurns

if TYPE_CHECKING:
    from archipelago.islands.checkpoint import IslandStore

log = logging.getLogger(__name__)


class Membership(Joined):
    """One membership of a loop in a run, as a context manager."""

    #: Where the island keeps a state of its own, if anywhere.
    _store: IslandStore | None = None

    def __init__(
        self, run: str, island: Callable[[], str], connect: Callable[[], RedisTransport], awaited: Patience
    ) -> None:
        """Note what to join. Nothing is contacted before the `with`. `awaited` repeats calls while Redis is away."""
        self._run, self._named, self._connect, self._awaited = run, island, connect, awaited
        self._incarnation = uuid.uuid4().hex[:8]
        self._thread = 0
        self._stop = StopSignal()
        self._transport: RedisTransport | None = None
        self._loop: Participant | None = None
        self._measured: MeasuredTurns | None = None
        self._ended = ""  # why the island has left, once it has
        self._final_round = 0  # the newest round of the parameters of `final`
        #: Whether a `sync` was interrupted, so that a fragment may be adopted in part.
        self._is_torn = False

    # -- what a loop adds ---------------------------------------------------------------------------------------------

    @abstractmethod
    def _accept(self, transport: IslandTransport, manifest: Manifest, name: str) -> None:
        """Load what the run needs. Raise MismatchError unless the loop trains what the run trains."""

    @abstractmethod
    def _participant(self, name: str, manifest: Manifest, link: Link, arrivals: Sequence[Arrival]) -> Participant:
        """Place the run's parameters, and return the island that trains them."""

    def _warm_up(self) -> None:
        """Compile what the loop runs, so that no peer waits for it later."""

    def _end(self, state: str) -> None:
        """Do what remains once the island has left in order, as `Participant.end` says, while Redis is still there."""

    # -- joining ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Join the run, and return when the first step can begin.

        Raises:
            ConfigError: The run has other tensors (`loop.other-tensors`, `loop.other-frozen`), or the join file or the
                settings cannot be used.
            BrokerError: The Redis cannot be reached, or has no such run.
        """
        if self._ended or self._loop is not None:
            raise ConfigError("a run can be joined once with one `join`", "Call `join` again.", code="loop.left")
        try:
            self._join()
        except BaseException:
            self._close()
            raise
        return self

    def _join(self) -> None:
        awaited = self._awaited
        primary = self._transport = awaited(self._connect)
        manifest = awaited(primary.reader.manifest)  # before anything large loads, so that a wrong name fails at once
        transport, name = whole(primary, manifest), self._named()
        self._island = name
        # Before the island claims anything under that name.
        require_welcome(awaited(transport.reader.control), name, manifest.run)
        self._accept(transport, manifest, name)
        link = Link(transport, manifest, f"{name}/{self._incarnation}", ())
        with progress(f"downloading the {manifest.parameters:,} parameters"):
            arrivals = awaited(link.join)
        with progress("placing the parameters on the device"):
            self._loop = loop = self._participant(name, manifest, link, arrivals)
        del arrivals  # another copy of the model
        newcomer = Newcomer(transport, loop)
        newcomer.ask()
        loop.beat("joining")
        link.pumps.start()
        with progress("compiling what syncs and steps run"), compiled_once(manifest.config.digest()):
            self._warm_up()
        with progress("taking the optimiser state"):
            newcomer.complete(self._store)
        self._thread = threading.get_ident()
        self._stop.watch()
        steps = f"{loop.link.heartbeats.run_steps:,}"
        log.info(
            "joined %s as %s at step %s of %s (round %s) on %s, optimiser state: %s",
            manifest.run, name, f"{loop.ledger.global_step:,}", steps, loop.ledger.closed, loop.device,
            loop.optimizer_origin, extra={"round": loop.ledger.closed},
        )  # fmt: skip
        if loop.finished:
            log.warning(
                "the run %r has made all of its %s steps, so there is nothing to train. To train further, extend it: "
                "`archipelago steer --run %s inner.steps=N`",
                manifest.run, steps, manifest.run, extra={"code": "loop.finished"},
            )  # fmt: skip
        self._measured = MeasuredTurns.asked_for(os.environ, self._incarnation)
        loop.begin()

    # -- training -----------------------------------------------------------------------------------------------------

    def _turn(self, steps: Any, tokens: Any, loss: Any) -> None:
        """Sync after some steps of the loop, whose parameters are in place."""
        loop = self._require_joined()
        if self._is_torn:
            raise ConfigError(
                "an earlier `sync` was interrupted by an error, so the parameters may be adopted in part",
                "Start the script again: it takes the run's parameters.",
                code="loop.left",
            )
        counted, count = checked_counts(steps, tokens)
        require_loss(loss)
        if self._measured is not None:
            self._measured.stepped(counted)
        self._is_torn = True
        try:
            loop.turn(counted, count, loss)
        except ArchipelagoError:  # these are raised before a fragment is adopted, so nothing is half done
            self._is_torn = False
            raise
        self._is_torn = False
        self._heed_signal()

    def _heed_signal(self) -> None:
        """End a script that does not look at `finished` at its second `sync` after SIGTERM."""
        self._stop.require_heard(self._stop.has_arrived)

    def _require_joined(self, call: str = "sync") -> Participant:
        """Return the loop. Raise ConfigError (`loop.left`, `loop.other-thread`) where that call must not use it."""
        if self._loop is None or self._ended:
            raise ConfigError(
                f"the script has not joined the run {self._run!r}, or has left it",
                f"Call `{call}` inside of `with join(...) as run:`.",
                code="loop.left",
            )
        self._require_thread(f"`{call}` was called")
        return self._loop

    def _require_thread(self, what: str) -> None:
        """Raise ConfigError (`loop.other-thread`) in another thread than the one that trains."""
        if threading.get_ident() != self._thread:
            raise ConfigError(
                f"{what} in another thread than the one that joined, which may be in the middle of a step",
                "Join, sync and leave in the thread that trains. Another thread can set a flag for it.",
                code="loop.other-thread",
            )

    def _clock(self) -> Clock:
        """Return what the script asks after each step."""
        if (loop := self._loop) is None:
            return Clock(self._ended)
        steps = loop.link.heartbeats.run_steps
        reason = loop.reason or ("signalled" if self._stop.has_arrived else "")
        return Clock(self._ended or reason, min(loop.ledger.global_step, steps), steps)

    @property
    def optimizer_origin(self) -> str:
        """The origin of the inner optimiser's state: `fresh`, a peer, the own checkpoint, or the script's own."""
        return "fresh" if self._loop is None else self._loop.optimizer_origin

    # -- leaving ------------------------------------------------------------------------------------------------------

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the run."""
        self._leave(error)

    def leave(self) -> None:
        """Leave the run before the end of the `with` block.

        Raises:
            ConfigError: This is not the thread that joined (`loop.other-thread`), and the island stays in the run. Or
                a tensor that is not trained has changed (`loop.frozen-changed`).
            DivergedError: A parameter is not finite.
        """
        self._leave(None)

    def _final(self, timeout: float) -> list[Vector]:
        """Leave the run, and return its parameters at its end, as `final_parameters` says. Raises as `final`."""
        self._require_over()
        require_number("`timeout`", timeout, "Give a number of seconds, such as 60.")
        deadline = time.monotonic() + timeout
        self._leave(None, awaits_merge=False)
        assert self._loop is not None  # noqa: S101 - it has joined
        manifest, channels = self._loop.manifest, self._loop.link.channels
        sent = {channel.shard: channel.outbox.undecided_entries() for channel in channels}
        is_over = self._ended == "completed"

        def read() -> Merged:
            with closing(self._connect()) as transport:
                require_same_run(transport.reader, manifest)
                run = whole(transport, manifest)
                return final_parameters(run, manifest, sent, is_over=is_over, deadline=deadline, pause=self._pause)

        found = Patience(timeout, lambda: False, pause=self._pause)(read)
        self._final_round = found.round
        return list(found.vectors)

    def _pause(self, seconds: float) -> None:
        """Wait for the merger."""
        time.sleep(seconds)

    def _leave(self, error: BaseException | None, *, awaits_merge: bool = True) -> None:
        if self._ended or self._loop is None:
            return
        loop, reason = self._loop, self.reason
        if not isinstance(error, Exception):  # its progress is going to be measured
            self._require_thread("the run was left")
        self._ended = reason or "left"
        changed: ConfigError | None = None
        try:
            if self._is_torn:
                leave_after(loop, error or RuntimeError("a `sync` was interrupted"))
            elif isinstance(error, Exception):
                leave_after(loop, error)
            elif (changed := frozen_fault(loop)) is not None:
                leave_after(loop, changed)
            else:
                self._end(leave_cleanly(loop, awaits_merge=awaits_merge))
        finally:
            self._close()
        if error is None and changed is not None:
            raise changed
        if error is None:
            loop.require_sound()

    def _close(self) -> None:
        self._ended = self._ended or "left"
        self._stop.release()
        if self._loop is not None:
            self._loop.link.pumps.stop()
        if self._transport is not None:
            self._transport.close()
