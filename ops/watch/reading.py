"""Read a run from Redis into a view. `observe` reads it, and `summarise` combines what was read."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from archipelago.broker.control import Control, run_steps
from archipelago.broker.manifest import LossUnit, Manifest, loss_unit
from archipelago.broker.messages import UNSAVED, Counters, Evaluation, Note, Pending, Refusal, RoundMember, TapeEntry
from archipelago.broker.presence import Presence
from archipelago.broker.shards.reader import merged_tokens
from archipelago.broker.shards.transport import shards_away
from archipelago.broker.transport import NOTES_READ, Memory, MergerStatus, ReaderClient, ReaderTransport, refusal
from archipelago.ops.watch.run_view import IslandView, RunView

RECENT_ROUNDS = 48
#: A round that closes during a reading makes its accounts inconsistent, so we read again, at most this often.
BALANCE_TRIES = 5
REFUSALS_READ = 100


def observe(
    transport: ReaderTransport,
    manifest: Manifest,
    tape: Sequence[TapeEntry] | None = None,
    evaluations: Sequence[Evaluation] | None = None,
    refusals: Sequence[tuple[float, Refusal]] | None = None,
    notes: Sequence[Note] | None = None,
    *,
    briefly: bool = False,
) -> RunView:
    """Return the run as Redis has it now, on a connection to all its shards. Raise BrokerError.

    Recent rounds, evaluations, refusals and notes are given if they were read already, or are not needed. `briefly` is
    for a reading every second: pending contributions are counted without reading the stream, and their tokens are
    derived from the accounts, so `balanced` covers contributions only.
    """
    reader = transport.reader
    counters, pending = _accounts(reader, briefly)
    tries = BALANCE_TRIES
    while not _balanced(counters, pending) and (tries := tries - 1):
        counters, pending = _accounts(reader, briefly)
    view = summarise(
        manifest, (reader.tape(RECENT_ROUNDS) if tape is None else tape)[-RECENT_ROUNDS:], reader.presences(), counters,
        pending, reader.evaluations() if evaluations is None else evaluations, reader.merger_state(), reader.cursors(),
        reader.memory(), shards_away(transport), reader.control(),
    )  # fmt: skip
    status, notes = reader.merger_status() or MergerStatus(), reader.notes(NOTES_READ) if notes is None else notes
    return replace(
        view,
        merger=status,
        refused="" if status.holders else refusal(reader, notes=notes),
        unsaved=refusal(reader, UNSAVED, ("served", "checkpoint"), notes),
        standbys=tuple(reader.standbys()),
        refusals=tuple(refusals_of(reader) if refusals is None else refusals),
        unreadable=tuple(reader.unreadable()),
    )


def refusals_of(reader: ReaderClient) -> list[tuple[float, Refusal]]:
    """Return the recent refusals, oldest first, each with its Unix seconds. It reads many entries of a stream."""
    return [(at, refusal) for at, refusal in reader.refusals(REFUSALS_READ) if not refusal.repeat]


def _accounts(reader: ReaderClient, briefly: bool) -> tuple[Counters, Pending]:
    counters = reader.counters()
    if not briefly:
        return counters, reader.pending()
    left = max(0, counters.published_tokens - counters.merged_tokens - counters.refused_tokens)
    return counters, Pending(reader.backlog(), left)


def summarise(
    manifest: Manifest,
    tape: Sequence[TapeEntry],
    presences: Sequence[Presence],
    counters: Counters,
    pending: Pending,
    evaluations: Sequence[Evaluation] = (),
    state: str = "",
    cursors: Mapping[str, tuple[int, int]] | None = None,
    memory: Memory | None = None,
    unreachable: Mapping[int, str] | None = None,
    control: Mapping[str, str] | None = None,
) -> RunView:
    """Combine the readings into a view. Pure.

    Args:
        tape: The recent rounds, oldest first.
        state: The merger's state.
        unreachable: The shards that the readings leave out, each with the reason. Means are over the other fragments.
        control: The requests of operators.
    """
    away, layout, unit = unreachable or {}, manifest.shard_layout, loss_unit(manifest.corpus)
    fragments = layout.count - sum(len(layout.fragments[shard]) for shard in away)
    parts = parts_by_island(tape)
    last = {layout.shard_of(entry.round): entry for entry in tape}.values()  # of each shard
    figures = _figures(state)
    merged = merged_tokens(figures)
    islands = tuple(
        _island(each, parts.get(each.heartbeat.island, []), len(tape), merged, fragments, unit) for each in presences
    )
    live = [island for island in islands if island.live]
    newest = evaluations[-1] if evaluations else None
    read = sum(number for number, _ in (cursors or {}).values())
    step = max((entry.step for entry in last), default=0)
    return RunView(
        manifest=manifest,
        run=manifest.run,
        parameters=manifest.parameters,
        fragments=layout.count,
        rounds=max((entry.round for entry in last), default=0),
        step=step,
        steps=max(
            step, run_steps(manifest.config, control or {})
        ),  # it may have been steered to fewer than it has made
        known=len(islands),
        live=len(live),
        participating=sum(island.participation > 0 for island in live),
        contributions_per_round=statistics.fmean([len(e.members) for e in tape]) if tape else 0.0,
        grace_seconds=statistics.fmean([e.grace_seconds for e in tape]) if tape else 0.0,
        open_seconds=statistics.fmean([e.open_seconds for e in tape]) if tape else 0.0,
        unit=unit.name,
        loss=unit.from_nats(mean([e.loss for e in tape[-fragments:]])),
        held_out_first=unit.from_evaluation(evaluations[0].bits_per_byte) if evaluations else math.nan,
        held_out_last=unit.from_evaluation(newest.bits_per_byte) if newest else math.nan,
        evaluated_round=newest.round if newest else 0,
        evaluated_unix_seconds=newest.unix_seconds if newest else 0.0,
        evaluated_by=newest.by if newest else "",
        frozen_parameters=manifest.frozen_parameters,
        task=manifest.task,
        passes=math.nan if manifest.config.has_user_loops else read / manifest.config.data.shards,
        counters=counters,
        pending=pending.contributions,
        pending_tokens=pending.tokens,
        balanced=_balanced(counters, pending),
        memory_bytes=memory.used if memory else 0,
        memory_limit_bytes=memory.limit if memory else 0,
        shards=layout.fragments if manifest.shards > 1 else (),
        unreachable=away,
        bytes_up=counters.bytes_up,
        bytes_down=counters.bytes_down,
        islands=islands,
        interval=manifest.config.sync.interval,
        control=Control.of(control or {}),
        refused_by_code=_counts(figures, "refused"),
        covered=covered if isinstance(covered := figures.get("covered"), int) else 0,
        tape=tape,
        evaluations=evaluations,
        **_token_accounts(presences, merged, counters, pending, fragments),
    )


def _figures(state: str) -> Mapping[str, Any]:
    """Return what the merger's state says; nothing if it cannot be read."""
    try:
        found = json.loads(state or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _counts(figures: Mapping[str, Any], name: str) -> dict[str, int]:
    found = figures.get(name)
    return {key: count for key, count in found.items() if isinstance(count, int)} if isinstance(found, dict) else {}


def _balanced(counters: Counters, pending: Pending) -> bool:
    contributions = counters.merged + counters.refused + pending.contributions
    tokens = counters.merged_tokens + counters.refused_tokens + pending.tokens
    return (counters.published, counters.published_tokens) == (contributions, tokens)


def parts_by_island(tape: Iterable[TapeEntry]) -> dict[str, list[tuple[int, RoundMember]]]:
    """Return each island's members of the rounds, oldest first, with the place of the round. Reads each member once."""
    parts: dict[str, list[tuple[int, RoundMember]]] = {}
    for place, entry in enumerate(tape):
        for member in entry.members:
            parts.setdefault(member.island, []).append((place, member))
    return parts


def _island(
    presence: Presence,
    parts: Sequence[tuple[int, RoundMember]],
    rounds: int,
    merged: Mapping[str, int],
    fragments: int,
    unit: LossUnit,
) -> IslandView:
    beat = presence.heartbeat
    mine = [member for _, member in parts]
    return IslandView(
        **vars(beat) | {"loss": unit.from_nats(beat.loss)},
        name=beat.island,
        live=presence.is_live,
        last_seen_seconds=presence.age_seconds,
        participation=len({place for place, _ in parts}) / rounds if rounds else 0.0,
        score=mine[-1].score if mine else math.nan,
        factor=mine[-1].factor if mine else math.nan,
        tokens_merged=merged.get(beat.island, 0) // fragments,
    )


def _token_accounts(
    presences: Iterable[Presence],
    merged: Mapping[str, int],
    counters: Counters,
    pending: Pending,
    fragments: int,
) -> dict[str, Any]:
    """Return where the run's tokens are: trained = merged + refused + pending + unsent + lost.

    docs/guide/watch.md says what each account holds. A token counts once, although each fragment is synchronised on
    its own: every account is the mean over the fragments. `merged` are the tokens of each island, summed over the
    fragments; it also has islands of long ago, which have trained their merged tokens.
    """
    of_island = {island: tokens // fragments for island, tokens in merged.items()}
    unsent = 0
    for presence in presences:
        beat = presence.heartbeat
        of_island[beat.island] = max(beat.tokens, of_island.get(beat.island, 0))
        unsent += beat.tokens_unsent if presence.is_live else 0
    settled, refused, waiting = (
        tokens // fragments for tokens in (counters.merged_tokens, counters.refused_tokens, pending.tokens)
    )
    rest = max(0, sum(of_island.values()) - settled - refused - waiting)
    unsent = min(unsent, rest)
    return {
        "tokens_merged": settled,
        "tokens_refused": refused,
        "tokens_pending": waiting,
        "tokens_unsent": unsent,
        "tokens_lost": rest - unsent,
        "tokens_trained": settled + refused + waiting + rest,
    }


def mean(values: Iterable[float]) -> float:
    """Return the mean of the values that are not NaN, or NaN if there are none."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.fmean(known) if known else math.nan
