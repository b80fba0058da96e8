"""Apply the operator's requests (`broker.control`) to a merger, and write notes about them.

A changed setting takes effect with the round that closes next. It is in that round's tape entry and committed state, so
takeovers, restarts and replays use it too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet

from archipelago.broker import control
from archipelago.broker.control import CHECKPOINT, EXPEL, IN_WORDS, Control, island_field
from archipelago.broker.errors import BrokerError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import NOTE_MAX, Note
from archipelago.broker.shards.transport import of_shard
from archipelago.broker.transport import ReaderTransport
from archipelago.merger.scores import NOTED, Score
from archipelago.merger.state import RunState

EXPELLED = IN_WORDS[EXPEL]

log = logging.getLogger(__name__)


class OperatorControls:
    """Reads the operator's requests and applies them."""

    def __init__(self, transport: ReaderTransport, manifest: Manifest, wall: Callable[[], float]) -> None:
        self.transport, self.config, self.wall = transport, manifest.config, wall
        self._is_home = not manifest.shard
        self._shards = [of_shard(transport, manifest, shard) for shard in range(manifest.shards)]
        self.control = Control()
        #: The requests that were heard last; None before the first ones.
        self.fields: dict[str, str] | None = None
        #: The config of the next round, with the operator's changes.
        self.next_config = self.config
        #: The settings of the next round that differ from the config.
        self.settings: dict[str, float] = {}

    def hear(self, fields: Mapping[str, str], state: RunState) -> None:
        """Take the requests, which have changed."""
        before, self.control, self.fields = self.control, Control.of(fields), dict(fields)
        acted_on = {name: value for name, value in self.control.fields.items() if name != CHECKPOINT}
        if self.control.checkpoint and CHECKPOINT in state.control:
            acted_on[CHECKPOINT] = state.control[CHECKPOINT]
        state.control = acted_on
        self.settings = control.in_force(self.config, state.steered, self.control)
        self.next_config = control.steered(self.config, self.settings)
        self._note_changes(before)

    def note(self, kind: str, text: str) -> None:
        """Write a note for operators. The run continues if that fails."""
        try:
            self.transport.reader.note(Note(self.wall(), "merger", kind, text[:NOTE_MAX]))
        except BrokerError as error:
            log.warning("a note is lost (%s): %s", error.what, text)

    def tell_of_scores(self, before: Mapping[str, Score], after: Mapping[str, Score]) -> None:
        """Note whose weight a round has lowered or restored, and expel those whom the run's rule expels."""
        for island, found in after.items():
            was, rounds = before.get(island, Score()).lowered, self.config.merge.expel_after
            if found.lowered == NOTED and was == NOTED - 1:
                measured = f"score {found.value:.2f}, norm {found.norm:.1f} times the usual one"
                what = f"its contributions disagree with those of the others ({measured}), so its weight is lowered"
                self._tell("scores.lowered", f"{island}: {what}")
            if was >= NOTED and not found.lowered:
                what = "its contributions agree with those of the others again"
                self._tell("scores.restored", f"{island}: {what}", logging.INFO)
            # An island that the operator admits again has as many rounds to improve.
            if rounds and found.lowered > was and found.lowered % rounds == 0 and self._expel(island):
                text = f"its weight was lowered in {found.lowered} rounds in a row (merge.expel_after)"
                self._tell("scores.expelled", f"{island}: {text}")

    def tell_of_idle(self, idle: AbstractSet[str]) -> None:
        """Log and note that islands are live without counting."""
        text = f"rounds no longer wait for {len(idle)} islands that send heartbeats and contribute nothing"
        log.warning("%s, such as %s. Look at their logs", text, min(idle), extra={"code": "islands.idle"})
        self.note("idle", f"{text}, such as {min(idle)}")

    def _expel(self, island: str) -> bool:
        """Expel an island from all shards: islands hear shard 0, and each merger its own. Return whether one did."""
        found = False
        for shard in self._shards:
            try:
                shard.reader.steer({island_field(island): EXPEL})
                found = True
            except BrokerError as error:
                log.warning("%s could not be expelled: %s", island, error.what, extra={"code": "scores.not-expelled"})
        return found

    def _tell(self, code: str, text: str, level: int = logging.WARNING) -> None:
        """Log a change of an island's weight, and note it."""
        log.log(level, "%s", text, extra={"code": code})
        self.note(code.removeprefix("scores."), text)

    def _note_changes(self, before: Control) -> None:
        """Note the new requests, except settings, which are noted with their round.

        Each shard's merger gets the same requests. Only that of the first shard writes notes about them.
        """
        now = self.control
        if now.is_paused != before.is_paused:
            self._note_request(
                *(("paused", "no round closes until `merging` is removed") if now.is_paused else ("resumed", ""))
            )
        for island in sorted(now.expelled - before.expelled):
            self._note_request("steered", f"{island} is {EXPELLED}: its contributions are refused")
        for island in sorted(before.expelled - now.expelled):
            self._note_request("steered", f"{island} is admitted again")

    def _note_request(self, kind: str, text: str) -> None:
        log.info("%s %s", kind, text)
        if self._is_home:
            self.note(kind, text)
