"""Take checkpoints when they are due, and keep merged entries in Redis until nothing needs them.

A merger that starts needs the entries that no compaction covers (`merger.committing`). If Redis loses the run's state,
a merger needs those that no checkpoint covers.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from archipelago.broker.messages import Marker, TapeEntry
from archipelago.broker.transport import MergerTransport
from archipelago.merger.checkpointer import CheckpointCut, Checkpointer
from archipelago.merger.state import RunState
from archipelago.merger.steering import OperatorControls

#: The most bytes in Redis of merged contributions that are kept for a checkpoint alone. Beyond it, the oldest are
#: deleted, although no checkpoint covers them.
KEPT_BYTES_MAX = 256 << 20
#: Bytes that an entry takes in Redis besides its payload, at most.
ENTRY_BYTES = 2 << 10
#: About how many entries one write deletes. A server takes about a million words, and does nothing else meanwhile.
TRIMMED_MAX = 10_000
#: How often, and at which distance, a shard that ends looks for the last checkpoint of shard 0.
MARKER_TRIES, MARKER_SECONDS = 40, 0.05

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MergedEntries:
    """The entries that a round of a fragment merged, and the bytes of their payloads."""

    round: int
    fragment: int
    entries: tuple[str, ...]
    bytes: int

    @property
    def stored_bytes(self) -> int:
        """About how many bytes they take in Redis."""
        return self.bytes + ENTRY_BYTES * len(self.entries)


class Retention:
    """Keeps merged entries until compactions and checkpoints cover them, and decides when to take a checkpoint.

    Args:
        transport: The connection to the run.
        checkpointer: Writes checkpoints; None when this merger takes none.
        controls: The operator's requests, which may include a checkpoint.
        clock: Seconds of the merger's clock.
        cut: `cut(number, asked)` returns the run as it is now, for checkpoint `number`. `asked` is the operator's
            request that the checkpoint answers.
        is_compacted: `is_compacted(fragment, round)` returns whether the full state in Redis includes a round.
    """

    def __init__(
        self,
        transport: MergerTransport,
        checkpointer: Checkpointer | None,
        controls: OperatorControls,
        clock: Callable[[], float],
        cut: Callable[[int, str], CheckpointCut],
        is_compacted: Callable[[int, int], bool],
    ) -> None:
        self.transport, self.checkpointer, self.controls = transport, checkpointer, controls
        self.clock, self._cut, self._is_compacted = clock, cut, is_compacted
        #: The merged entries that Redis still keeps, oldest round first.
        self.kept: deque[MergedEntries] = deque()
        self._asked = ""  # the operator's request that the checkpoint in progress answers

    def load(self, state: RunState, epoch: int, tape: Sequence[TapeEntry]) -> None:
        """Rebuild the list of kept entries from the rounds that no compaction or no checkpoint covers.

        Entries of other rounds are of no use: the tape has lost these, or the run went back to a checkpoint.
        """
        self._asked = ""
        self.kept.clear()
        for entry in tape:
            if self._awaits_checkpoint(entry.round, state) or not self._is_compacted(entry.fragment, entry.round):
                entries = tuple(member.entry for member in entry.members)
                self.kept.append(MergedEntries(entry.round, entry.fragment, entries, entry.bytes_up))
        named = {entry for merged in self.kept for entry in merged.entries}
        strays = [entry for entry in self.transport.merger.kept() if entry not in named]
        for start in range(0, len(strays), TRIMMED_MAX):
            self.transport.merger.trim(epoch, strays[start : start + TRIMMED_MAX], state.closed)

    def not_needed(self, state: RunState) -> list[str]:
        """Return the entries that may be deleted now, once: about TRIMMED_MAX of them, and the others later.

        Compactions cover them. So does a checkpoint, unless there are none, or these are the oldest ones beyond
        KEPT_BYTES_MAX.
        """
        size, was_behind = self._waiting_bytes(), False
        kept: deque[MergedEntries] = deque()
        gone: list[str] = []
        for merged in self.kept:
            if not self._is_compacted(merged.fragment, merged.round) or len(gone) >= TRIMMED_MAX:
                kept.append(merged)
                continue
            is_wanted = self._awaits_checkpoint(merged.round, state)
            if is_wanted and size <= KEPT_BYTES_MAX:
                kept.append(merged)
                continue
            was_behind |= is_wanted
            size -= merged.stored_bytes
            gone += merged.entries
        self.kept = kept
        if was_behind:
            log.warning(
                "checkpoints are too slow or fail: until the next one, only Redis can restore this run",
                extra={"code": "checkpoint.behind"},
            )
        return gone

    def _awaits_checkpoint(self, number: int, state: RunState) -> bool:
        return self.checkpointer is not None and number > state.covered

    def is_covered(self, state: RunState) -> bool:
        """Return whether a checkpoint holds all closed rounds, or this merger takes none."""
        return self.checkpointer is None or not self.checkpointer.lacks(state.closed, state.covered)

    def checkpoint_if_due(self, state: RunState, epoch: int, *, is_last: bool = False) -> None:
        """Take a checkpoint if one is due, if the operator asks for one, or if the run is finished (`is_last`)."""
        if self.checkpointer is not None and self.checkpointer.following is not None:
            return  # the merger of shard 0 decides (`follow`)
        asked = self.controls.wanted_checkpoint(state)
        if self.checkpointer is None:
            if asked:
                self.controls.took_checkpoint(state, asked)
                self.controls.note("checkpoint", "this merger takes no checkpoints (--checkpoint-every 0)")
            return
        crowded = self._waiting_bytes() > KEPT_BYTES_MAX / 2
        is_asked = asked not in ("", self._asked)  # a request whose checkpoint failed is not urgent again
        leading = self.checkpointer.leading
        urgent = (is_last and not (leading and leading.has_backlog())) or crowded or is_asked
        if not self.checkpointer.is_due(self.clock(), urgent=urgent):
            return
        if self.checkpointer.lacks(state.closed, state.covered):
            self._asked = asked
            self.take(state, epoch)
        elif asked:
            self.controls.took_checkpoint(state, asked)
            self.controls.note("checkpoint", f"the newest checkpoint is up to date with round {state.closed}")

    def take(self, state: RunState, epoch: int) -> None:
        """Cut the run, tell the islands, and start writing the checkpoint."""
        assert self.checkpointer is not None  # noqa: S101
        number = self.checkpointer.next_number(self.clock())
        if number is None:
            return
        # The number is at least the round. Mergers with separate folders then cannot reuse the number of an island's
        # checkpoint for another round.
        self._begin(max(number, state.closed), epoch)

    def follow(self, state: RunState, epoch: int) -> None:
        """Cut this shard for the checkpoint that the merger of shard 0 has announced since the last call, if any.

        Call this after contributions were read, and before any of them is accepted. An island that has taken its part
        of the checkpoint has heard of the announcement. So if any of these was sent after that, we hear of it now, too.
        """
        checkpointer = self.checkpointer
        number = checkpointer.following.newest(self.clock()) if checkpointer and checkpointer.following else None
        if checkpointer is None or number is None:
            return
        if checkpointer.is_busy:
            log.debug("shard without a part of checkpoint %s: the last one is still being written", number)
            return
        self._asked = self.controls.wanted_checkpoint(state)
        self._begin(number, epoch)

    def _begin(self, number: int, epoch: int) -> None:
        assert self.checkpointer is not None  # noqa: S101
        cut = self._cut(number, self._asked)
        if self.checkpointer.leading is not None:
            self.checkpointer.leading.begin(number, self.clock())
        self.transport.merger.announce(epoch, Marker(cut.number, cut.round))
        self.checkpointer.begin(cut, self.clock())

    def release(self, state: RunState, epoch: int, *, wait: bool) -> None:
        """Trim the entries that a finished checkpoint covers. With `wait`, first wait for the one in progress."""
        if self.checkpointer is None:
            return
        for kind, text in self.checkpointer.news():
            self.controls.note(kind, text)
        if (covered := self.checkpointer.finished(self.clock(), wait=wait)) is None:
            return
        state.covered = max(state.covered, covered.round)
        while gone := self.not_needed(state):
            self.transport.merger.trim(epoch, gone, state.closed)
        if self._asked:
            self.controls.took_checkpoint(state, self._asked)
            self._asked = ""
            if self.checkpointer.following is None:
                what = "shard 0" if self.checkpointer.leading else "the run"
                text = f"checkpoint {covered.number} holds {what} up to round {covered.round}"
                self.controls.note("checkpoint", text)

    def finish(self, state: RunState, epoch: int, pause: Callable[[float], None]) -> None:
        """Take a last checkpoint and wait for it, so that the run can continue from disk alone.

        `pause` waits that many seconds.
        """
        self.release(state, epoch, wait=True)
        if self.checkpointer is None:
            return
        if self.checkpointer.following is not None:
            self._await_marker(state, epoch, pause)
        elif self.checkpointer.lacks(state.closed, state.covered):
            self.take(state, epoch)
        self.release(state, epoch, wait=True)

    def _await_marker(self, state: RunState, epoch: int, pause: Callable[[float], None]) -> None:
        """Follow the merger of shard 0, which may be ending at the same moment, into its last checkpoint."""
        for _ in range(MARKER_TRIES):
            self.follow(state, epoch)
            if self.is_covered(state) or (self.checkpointer and self.checkpointer.is_busy):
                return
            pause(MARKER_SECONDS)

    def _waiting_bytes(self) -> int:
        """Return the bytes in Redis of the entries that compactions cover, and that wait for a checkpoint."""
        covered = (merged for merged in self.kept if self._is_compacted(merged.fragment, merged.round))
        return sum(merged.stored_bytes for merged in covered)
