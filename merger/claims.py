"""Claims: what an island says about its own work, compared with what it can have done. Pure.

A contribution's header claims tokens, steps, a global step, a speed and a position in the data. None of them can be
verified, so none of them widens a bound. A claim that contradicts itself is refused (`admission`). Tokens and steps
beyond what the merger saw add no weight (`seen`). They are no reason to refuse or to warn, because an honest island
trains on while no merger serves. The run's step and the positions of its text advance no further than an island can
have come; the next contributions of honest islands advance them again. The tape records what was believed, so a replay
merges the same.

What an island claimed last is in its `Account`, which changes only with the rounds that merge contributions of it. So
it is the same after a takeover.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from statistics import median_high
from typing import NamedTuple

from archipelago.broker.config import BATCH_FACTOR_MAX, OWN_TOKENS_PER_STEP_MAX, RunConfig, SyncConfig
from archipelago.broker.manifest import Manifest, OwnRounds
from archipelago.broker.messages import Contribution
from archipelago.broker.ranges import ReadPosition
from archipelago.merger.scores import Score

#: An island counts until this many rounds have closed without it.
SILENT_ROUNDS = 64
#: Each round may advance the run's step by this many strides of H/P steps, if no other island has come further.
STRIDES_OF_A_ROUND = 2
#: An island may have read the text of this many sync intervals more than it has answered rounds.
BURST_INTERVALS = 8
#: The same before its first contribution.
FIRST_BURST_INTERVALS = 64
#: An island may have read this many times the text of its steps, because contributions of it may have been lost.
DATA_SLACK = 4
#: At most this share of a corpus is held out.
HELD_OUT_SHARE_MAX = 0.5


class Account(NamedTuple):
    """What the rounds that merged an island's contributions say of it. Readers of the state take the tokens.

    Attributes:
        tokens: Its merged tokens, summed over the fragments.
        round: The last of these rounds.
        global_step: The global step that it claimed last.
        step_seconds: The time of an inner step that it reported last.
        batch: The tokens in a step that it claimed last.
        credit: The inner steps that it may have done besides those that weighed (`claims.seen`).
        score: How well its contributions agree with those of the others (`merger.scores`).
    """

    tokens: int = 0
    round: int = 0
    global_step: int = 0
    step_seconds: float = 0.0
    batch: float = 0.0
    credit: int = 0
    score: Score = Score()


def tokens_per_step_max(config: RunConfig) -> int:
    """Return the most tokens that an inner step can have."""
    return OWN_TOKENS_PER_STEP_MAX if config.has_user_loops else config.tokens_per_step * BATCH_FACTOR_MAX


def counted_tokens(contribution: Contribution, config: RunConfig) -> int:
    """Return the tokens that the counters count for a contribution: at most those of a whole run."""
    most = config.inner.steps * tokens_per_step_max(config)
    return min(contribution.tokens, most)


# -- the work that weighs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SeenWork:
    """How much of the claimed work of a round the merger has seen.

    Attributes:
        steps: The inner steps of each contribution that weigh, at least 1.
        batches: The tokens in a step of each contribution that weigh.
        credit: The steps that each island of the round may add to those of its next rounds.
    """

    steps: Sequence[int]
    batches: Sequence[float]
    credit: Mapping[str, int]


def seen(
    contributions: Sequence[Contribution],
    version: int,
    number: int,
    accounts: Mapping[str, Account],
    usual_batch: float,
    sync: SyncConfig,
    rounds: OwnRounds,
) -> SeenWork:
    """Return the work that weighs. The result depends on no order of the contributions.

    The fastest island's stride is the clock of the rounds. So an island does no more than an interval of steps on the
    fragment of each round, and steps on average no faster than rounds close. What it saves in rounds without it counts
    later, as on a thin link. A contribution covers the rounds since its base, and the window.

    A step counts at most the usual batch, of the run and of the round. A minority of islands can raise neither. With
    two islands it is the larger one, because nobody can tell which of the two is right.

    Args:
        usual_batch: The usual batch of the run's islands before it (`usual_batch`); 0 if it is not known.
    """
    islands = {c.island for c in contributions}
    fragments = len(rounds.fragments)
    most = (sync.staleness_cap + 1) * fragments * sync.interval
    credit = dict.fromkeys(islands, sync.interval)  # how many steps may weigh in the round, in all contributions
    for island in islands & accounts.keys():
        earned = rounds.between(accounts[island].round, number) * sync.interval
        credit[island] = min(accounts[island].credit + earned, most)
    steps, largest = [1] * len(contributions), dict[str, float]()
    for i, c in sorted(enumerate(contributions), key=lambda each: each[1].identity):
        strides = fragments * (version - c.base) + min(number, fragments) + min(sync.window, fragments)
        steps[i] = max(1, min(c.steps, math.ceil(strides * sync.interval / fragments), credit[c.island]))
        credit[c.island] = max(0, credit[c.island] - steps[i])
        largest[c.island] = max(c.tokens / c.steps, largest.get(c.island, 0.0))
    usual = min(median_high(list(largest.values())) if largest else 0.0, usual_batch or math.inf)
    return SeenWork(steps, [min(c.tokens / c.steps, usual) for c in contributions], credit)


def usual_batch(accounts: Mapping[str, Account], closed: int) -> float:
    """Return the upper median of the batches that islands have claimed last, of those that contributed of late."""
    batches = [account.batch for account in accounts.values() if closed - account.round <= SILENT_ROUNDS]
    return median_high(batches) if batches else 0.0


# -- the schedule ----------------------------------------------------------------------------------------------------


def next_step(
    step: int,
    members: Sequence[Contribution],
    others: Mapping[str, int],
    stride: float,
    live: AbstractSet[str] = frozenset(),
) -> int:
    """Return the run's step after a round: the largest claim, but no further than its island can have come.

    The fastest island opens the rounds, so a few strides for each round are enough for it, however fast it is. It may
    have gone further if the islands' intervals are stretched, as on thin links, and then the others have, too. A
    single island is taken at its word.

    Args:
        others: The steps that islands have claimed in earlier rounds (`global_steps`).
        stride: H/P, the inner steps from one round to the next.
    """
    furthest = max(members, key=lambda c: c.global_step, default=None)
    if furthest is None:
        return step
    steps = {**others, **{c.island: c.global_step for c in members}}
    claimed = [each for island, each in steps.items() if island != furthest.island]
    if not claimed and live <= {furthest.island}:
        return max(step, furthest.global_step)
    usual = median_high(claimed) if claimed else 0  # a minority moves it neither way
    return max(step, min(furthest.global_step, max(step + math.ceil(STRIDES_OF_A_ROUND * stride), usual)))


def global_steps(accounts: Mapping[str, Account], closed: int) -> dict[str, int]:
    """Return the global step that each island has claimed last, of those that contributed to the last rounds."""
    return {name: a.global_step for name, a in accounts.items() if closed - a.round <= SILENT_ROUNDS}


# -- data ------------------------------------------------------------------------------------------------------------


def steps_read(contribution: Contribution, account: Account | None, closed: int, interval: int, fragments: int) -> int:
    """Return in how many steps the island may have read the text that a contribution claims.

    That is more than the steps of the contribution if the island trained on after its last one and waited for
    snapshots, as it does while no merger serves: the work of that time is lost, and the text was read.

    Args:
        account: The account of its island, if it has one.
        interval: H, the inner steps of a sync interval.
        fragments: P, in how many rounds of the run that interval is divided.
    """
    if account is None:
        return min(contribution.steps, FIRST_BURST_INTERVALS * interval)
    return math.ceil((BURST_INTERVALS + max(0, closed - account.round) / fragments) * interval)


def believed_data(
    contribution: Contribution,
    steps: int,
    cursors: Mapping[str, tuple[int, int]],
    config: RunConfig,
    range_sequences: int,
) -> str:
    """Return the positions of a contribution that move cursors no further than its island can have read.

    A contribution moves a cursor at most to the end of its pass, because an island leases the next pass after the
    merger has merged the end of this one. A position that is too far ahead is moved back. If it was honest, as after a
    broker has lost newer cursors, the island's next contributions move the cursor on.

    Args:
        contribution: A contribution whose positions can be parsed.
        steps: In how many steps its island may have read them (`steps_read`).
        cursors: The cursor of each started range.
        range_sequences: How many sequences a range of the run's corpus has, or fewer.
    """
    data, tokens = config.data, steps * contribution.tokens / contribution.steps * DATA_SLACK
    # The positions of a task count batches, of which each step reads one.
    sequences = steps * DATA_SLACK if config.has_user_loops else tokens / data.sequence_length
    reach = math.ceil(sequences) + config.sync.interval * data.batch_size
    believed: list[ReadPosition] = []
    moved: dict[str, tuple[int, int]] = {}
    for read in contribution.positions:
        cursor = max(each.get(read.range, (0, 0)) for each in (cursors, moved))
        believed.append(position := _believed_position(read, cursor, reach, range_sequences))
        if position.cursor > cursor:
            reach -= max(0, (position.position if position.pass_number == cursor[0] else range_sequences) - cursor[1])
            moved[read.range] = position.cursor
    return " ".join(map(str, believed))


def _believed_position(read: ReadPosition, cursor: tuple[int, int], reach: int, range_sequences: int) -> ReadPosition:
    if read.cursor <= cursor:
        return read
    furthest = cursor[1] + reach
    if read.pass_number == cursor[0]:
        return replace(read, position=min(read.position, furthest))
    if range_sequences <= furthest:
        return ReadPosition(read.range, cursor[0] + 1, 0)
    return ReadPosition(read.range, cursor[0], furthest)


def range_sequences(manifest: Manifest) -> int:
    """Return how many sequences each range of the run's corpus has at least, apart from its held-out text."""
    corpus, data = manifest.corpus, manifest.config.data
    tokens = (corpus.tokens or corpus.bytes) * (1.0 - HELD_OUT_SHARE_MAX)
    return max(0, int(tokens / (data.sequence_length + 1)) // data.shards - 1)
