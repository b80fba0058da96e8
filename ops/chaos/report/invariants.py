"""The invariants of the design that can be checked from outside, once a run is drained. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from archipelago.ops.chaos.report.record import Identity, StormRecord


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        key: A stable name, for programs.
        name: What must hold, for people.
        holds: Whether it holds.
        found: The observed values, for people.
    """

    key: str
    name: str
    holds: bool
    found: str


def checks(storm: StormRecord) -> list[Check]:
    """Check all invariants."""
    return [check(storm) for check in _CHECKS]


def _books_balance(storm: StormRecord) -> Check:
    books, pending = storm.books, storm.pending
    return Check(
        "books", "the books balance: published = merged + refused + pending",
        books.published == books.merged + books.refused + pending.contributions,
        f"{books.published:,} = {books.merged:,} + {books.refused:,} + {pending.contributions:,}",
    )  # fmt: skip


def _tokens_balance(storm: StormRecord) -> Check:
    books, pending = storm.books, storm.pending
    return Check(
        "tokens", "the books balance in tokens",
        books.published_tokens == books.merged_tokens + books.refused_tokens + pending.tokens,
        f"{books.published_tokens:,} = {books.merged_tokens:,} + {books.refused_tokens:,} + {pending.tokens:,}",
    )  # fmt: skip


def _nothing_waits(storm: StormRecord) -> Check:
    waiting = storm.pending.contributions
    return Check("drained", "no contribution waits after all islands have left", waiting == 0, f"{waiting:,} wait")


def _merged_once(storm: StormRecord) -> Check:
    merged = _merged(storm)
    twice = [identity for identity, count in merged.items() if count > 1]
    name = "no contribution is merged twice: the identities on the tape are unique"
    return Check("merged-once", name, not twice, _examples(twice, len(merged)))


def _tape_and_books_agree(storm: StormRecord) -> Check:
    count, tokens = _merged(storm).total(), sum(m.tokens for entry in storm.tape for m in entry.members)
    return Check(
        "tape", "the tape and the books agree",
        (storm.books.merged, storm.books.merged_tokens) == (count, tokens),
        f"{count:,} contributions of {tokens:,} tokens on the tape",
    )  # fmt: skip


def _not_merged_and_refused(storm: StormRecord) -> Check:
    both = sorted(storm.refused & _merged(storm).keys())
    return Check("refused", "no contribution is both merged and refused", not both, _examples(both, len(storm.refused)))


def _steps_merged_once(storm: StormRecord) -> Check:
    """An incarnation cannot have more merged steps of a fragment than its turn log has steps."""
    made = {(i, turn.who): turn.steps for i, turns in storm.turns.items() for turn in turns}
    merged: Counter[tuple[str, str, int]] = Counter()
    for entry in storm.tape:
        for m in entry.members:
            merged[m.island, m.incarnation, entry.fragment] += m.steps
    over = [
        f"{island}/{who} fragment {p}: {steps} merged of {made.get((island, who), 0)}"
        for (island, who, p), steps in merged.items()
        if steps > made.get((island, who), 0)
    ]
    incarnations = {(island, who) for island, who, _ in merged}
    name = "no inner step is merged twice: no incarnation has more merged steps of a fragment than it made"
    return Check("steps", name, not over, _examples(over, len(incarnations)))


def _rounds_in_order(storm: StormRecord) -> Check:
    gaps = [
        entry.round
        for shard, tape in enumerate(storm.tapes)
        for n, entry in enumerate(tape, 1)
        if entry.round != storm.layout.run_round(shard, n)
    ]
    return Check("rounds", "every round is on the tape once, in order", not gaps, f"{len(storm.tape):,} rounds")


def _epochs_in_order(storm: StormRecord) -> Check:
    of_shards = [[entry.epoch for entry in tape] for tape in storm.tapes]
    name = "an older merger never writes after a newer one"
    count, last = (
        sum(len(set(epochs)) for epochs in of_shards),
        max(epochs[-1] if epochs else 0 for epochs in of_shards),
    )
    found = f"{count} epochs closed rounds, the last is {last}"
    return Check("epochs", name, all(epochs == sorted(epochs) for epochs in of_shards), found)


def _rounds_closed(storm: StormRecord) -> Check:
    closed = storm.rounds_in_window
    return Check("progress", "the run made progress: rounds closed in the storm", closed > 0, f"{closed:,} rounds")


_CHECKS: tuple[Callable[[StormRecord], Check], ...] = (
    _books_balance, _tokens_balance, _nothing_waits, _merged_once, _tape_and_books_agree, _not_merged_and_refused,
    _steps_merged_once, _rounds_in_order, _epochs_in_order, _rounds_closed,
)  # fmt: skip


def _merged(storm: StormRecord) -> Counter[Identity]:
    return Counter(
        (shard, m.island, m.incarnation, m.sequence)
        for shard, tape in enumerate(storm.tapes)
        for entry in tape
        for m in entry.members
    )


def _examples(wrong: Sequence[object], of: int) -> str:
    return f"none of {of:,}" if not wrong else f"{len(wrong)} of {of:,}, such as {wrong[0]}"
