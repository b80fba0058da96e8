"""Claims: what an island says about its own work, compared with what it can have done. Pure.

A contribution's header claims tokens, steps, a global step, a speed and a position in the data. None of them can be
verified, so none of them widens a bound. A claim that contradicts itself is refused (`contradiction`). Tokens and steps
beyond what the merger saw add no weight (`weights.seen_steps`, `weights.seen_batches`). They are no reason to refuse
or to warn, because an honest island trains on while no merger serves. The run's step and the positions of its text
advance no further than an island can have come; the next contributions of honest islands advance them again. The tape
records what was believed, so a replay merges the same.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Collection, ItemsView, Iterable, Mapping
from dataclasses import replace

from archipelago.broker.config import BATCH_FACTOR_MAX, OWN_TOKENS_PER_STEP_MAX, RunConfig
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Contribution
from archipelago.broker.ranges import ReadPosition, parse_positions

#: An island may be this much faster than the median of at least two others.
SPEED_MAX = 16.0
#: An island may be this much faster than the only other one: the merger cannot tell which of the two is wrong.
SPEED_MAX_OF_TWO = 256.0
#: No inner step is shorter than this, whatever an island says.
STEP_SECONDS_MIN = 1e-4
#: A report of a step time that is this much shorter than what the merger saw is not believed.
SEEN_SLACK = 4.0
#: While no round closes, the run's step may advance this much faster than the median of the other islands.
SCHEDULE_SPEED_MAX = 4.0
#: Each round may advance the run's step by this many strides of H/P steps, however little time has passed.
STRIDES_OF_A_ROUND = 2
#: An island may have read this many times the text of its steps, because contributions of it may have been lost.
DATA_SLACK = 4
#: At most this share of a corpus is held out.
HELD_OUT_SHARE_MAX = 0.5
#: How many cursors there can be of ranges of corpora that only some islands have.
OTHER_CURSORS_MAX = 8192
#: Gaps longer than this count as this long.
ELAPSED_MAX = 30 * 86400.0


def contradiction(contribution: Contribution, config: RunConfig) -> tuple[str, str] | None:
    """Return the code and the text of a reason why no island can have done this, or None."""
    c = contribution
    if c.tokens > c.steps * tokens_per_step_max(config):
        return "tokens", f"{c.tokens} tokens in {c.steps} steps are impossible"
    return None


def tokens_per_step_max(config: RunConfig) -> int:
    """Return the most tokens that an inner step can have."""
    return OWN_TOKENS_PER_STEP_MAX if config.has_own_loops else config.tokens_per_step * BATCH_FACTOR_MAX


def counted_tokens(contribution: Contribution, config: RunConfig) -> int:
    """Return the tokens that the books count for a contribution: at most those of a whole run."""
    most = config.inner.steps * tokens_per_step_max(config)
    return min(contribution.tokens, most)


# -- speed -----------------------------------------------------------------------------------------------------------


def is_step_seconds(seconds: float) -> bool:
    """Return whether this is a measured time of an inner step."""
    return seconds > 0.0 and math.isfinite(seconds)


class StepTimes:
    """The seconds per inner step that islands report, and those that were measured in order.

    Each contribution is judged by the median of the other islands. Sorting all of them again for each would make a
    round's work quadratic in its islands.
    """

    def __init__(self, reported: Mapping[str, float]) -> None:
        self._by_island = dict(reported)
        self._ordered = sorted(filter(is_step_seconds, reported.values()))

    def items(self) -> ItemsView[str, float]:
        """Return the pairs of an island and what it reports."""
        return self._by_island.items()

    def put(self, island: str, seconds: float) -> None:
        """Set what an island reports."""
        self.drop(island)
        self._by_island[island] = seconds
        if is_step_seconds(seconds):
            insort(self._ordered, seconds)

    def drop(self, island: str) -> None:
        """Forget an island."""
        before = self._by_island.pop(island, 0.0)
        if is_step_seconds(before):
            del self._ordered[bisect_left(self._ordered, before)]

    def count_of_others(self, island: str) -> int:
        """Return how many other islands have measured a time."""
        return len(self._ordered) - is_step_seconds(self._by_island.get(island, 0.0))

    def median_of_others(self, island: str) -> float | None:
        """Return the lower median of the times that the other islands have measured; None if there are none."""
        count = self.count_of_others(island)
        if not count:
            return None
        middle = (count - 1) // 2
        if count < len(self._ordered) and bisect_left(self._ordered, self._by_island[island]) <= middle:
            middle += 1
        return self._ordered[middle]

    def fastest(self, island: str) -> float:
        """Return the shortest time of an inner step that is plausible for an island.

        The lower median of the other islands decides, so a minority can neither speed the bound up nor slow it down.
        """
        usual = self.median_of_others(island)
        if usual is None:
            return STEP_SECONDS_MIN
        factor = SPEED_MAX if self.count_of_others(island) > 1 else SPEED_MAX_OF_TWO
        return max(STEP_SECONDS_MIN, usual / factor)

    def believed(self, seen: Mapping[str, float]) -> dict[str, float]:
        """Return the step times that decide how long rounds wait.

        A report is raised to the fastest plausible time. A report that contradicts what the merger saw is replaced by
        that, or by the lower median of the others if that is shorter.

        Args:
            seen: The seconds between two contributions of an island, over the steps between them.
        """
        believed = {}
        for island, seconds in self.items():
            if not is_step_seconds(seconds):
                continue
            believed[island] = max(seconds, self.fastest(island))
            usual = self.median_of_others(island)
            if usual is not None and seconds * SEEN_SLACK < seen.get(island, 0.0):
                believed[island] = max(believed[island], min(seen[island], usual))
        return believed


# -- the schedule ----------------------------------------------------------------------------------------------------


def next_step(
    step: int,
    members: Iterable[Contribution],
    reported: StepTimes,
    elapsed: float,
    stride: float,
    live: Collection[str] = (),
) -> int:
    """Return the run's step after a round: the largest claim, but no further than its island can have come.

    An island whose claim was lowered is not wrong for good: the run's step catches up with it over the next rounds.
    The fastest island opens the rounds, so a few strides for each round are enough for it, however fast it is. Time
    alone counts at a speed near that of the others, because a false claim would otherwise end the run too early.

    Args:
        step: The run's step before the round.
        members: The merged contributions.
        reported: The step times that islands report.
        elapsed: Seconds since the last round closed.
        stride: H/P, the inner steps from one round to the next.
        live: The live islands. While others live and none of them has reported a step time, time alone counts nothing.
    """
    least = math.ceil(STRIDES_OF_A_ROUND * stride)
    elapsed = min(max(elapsed, 0.0), ELAPSED_MAX)
    furthest = step
    for c in members:
        possible = least + int(elapsed / _schedule_step_seconds(c.island, reported, live))
        furthest = max(furthest, min(c.global_step, step + possible))
    return furthest


def _schedule_step_seconds(island: str, times: StepTimes, live: Collection[str]) -> float:
    """Return the time of a step at which an island may advance the schedule while no round closes."""
    usual = times.median_of_others(island)
    if usual is not None:
        return max(STEP_SECONDS_MIN, usual / SCHEDULE_SPEED_MAX)
    return math.inf if any(name != island for name in live) else STEP_SECONDS_MIN


# -- data ------------------------------------------------------------------------------------------------------------


def believed_data(
    contribution: Contribution,
    steps: int,
    cursors: Mapping[str, tuple[int, int]],
    waiting: Mapping[str, tuple[int, int]],
    config: RunConfig,
    range_sequences: int,
) -> str:
    """Return the positions of a contribution that move cursors no further than its island can have read.

    A contribution moves a cursor at most to the end of its pass, because an island leases the next pass after the
    merger has merged the end of this one. A position that is too far ahead is moved back. If it was honest, as after a
    broker has lost newer cursors, the island's next contributions move the cursor on.

    Args:
        contribution: A contribution whose positions can be parsed.
        steps: In how many steps its island may have read them (`Accounts.steps_read`).
        cursors: The cursor of each started range.
        waiting: Where contributions that wait for their rounds will move the cursors.
        config: The run's config.
        range_sequences: How many sequences a range of the run's corpus has, or fewer.
    """
    data, tokens = config.data, steps * contribution.tokens / contribution.steps * DATA_SLACK
    # The positions of a task count batches, of which each step reads one.
    sequences = steps * DATA_SLACK if config.has_own_loops else tokens / data.sequence_length
    reach = math.ceil(sequences) + config.sync.interval * data.batch_size
    believed: list[ReadPosition] = []
    moved: dict[str, tuple[int, int]] = {}
    for read in parse_positions(contribution.data):
        before = max((each[read.range] for each in (cursors, waiting, moved) if read.range in each), default=None)
        if before is None and "/" in read.range and len(cursors) + len(moved) >= data.shards + OTHER_CURSORS_MAX:
            continue
        cursor = before or (0, 0)
        believed.append(_believed_position(read, cursor, reach, range_sequences))
        reach -= _sequences_between(cursor, believed[-1], range_sequences)
        moved[read.range] = max(cursor, believed[-1].cursor)
    return " ".join(map(str, believed))


def _believed_position(read: ReadPosition, cursor: tuple[int, int], reach: int, range_sequences: int) -> ReadPosition:
    if read.cursor <= cursor:
        return read
    pass_number, furthest = cursor[0], cursor[1] + reach
    if read.pass_number == pass_number and not read.ended:
        return replace(read, position=min(read.position, furthest))
    if "/" in read.range or range_sequences <= furthest:  # the merger does not know the size of other corpora
        return ReadPosition(read.range, pass_number, 0, ended=True)
    return ReadPosition(read.range, pass_number, furthest)


def _sequences_between(cursor: tuple[int, int], believed: ReadPosition, range_sequences: int) -> int:
    """Return how many sequences a believed position moves the cursor on, at least."""
    if believed.cursor <= cursor:
        return 0
    return max(0, (range_sequences if believed.ended else believed.position) - cursor[1])


def range_sequences(manifest: Manifest) -> int:
    """Return how many sequences each range of the run's corpus has at least, apart from its held-out text."""
    corpus, data = manifest.corpus, manifest.config.data
    tokens = (corpus.tokens or corpus.bytes) * (1.0 - HELD_OUT_SHARE_MAX)
    return max(0, int(tokens / (data.sequence_length + 1)) // data.shards - 1)
