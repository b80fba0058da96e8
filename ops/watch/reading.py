"""Read a run from Redis: once into a view, or again and again, for the live screen, the page and the report.

A `Watcher` reads, `summarise` combines what was read, and the watcher keeps the history.
"""

from __future__ import annotations

import contextlib
import math
import shlex
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from archipelago.broker.control import Control, run_steps
from archipelago.broker.errors import ArchipelagoError, UnreachableError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import (
    COPIED,
    UNCOPIED,
    UNSAVED,
    Counters,
    Evaluation,
    Note,
    Refusal,
    RoundMember,
    TapeEntry,
)
from archipelago.broker.observe.losses import LossUnit, loss_unit
from archipelago.broker.presence import Presence
from archipelago.broker.process import up_command
from archipelago.broker.shards.reader import count_in, merged_tokens, parsed_state, summed
from archipelago.broker.shards.transport import opened, shards_away, whole
from archipelago.broker.transport import Memory, ReaderTransport, refusal
from archipelago.ops.watch.advice import Problem, problems, state_of
from archipelago.ops.watch.history import RECENT_ROUNDS, Event, History, events_of, mean
from archipelago.ops.watch.run_view import IslandView, RunView

REFUSALS_READ = 100
LOOK_SECONDS = 1.0
#: Evaluations, refusals and the merger's state are read again after this time, and so rarely that it takes at most this
#: share of the time.
SELDOM_SECONDS, SELDOM_SHARE = 5.0, 0.05
#: If the newest reading is older than this, the next one hangs, which is an outage. The connection itself waits longer.
PATIENCE_SECONDS = 5.0
SILENT, CONTINUES = (
    "Redis does not answer",
    "Look at its process and the way to it. The display and the run continue by themselves.",
)
TAPE_MOST = 1 << 16
EVENTS_READ = 200


def _uncopied(notes: Sequence[Note]) -> str:
    """Return why a merger does not copy its checkpoints to the bucket; empty if all do, each shard's for itself."""
    failing: list[str] = []
    for note in (note for note in notes if note.who == "merger"):
        if note.kind == UNCOPIED:
            failing.append(note.text)
        elif note.kind in (COPIED, "served"):  # a new merger says again what fails
            del failing[: 1 if note.kind == COPIED else None]
    return failing[-1] if failing else ""


def summarise(
    manifest: Manifest,
    tape: Sequence[TapeEntry],
    presences: Sequence[Presence],
    counters: Counters,
    evaluations: Sequence[Evaluation] = (),
    state: str = "",
    memory: Memory | None = None,
    unreachable: Mapping[int, str] | None = None,
    control: Mapping[str, str] | None = None,
) -> RunView:
    """Combine the readings into a view. Pure.

    Args:
        tape: The recent rounds, oldest first.
        unreachable: The shards that the readings leave out, each with the reason. Means are over the other fragments.
        control: The requests of operators.
    """
    away, layout, unit = unreachable or {}, manifest.shard_layout, loss_unit(manifest.corpus)
    fragments = layout.count_without(away)
    last = {layout.shard_of(entry.round): entry for entry in tape}  # of each shard
    figures = parsed_state(state)
    merged = merged_tokens(figures)
    took_part = Counter(name for entry in tape for name in {member.island for member in entry.members})
    member_of = {member.island: member for entry in tape for member in entry.members}  # the newest of each
    shares = {island: rounds / len(tape) for island, rounds in took_part.items()}
    settled = {island: tokens // fragments for island, tokens in merged.items()}
    islands = tuple(_island(each, shares, member_of, settled, unit) for each in presences)
    live = [island for island in islands if island.live]
    rounds = max((entry.round for entry in last.values()), default=0)
    step, wanted = max((entry.step for entry in last.values()), default=0), run_steps(manifest.config, control or {})
    shards = {shard: last.get(shard) for shard in range(layout.shards) if tape and shard not in away}
    made = count_in(figures.get("step"))  # in each shard: the recent tape may lack one, and the state may be older
    return RunView(
        manifest=manifest,
        run=manifest.run,
        parameters=manifest.parameters,
        fragments=layout.count,
        rounds=rounds,
        step=step,
        steps=max(step, wanted),  # it may have made more than it was steered to
        known=len(islands),
        live=len(live),
        participating=sum(island.participation > 0 for island in live),
        contributions_per_round=statistics.fmean([len(e.members) for e in tape]) if tape else 0.0,
        grace_seconds=statistics.fmean([e.grace_seconds for e in tape]) if tape else 0.0,
        open_seconds=statistics.fmean([e.open_seconds for e in tape]) if tape else 0.0,
        unit=unit.name,
        loss=unit.from_nats(mean([e.loss for e in tape[-fragments:]])),
        held_out_first=unit.from_evaluation(evaluations[0].bits_per_byte) if evaluations else math.nan,
        held_out_last=unit.from_evaluation(evaluations[-1].bits_per_byte) if evaluations else math.nan,
        frozen_parameters=manifest.frozen_parameters,
        counters=counters,
        pending=counters.pending,
        memory_bytes=memory.used if memory else 0,
        memory_limit_bytes=memory.limit if memory else 0,
        shards=layout.fragments if manifest.shards > 1 else (),
        ended=tuple(k for k, each in shards.items() if max(made, each.step if each else 0) >= wanted),
        rounds_behind=sum(layout.rounds[k].between((each or tape[0]).round, rounds) for k, each in shards.items()),
        unreachable=away,
        islands=islands,
        control=Control.of(control or {}),
        refused_by_code=summed([figures.get("refused")]),
        covered=count_in(figures.get("covered")),
        tape=tape,
        evaluations=evaluations,
        **_token_accounts(presences, merged, count_in(figures.get("tokens")), counters, fragments),
    )


def _island(
    presence: Presence,
    shares: Mapping[str, float],
    member_of: Mapping[str, RoundMember],
    settled: Mapping[str, int],
    unit: LossUnit,
) -> IslandView:
    beat = presence.heartbeat
    newest = member_of.get(beat.island)
    return IslandView(
        **vars(beat) | {"loss": unit.from_nats(beat.loss)},
        name=beat.island,
        live=presence.is_live,
        last_seen_seconds=presence.age_seconds,
        participation=shares.get(beat.island, 0.0),
        score=newest.score if newest else math.nan,
        factor=newest.factor if newest else math.nan,
        tokens_merged=settled.get(beat.island, 0),
    )


def _token_accounts(
    presences: Sequence[Presence],
    merged: Mapping[str, int],
    known_tokens: int,
    counters: Counters,
    fragments: int,
) -> dict[str, Any]:
    """Return where the run's tokens are: trained = merged + refused + pending + unsent + lost.

    docs/guide/watch.md says what each account holds. A token counts once, although each fragment is synchronised on
    its own: every account is the mean over the fragments. `merged` are each island's merged tokens in all fragments, as
    far as they are remembered, of the time when `known_tokens` were merged in all of them. All are rounded down but the
    merged tokens, so that none counts as lost by rounding.
    """
    unsent = sum(presence.heartbeat.tokens_unsent for presence in presences if presence.is_live)
    beats = [presence.heartbeat for presence in presences]
    unmerged = sum(max(0, fragments * beat.tokens - merged.get(beat.island, 0)) for beat in beats)
    newer = max(0, counters.merged_tokens - known_tokens)
    settled = counters.merged_tokens + counters.refused_tokens + counters.pending_tokens
    rest = max(0, unmerged - newer - counters.refused_tokens - counters.pending_tokens)
    trained, lost = (settled + rest) // fragments, max(0, rest // fragments - unsent)
    refused, waiting = counters.refused_tokens // fragments, counters.pending_tokens // fragments
    unsent = min(unsent, rest // fragments)
    return {
        "tokens_merged": trained - refused - waiting - unsent - lost,
        "tokens_refused": refused,
        "tokens_pending": waiting,
        "tokens_unsent": unsent,
        "tokens_lost": lost,
        "tokens_trained": trained,
    }


# -- again and again ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunReading:
    """A run at one moment: what is wrong now, the worst first, and its notes and refusals, oldest first."""

    view: RunView
    unix_seconds: float
    problems: Sequence[Problem] = ()
    events: Sequence[Event] = ()

    @property
    def state(self) -> str:
        """The state of the run in one or two words."""
        return state_of(self.view, self.problems)


class Watcher:
    """A reader that reads one run repeatedly. Only the thread that calls `update` uses the transport.

    Args:
        rounds: The most rounds that are read for the history, at the beginning and after a gap.
        address: How commands name the run's Redis here.
        folder: The run's folder on this machine, which outlives its Redis; None if it has none.
        clock: Monotonic seconds.
        wall: Unix seconds.

    Attributes:
        history: The rounds of the run, as far as they were read.
        latest: The last successful reading; None before the first.
    """

    def __init__(
        self,
        transport: ReaderTransport,
        rounds: int = TAPE_MOST,
        address: str = "URL",
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        folder: Path | None = None,
    ) -> None:
        self.clock, self.wall = clock, wall
        self.latest: RunReading | None = None
        self._primary, self._rounds, self._address = transport, rounds, address
        self._folder = shlex.quote(str(folder)) if folder else ""
        self._up = up_command(folder, transport.run) if folder and address == "URL" else ""
        self._outage: ArchipelagoError | None = None
        self._ahead = 0.0
        self.manifest, self.transport = opened(transport, for_display=True)
        self.history = History(self.manifest.shard_layout)
        #: The shards that the history lacks.
        self._lacks: frozenset[int] = frozenset()
        self._evaluations: Sequence[Evaluation] = ()
        self._refusals: Sequence[tuple[float, Refusal]] = ()
        self._state = ""
        self._seldom_due = -math.inf

    def update(self) -> bool:
        """Read the run once. Return False if the broker did not answer, or sent what cannot be decoded."""
        try:
            self.latest = self.read()
        except ArchipelagoError as error:
            self._seldom_due = -math.inf  # After an outage everything is read again.
            self._outage = UnreachableError(error.what, CONTINUES) if isinstance(error, UnreachableError) else error
        else:
            self._outage = None
        return self._outage is None

    def outage(self) -> ArchipelagoError | None:
        """Return why there is no new reading, if there is none. A reading that hangs is an outage."""
        last = self.latest
        if self._outage is None and last and self.now() - last.unix_seconds > PATIENCE_SECONDS:
            return UnreachableError(SILENT, CONTINUES)
        return self._outage

    def now(self) -> float:
        """Return Unix seconds of the broker's clock, as far as it is known."""
        return self.wall() + self._ahead

    def read(self) -> RunReading:
        """Return the run as Redis has it now. Raise BrokerError and WireError."""
        tape, reader = self._follow(), self.transport.reader
        began = self.clock()
        if began >= self._seldom_due:  # It may take long, so it is done rarely.
            self._evaluations, self._state = reader.evaluations(), reader.merger_state()
            self._refusals = [(at, each) for at, each in reader.refusals(REFUSALS_READ) if not each.repeat]
            self._seldom_due = began + max(SELDOM_SECONDS, (self.clock() - began) / SELDOM_SHARE)
        notes, status = reader.notes(EVENTS_READ), reader.merger_status()
        view = summarise(
            self.manifest, tape[-RECENT_ROUNDS:], reader.presences(), reader.counters(), self._evaluations, self._state,
            reader.memory(), shards_away(self.transport), reader.control(),
        )  # fmt: skip
        view = replace(
            view,
            merger=status,
            refuses_writes=reader.refuses_writes(),
            refused="" if status.holders else refusal(reader, notes=notes),
            unsaved=refusal(reader, UNSAVED, ("served", "checkpoint"), notes),
            uncopied=_uncopied(notes),
            standbys=tuple(reader.standbys()),
            refusals=tuple(self._refusals),
            unreadable=tuple(reader.unreadable()),
            address=self._address,
            folder=self._folder,
            up=self._up,
        )
        self._ahead = reader.clock_ahead()
        now = self.now()
        return RunReading(
            view=view,
            unix_seconds=now,
            problems=problems(view, now),
            events=events_of(notes, view.refusals),
        )

    def _follow(self) -> Sequence[TapeEntry]:
        """Add the recent tape to the history, and return it. If they do not connect, the whole tape is read.

        The history begins anew at first, when a shard answers that could not be reached when it began, after a return
        to a checkpoint, and for a new run of the same name.
        """
        tape, may_follow = self.transport.reader.tape(RECENT_ROUNDS), self._lacks <= shards_away(self.transport).keys()
        if not (may_follow and self.history.follows(tape)):
            tape = self.transport.reader.tape(self._rounds)
        if tape and may_follow and self.history.follows(tape):
            self.history.extend(tape)
            return tape
        found = self._primary.reader.manifest()
        if found != self.manifest:
            self.manifest, self.transport = found, whole(self._primary, found, for_display=True)
            tape = self.transport.reader.tape(self._rounds)
        merged = self.transport.reader.counters().merged_tokens
        self._lacks = frozenset(shards_away(self.transport))
        self.history = History(self.manifest.shard_layout, self._lacks)
        self.history.begin(merged, tape)
        self._seldom_due = -math.inf
        return tape


@contextlib.contextmanager
def repeated(update: Callable[[], object], every_seconds: float) -> Iterator[None]:
    """Call `update` on a daemon thread while the block runs. A reading that hangs does not delay the end."""
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            update()
            ended.wait(every_seconds)

    threading.Thread(target=work, name="watch", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
