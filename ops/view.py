"""What a run looks like from outside: one reading of Redis, as plain data for a table, a page or a program."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from broker.manifest import Manifest
from broker.messages import Books, Evaluation, Presence, TapeEntry
from broker.transport import Transport

RECENT_ROUNDS = 48


@dataclass(frozen=True)
class IslandView:
    """One island. `participation` is the share of the recent rounds that it was merged into."""

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
    """versions that it lags behind, mean over the fragments"""
    participation: float
    merged_staleness: float
    """mean staleness of its recent contributions when they were merged; NaN where there were none"""
    backlog: int
    sent: int
    refused: int
    last_refusal: str
    bytes_up: int
    bytes_down: int
    link: str


@dataclass(frozen=True)
class RunView:
    """One run. `known`, `live` and `participating` are three numbers, since each can be right while another is not."""

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
    loss: float
    bits_per_byte_first: float
    bits_per_byte_last: float
    tokens_merged: int
    tokens_trained: int
    books: Books
    pending: int
    bytes_up: int
    bytes_down: int
    islands: tuple[IslandView, ...]


def observe(transport: Transport, manifest: Manifest) -> RunView:
    """The run as Redis has it now. Raises BrokerError."""
    return summarise(
        manifest, transport.tape(RECENT_ROUNDS), transport.presences(), transport.books(), transport.backlog(),
        transport.evaluations(),
    )  # fmt: skip


def summarise(
    manifest: Manifest,
    tape: Sequence[TapeEntry],
    presences: Sequence[Presence],
    books: Books,
    pending: int,
    evaluations: Sequence[Evaluation],
) -> RunView:
    """Pure: what was read, put together. `tape` holds the recent rounds, oldest first."""
    islands = tuple(_island(presence, tape) for presence in presences)
    live = [island for island in islands if island.live]
    fragments = len(manifest.fragments)
    return RunView(
        run=manifest.run,
        parameters=manifest.parameters,
        fragments=fragments,
        rounds=tape[-1].round if tape else 0,
        step=tape[-1].step if tape else 0,
        steps=manifest.config.inner.steps,
        known=len(islands),
        live=len(live),
        participating=sum(island.participation > 0 for island in live),
        contributions_per_round=statistics.fmean([len(e.members) for e in tape]) if tape else 0.0,
        grace_seconds=statistics.fmean([e.grace_seconds for e in tape]) if tape else 0.0,
        open_seconds=statistics.fmean([e.open_seconds for e in tape]) if tape else 0.0,
        loss=_mean([e.loss for e in tape[-fragments:]]),
        bits_per_byte_first=evaluations[0].bits_per_byte if evaluations else math.nan,
        bits_per_byte_last=evaluations[-1].bits_per_byte if evaluations else math.nan,
        tokens_merged=books.merged_tokens // fragments,
        tokens_trained=sum(island.tokens for island in islands),
        books=books,
        pending=pending,
        bytes_up=books.bytes_up,
        bytes_down=books.bytes_down,
        islands=islands,
    )


def _island(presence: Presence, tape: Sequence[TapeEntry]) -> IslandView:
    beat = presence.heartbeat
    mine = [member for entry in tape for member in entry.members if member.island == beat.island]
    rounds = sum(any(member.island == beat.island for member in entry.members) for entry in tape)
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
        loss=beat.loss,
        staleness=beat.staleness,
        participation=rounds / len(tape) if tape else 0.0,
        merged_staleness=_mean([float(member.staleness) for member in mine]),
        backlog=beat.backlog,
        sent=beat.sent,
        refused=beat.refused,
        last_refusal=beat.last_refusal,
        bytes_up=beat.bytes_up,
        bytes_down=beat.bytes_down,
        link=beat.link,
    )


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return statistics.fmean(known) if known else math.nan
