"""One reading of a run from Redis, as plain data for a table, a page or a program."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from archipelago.broker.control import run_steps
from archipelago.broker.manifest import LossUnit, Manifest, loss_unit
from archipelago.broker.messages import Books, Evaluation, Member, Pending, TapeEntry
from archipelago.broker.presence import Presence
from archipelago.broker.shards.transport import shards_away
from archipelago.broker.transport import Memory, ReaderTransport
from archipelago.ops.watch.token_accounts import token_accounts

RECENT_ROUNDS = 48
#: A round that closes during a reading makes its accounts inconsistent, so we read again, at most this often.
BALANCE_TRIES = 5


@dataclass(frozen=True)
class IslandView:
    """One island.

    Attributes:
        staleness: Versions that it is behind, mean over the fragments.
        participation: Share of the recent rounds that merged it.
        loss: Its training loss, in the run's unit.
        score: How well its newest merged contribution's island agrees with the others; 1 is usual, 0 unrelated.
        factor: The factor on the weight of its newest merged contribution; below 1 it was lowered.
        merged_staleness: Mean staleness of its recent contributions when they were merged; NaN if there were none.
        tokens_merged: The merged part of its tokens, mean over the fragments.
        data: The shards that it reads, and its progress in them.
        moments: Where its inner optimiser state came from.
        uplink_bytes_per_second: The speed that its link has shown lately; NaN if it is not known.
        downlink_bytes_per_second: The same in the other direction.
        machine: Operating system, processor, cores and memory of its host, in words.
        memory_bytes: Resident memory of its process; 0 if it is not known, as in the fields that follow.
        host_memory_bytes: Memory in use on its host, by all processes.
        host_memory_limit_bytes: The memory of its host.
        device_memory_bytes: Memory in use on its devices, by this process.
        device_memory_limit_bytes: The memory of its devices that the process may use.
    """

    name: str
    state: str
    live: bool
    last_seen_seconds: float
    host: str
    device: str
    steps: int
    tokens: int
    tokens_per_second: float
    step_seconds: float
    loss: float
    staleness: float
    participation: float
    score: float
    factor: float
    merged_staleness: float
    tokens_merged: int
    data: str
    moments: str
    backlog: int
    sent: int
    refused: int
    last_refusal: str
    bytes_up: int
    bytes_down: int
    uplink_bytes_per_second: float
    downlink_bytes_per_second: float
    link: str
    machine: str = ""
    memory_bytes: int = 0
    host_memory_bytes: int = 0
    host_memory_limit_bytes: int = 0
    device_memory_bytes: int = 0
    device_memory_limit_bytes: int = 0

    @property
    def is_silent(self) -> bool:
        """Whether it sends no heartbeats, and did not say that it leaves."""
        return not self.live and self.state not in ("left", "done")


@dataclass(frozen=True)
class RunView:
    """One run.

    Attributes:
        known: Islands seen in the last day.
        live: Islands that sent a heartbeat lately and have not left.
        participating: Live islands that recent rounds have merged.
        unit: The unit of all losses, such as `bits per byte`.
        loss: The training loss.
        held_out_first: The loss on held-out text at the first evaluation.
        held_out_last: The same at the newest evaluation.
        tokens_merged: These and the following are the run's accounts of tokens (`token_accounts`).
        tokens_trained: The sum of all accounts.
        evaluated_round: The round of the parameters behind `held_out_last`; 0 before the first.
        evaluated_unix_seconds: When they were evaluated, by the clock of the island that evaluated; 0 before the first.
        evaluated_by: The island that did; empty if `up` measured the end of the run.
        frozen_parameters: The parameters of the model that the run does not train.
        task: The name of the users' task that it trains; empty for other runs.
        passes: Mean number of times that a shard of the run's corpus was read, counting merged work only. It is NaN if
            the islands are training scripts of their users.
        shards: The fragments of each shard, in a run with several.
        unreachable: The shards that cannot be reached, each with the reason. The figures are those of the others.
        balanced: Whether published = merged + refused + pending, in contributions and in tokens.
        memory_limit_bytes: Redis's maxmemory; 0 if it has none.
        unreadable: Records in Redis that this reader could not read and skipped, by name.
    """

    run: str
    parameters: int
    fragments: int
    rounds: int
    step: int
    steps: int
    known: int
    live: int
    participating: int
    contributions_per_round: float
    grace_seconds: float
    open_seconds: float
    unit: str
    loss: float
    held_out_first: float
    held_out_last: float
    tokens_merged: int
    tokens_refused: int
    tokens_pending: int
    tokens_unsent: int
    tokens_lowered: int
    tokens_lost: int
    tokens_trained: int
    passes: float
    books: Books
    pending: int
    pending_tokens: int
    balanced: bool
    memory_bytes: int
    memory_limit_bytes: int
    bytes_up: int
    bytes_down: int
    islands: tuple[IslandView, ...]
    unreadable: tuple[str, ...] = ()
    evaluated_round: int = 0
    evaluated_unix_seconds: float = 0.0
    evaluated_by: str = ""
    frozen_parameters: int = 0
    task: str = ""
    shards: tuple[tuple[int, ...], ...] = ()
    unreachable: Mapping[int, str] = field(default_factory=dict, hash=False)

    @property
    def size(self) -> str:
        """The run's task, parameters and fragments in words."""
        frozen = f" ({self.frozen_parameters:,} more are frozen)" if self.frozen_parameters else ""
        shards = f" and {len(self.shards)} shards" if self.shards else ""
        task = f"task {self.task}, " if self.task else ""
        return f"{task}{self.parameters:,} parameters{frozen} in {self.fragments} fragments{shards}"

    @property
    def has_scripts(self) -> bool:
        """Whether the islands are training scripts of their users, whose model only they can evaluate."""
        return math.isnan(self.passes) and not self.task

    @property
    def live_names(self) -> frozenset[str]:
        """The names of the live islands."""
        return frozenset(island.name for island in self.islands if island.live)

    @property
    def unreadable_records(self) -> int:
        """The number of records that could not be read."""
        return len(self.unreadable)


def observe(transport: ReaderTransport, manifest: Manifest) -> RunView:
    """Return the run as Redis has it now. Raise BrokerError."""
    for _ in range(BALANCE_TRIES - 1):
        view = _observe(transport, manifest)
        if view.balanced:
            return view
    return _observe(transport, manifest)


def _observe(transport: ReaderTransport, manifest: Manifest) -> RunView:
    reader = transport.reader
    view = summarise(
        manifest, reader.tape(RECENT_ROUNDS), reader.presences(), reader.books(), reader.pending(),
        reader.evaluations(), merged_by_island(state := reader.merger_state()), reader.cursors(), reader.memory(),
        lowered_in(state), shards_away(transport),
    )  # fmt: skip
    steps = run_steps(manifest.config, reader.control())
    return replace(view, steps=steps, unreadable=tuple(reader.unreadable()))


def glance(
    transport: ReaderTransport, manifest: Manifest, tape: Sequence[TapeEntry], evaluations: Sequence[Evaluation]
) -> RunView:
    """Return the run cheaply, for a reading every second. Raise BrokerError.

    Pending contributions are counted without reading the stream. Pending tokens are derived from the accounts, so
    `balanced` covers contributions only.

    Args:
        tape: The recent rounds, read already.
        evaluations: All evaluations, read already.
    """
    books, waiting = transport.reader.books(), transport.reader.backlog()
    for _ in range(BALANCE_TRIES - 1):
        if books.published == books.merged + books.refused + waiting:
            break
        books, waiting = transport.reader.books(), transport.reader.backlog()
    left_over = max(0, books.published_tokens - books.merged_tokens - books.refused_tokens)
    view = summarise(
        manifest, tape[-RECENT_ROUNDS:], transport.reader.presences(), books, Pending(waiting, left_over), evaluations,
        merged_by_island(state := transport.reader.merger_state()), transport.reader.cursors(),
        transport.reader.memory(), lowered_in(state), shards_away(transport),
    )  # fmt: skip
    steps = run_steps(manifest.config, transport.reader.control())
    return replace(view, steps=steps, unreadable=tuple(transport.reader.unreadable()))


def merged_by_island(state: str) -> dict[str, int]:
    """Return the merged tokens of each island, summed over the fragments, from the merger's state."""
    try:
        found = json.loads(state or "{}").get("island_tokens", {})
        return {str(island): int(tokens) for island, tokens in found.items()}
    except (ValueError, AttributeError, TypeError, RecursionError):
        return {}


def lowered_in(state: str) -> int:
    """Return the tokens that merged contributions claim and that are not counted, summed over the fragments."""
    try:
        return max(0, int(json.loads(state or "{}").get("lowered_tokens", 0)))
    except (ValueError, AttributeError, TypeError, RecursionError, OverflowError):
        return 0


def summarise(
    manifest: Manifest,
    tape: Sequence[TapeEntry],
    presences: Sequence[Presence],
    books: Books,
    pending: Pending,
    evaluations: Sequence[Evaluation],
    merged: Mapping[str, int],
    cursors: Mapping[str, tuple[int, int]],
    memory: Memory,
    lowered: int = 0,
    unreachable: Mapping[int, str] | None = None,
) -> RunView:
    """Combine the readings into a view. Pure.

    Args:
        tape: The recent rounds, oldest first.
        unreachable: The shards that the readings leave out, each with the reason. Means are over the other fragments.
    """
    away, layout, unit = unreachable or {}, manifest.shard_layout, loss_unit(manifest.corpus)
    fragments = layout.count - sum(len(layout.fragments[shard]) for shard in away)
    parts = parts_by_island(tape)
    last = {layout.shard_of(entry.round): entry for entry in tape}.values()  # of each shard
    islands = tuple(
        _island(each, parts.get(each.heartbeat.island, []), len(tape), merged, fragments, unit) for each in presences
    )
    live = [island for island in islands if island.live]
    shards = manifest.config.data.shards
    tokens = token_accounts(presences, merged, books, pending, fragments, lowered)
    return RunView(
        run=manifest.run,
        parameters=manifest.parameters,
        fragments=layout.count,
        rounds=max((entry.round for entry in last), default=0),
        step=max((entry.step for entry in last), default=0),
        steps=manifest.config.inner.steps,
        known=len(islands),
        live=len(live),
        participating=sum(island.participation > 0 for island in live),
        contributions_per_round=statistics.fmean([len(e.members) for e in tape]) if tape else 0.0,
        grace_seconds=statistics.fmean([e.grace_seconds for e in tape]) if tape else 0.0,
        open_seconds=statistics.fmean([e.open_seconds for e in tape]) if tape else 0.0,
        unit=unit.name,
        loss=unit.from_nats(_mean([e.loss for e in tape[-fragments:]])),
        held_out_first=unit.from_evaluation(evaluations[0].bits_per_byte) if evaluations else math.nan,
        held_out_last=unit.from_evaluation(evaluations[-1].bits_per_byte) if evaluations else math.nan,
        evaluated_round=evaluations[-1].round if evaluations else 0,
        evaluated_unix_seconds=evaluations[-1].unix_seconds if evaluations else 0.0,
        evaluated_by=evaluations[-1].by if evaluations else "",
        frozen_parameters=manifest.frozen_parameters,
        task=manifest.task,
        tokens_merged=tokens.merged,
        tokens_refused=tokens.refused,
        tokens_pending=tokens.pending,
        tokens_unsent=tokens.unsent,
        tokens_lowered=tokens.lowered,
        tokens_lost=tokens.lost,
        tokens_trained=tokens.trained,
        passes=math.nan
        if manifest.config.has_own_loops
        else sum(number for shard, (number, _) in cursors.items() if "/" not in shard) / shards,
        books=books,
        pending=pending.contributions,
        pending_tokens=pending.tokens,
        balanced=_balanced(books, pending),
        memory_bytes=memory.used,
        memory_limit_bytes=memory.limit,
        shards=layout.fragments if manifest.shards > 1 else (),
        unreachable=away,
        bytes_up=books.bytes_up,
        bytes_down=books.bytes_down,
        islands=islands,
    )


def _balanced(books: Books, pending: Pending) -> bool:
    contributions = books.merged + books.refused + pending.contributions
    tokens = books.merged_tokens + books.refused_tokens + pending.tokens
    return (books.published, books.published_tokens) == (contributions, tokens)


def parts_by_island(tape: Iterable[TapeEntry]) -> dict[str, list[tuple[int, Member]]]:
    """Return each island's members of the rounds, oldest first, with the place of the round. Reads each member once."""
    parts: dict[str, list[tuple[int, Member]]] = {}
    for place, entry in enumerate(tape):
        for member in entry.members:
            parts.setdefault(member.island, []).append((place, member))
    return parts


def _island(
    presence: Presence,
    parts: Sequence[tuple[int, Member]],
    rounds: int,
    merged: Mapping[str, int],
    fragments: int,
    unit: LossUnit,
) -> IslandView:
    beat = presence.heartbeat
    mine = [member for _, member in parts]
    return IslandView(
        name=beat.island,
        state=beat.state,
        live=presence.is_live,
        last_seen_seconds=presence.age_seconds,
        host=beat.host,
        device=beat.device,
        steps=beat.steps,
        tokens=beat.tokens,
        tokens_per_second=beat.tokens_per_second,
        step_seconds=beat.step_seconds,
        loss=unit.from_nats(beat.loss),
        staleness=beat.staleness,
        participation=len({place for place, _ in parts}) / rounds if rounds else 0.0,
        score=mine[-1].score if mine else math.nan,
        factor=mine[-1].factor if mine else math.nan,
        merged_staleness=_mean([float(member.staleness) for member in mine]),
        tokens_merged=merged.get(beat.island, 0) // fragments,
        data=beat.data,
        moments=beat.moments,
        backlog=beat.backlog,
        sent=beat.sent,
        refused=beat.refused,
        last_refusal=beat.last_refusal,
        bytes_up=beat.bytes_up,
        bytes_down=beat.bytes_down,
        uplink_bytes_per_second=beat.uplink_bytes_per_second,
        downlink_bytes_per_second=beat.downlink_bytes_per_second,
        link=beat.link,
        machine=beat.machine,
        memory_bytes=beat.memory_bytes,
        host_memory_bytes=beat.host_memory_bytes,
        host_memory_limit_bytes=beat.host_memory_limit_bytes,
        device_memory_bytes=beat.device_memory_bytes,
        device_memory_limit_bytes=beat.device_memory_limit_bytes,
    )


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return statistics.fmean(known) if known else math.nan
