"""Take checkpoints when they are due, and keep merged entries in the stream until a checkpoint covers them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from archipelago.broker.messages import Marker
from archipelago.broker.transport import MergerTransport
from archipelago.merger.checkpointer import CheckpointCut, Checkpointer
from archipelago.merger.rebuild import WHOLE_TAPE
from archipelago.merger.state import RunState
from archipelago.merger.steering import OperatorControls

#: The most bytes of merged contributions that stay in the stream. Beyond it, the oldest are deleted, although
#: no checkpoint covers them.
KEPT_BYTES_MAX = 256 << 20

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MergedEntries:
    """The entries that a round merged, and the bytes of their payloads."""

    round: int
    entries: tuple[str, ...]
    bytes: int


class Retention:
    """Keeps merged entries until a checkpoint covers them, and decides when to take one.

    Args:
        transport: The connection to the run.
        checkpointer: Writes checkpoints; None when this merger takes none. Each commit then deletes its entries.
        controls: The operator's requests, which may include a checkpoint.
        clock: Seconds of the merger's clock.
        cut: `cut(number, asked)` returns the run as it is now, for checkpoint `number`. `asked` is the operator's
            request that the checkpoint answers.
    """

    def __init__(
        self,
        transport: MergerTransport,
        checkpointer: Checkpointer | None,
        controls: OperatorControls,
        clock: Callable[[], float],
        cut: Callable[[int, str], CheckpointCut],
    ) -> None:
        self.transport, self.checkpointer, self.controls = transport, checkpointer, controls
        self.clock, self._cut = clock, cut
        #: The merged entries that are still in the stream, oldest round first.
        self.kept: deque[MergedEntries] = deque()
        self._asked = ""  # the operator's request that the checkpoint in progress answers

    def load(self, state: RunState, epoch: int) -> None:
        """Rebuild the list of kept entries from the streams.

        Acknowledged entries that the tape does not name are of no use: a checkpoint covers them, or the tape has lost
        their round. Some were never merged, because someone moved the group's position. These are delivered again.
        """
        self._asked = ""
        self.kept.clear()
        in_stream = self.transport.reader.books().kept
        if not in_stream:
            return
        for entry in self.transport.reader.tape(WHOLE_TAPE):
            if state.covered < entry.round <= state.closed:
                entries = tuple(member.entry for member in entry.members)
                self.kept.append(MergedEntries(entry.round, entries, entry.bytes_up))
        named = {entry for merged in self.kept for entry in merged.entries}
        if in_stream > len(named):
            others = [d for d in self.transport.merger.settled() if d.entry not in named]
            again = [d.entry for d in others if d.contribution and not state.has_seen(d.contribution.identity)]
            self.transport.merger.trim(epoch, [d.entry for d in others if d.entry not in again])
            if again:
                log.warning("%s contributions were never merged", len(again), extra={"code": "repair.redelivered"})
                self.transport.merger.redeliver(epoch, again)

    def keep(self, merged: MergedEntries) -> list[str]:
        """Keep the entries of a merged round, and return the entries to trim with its commit.

        Without checkpoints these are all entries. Otherwise they are the oldest ones beyond KEPT_BYTES_MAX.
        """
        self.kept.append(merged)
        most = KEPT_BYTES_MAX if self.checkpointer is not None else 0
        size = self._kept_bytes()
        gone: list[str] = []
        while self.kept and (size > most or self.checkpointer is None):
            oldest = self.kept.popleft()
            size -= oldest.bytes
            gone += oldest.entries
        if gone and self.checkpointer is not None:
            log.warning(
                "checkpoints are too slow or fail: until the next one, only Redis can restore this run",
                extra={"code": "checkpoint.behind"},
            )
        return gone

    def is_covered(self, state: RunState) -> bool:
        """Return whether a checkpoint holds all closed rounds, or this merger takes none."""
        return self.checkpointer is None or not self.checkpointer.lacks(state.closed, state.covered)

    def checkpoint_if_due(self, state: RunState, epoch: int, *, is_last: bool = False) -> None:
        """Take a checkpoint if one is due, if the operator asks for one, or if the run is finished (`is_last`)."""
        asked = self.controls.wanted_checkpoint(state)
        if self.checkpointer is None:
            if asked:
                self.controls.took_checkpoint(state, asked)
                self.controls.note("checkpoint", "this merger takes no checkpoints (--checkpoint-every 0)")
            return
        crowded = self._kept_bytes() > KEPT_BYTES_MAX / 2
        is_asked = asked not in ("", self._asked)  # a request whose checkpoint failed is not urgent again
        urgent = is_last or crowded or is_asked
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
        cut = self._cut(max(number, state.closed), self._asked)
        self.transport.merger.announce(epoch, Marker(cut.number, cut.round))
        self.checkpointer.begin(cut, self.clock())

    def release(self, state: RunState, epoch: int, *, wait: bool) -> None:
        """Trim the entries that a finished checkpoint covers. With `wait`, first wait for the one in progress."""
        if self.checkpointer is None:
            return
        for text in self.checkpointer.news():
            self.controls.note("bucket", text)
        if (covered := self.checkpointer.finished(self.clock(), wait=wait)) is None:
            return
        entries: list[str] = []
        while self.kept and self.kept[0].round <= covered.round:
            entries += self.kept.popleft().entries
        self.transport.merger.trim(epoch, entries, covered.actions_until)
        state.covered = max(state.covered, covered.round)
        if self._asked:
            self.controls.took_checkpoint(state, self._asked)
            self._asked = ""
            self.controls.note("checkpoint", f"checkpoint {covered.number} holds the run up to round {covered.round}")

    def finish(self, state: RunState, epoch: int) -> None:
        """Take a last checkpoint and wait for it, so that the run can continue from disk alone."""
        self.release(state, epoch, wait=True)
        if self.checkpointer is not None and self.checkpointer.lacks(state.closed, state.covered):
            self.take(state, epoch)
            self.release(state, epoch, wait=True)

    def _kept_bytes(self) -> int:
        return sum(merged.bytes for merged in self.kept)
