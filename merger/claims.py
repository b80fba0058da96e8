"""Claims: what an island says about its own work, compared with what it can have done. Pure.

A contribution's header claims tokens, steps, a global step, a speed and a position in the data. None of them can be
verified, but all of them have a bound: the time since the island's last contribution, by the merger's clock, and the
speed of the other islands. A claim that contradicts itself is refused (`contradiction`). A claim that is only larger
than the bound is lowered to it (`Accounts.bounded`), because honest clocks may differ and an outage may have hidden an
island from the merger. The tape records the lowered values, so a replay merges the same.

The bounds are far above what honest islands do. They limit how much a false claim is worth, not who is right.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from archipelago.broker.config import BATCH_FACTOR_MAX, OWN_TOKENS_PER_STEP_MAX, RunConfig
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Contribution
from archipelago.broker.ranges import ReadPosition, parse_positions
from archipelago.merger.step_times import StepTimes, is_step_seconds

#: An island may be this much faster than the median of at least two others.
SPEED_MAX = 16.0
#: An island may be this much faster than the only other one: the merger cannot tell which of the two is wrong.
SPEED_MAX_OF_TWO = 256.0
#: No inner step is shorter than this, whatever an island says.
STEP_SECONDS_MIN = 1e-4
#: A report of a step time that is this much shorter than what the merger saw is not believed.
SEEN_SLACK = 4.0
#: A contribution may have the steps of this many sync intervals more than the merger saw time for: it may have waited.
BURST_INTERVALS = 8
#: The same for an island's first contribution to a fragment, which may have trained before the merger heard of it.
FIRST_BURST_INTERVALS = 64
#: While no round closes, the run's step may advance this much faster than the median of the other islands.
SCHEDULE_SPEED_MAX = 4.0
#: Each round may advance the run's step by this many strides of H/P steps, however little time has passed.
STRIDES_OF_A_ROUND = 2
#: Batches may grow by this factor after an island's first contribution.
BATCH_SLACK = 4.0
#: An island may have read this many times the text of its steps, because contributions of it may have been lost.
DATA_SLACK = 4
#: At most this share of a corpus is held out.
HELD_OUT_SHARE_MAX = 0.5
#: How many cursors there can be of shards of corpora that only some islands have.
OTHER_CURSORS_MAX = 8192
#: For so long after its start a merger may be reading what waited for it.
CATCH_UP_SECONDS = 60.0
#: Gaps longer than this count as this long.
ELAPSED_MAX = 30 * 86400.0
#: How many islands have an account. Those that were silent longest are forgotten first.
ACCOUNTS_MAX = 1024
#: How the average of seen step times changes with each contribution.
_SMOOTHING = 0.8


#: The step times that islands report, by island.
Reported = Mapping[str, float] | StepTimes


@dataclass(frozen=True)
class Account:
    """The last accepted contribution of an island. Every commit stores it, so that a restarted merger knows it.

    Attributes:
        incarnation: The incarnation that sent it.
        round: The last closed round at that time.
        unix_seconds: The merger's wall clock at that time.
        since: The wall clock when the island last sent the fragment that it has not sent for the longest time. Its next
            contribution to that fragment holds the work since then.
        global_step: The global step that it claimed.
        batch: Tokens a step in the first contribution of that incarnation; of a user's own loop, the most so far.
    """

    incarnation: str
    round: int
    unix_seconds: float
    since: float
    global_step: int
    batch: float


def contradiction(contribution: Contribution, config: RunConfig) -> tuple[str, str] | None:
    """Return the code and the text of a reason why no island can have done this, or None."""
    c = contribution
    if c.tokens > c.steps * tokens_per_step_max(config):
        return "tokens", f"{c.tokens} tokens in {c.steps} steps are impossible"
    return None


def tokens_per_step_max(config: RunConfig) -> int:
    """Return the most tokens that an inner step can have."""
    return OWN_TOKENS_PER_STEP_MAX if config.has_own_loops else config.tokens_per_step * BATCH_FACTOR_MAX


def refused_tokens(contribution: Contribution, config: RunConfig) -> int:
    """Return the tokens that the books count for a refused contribution: at most those of a whole run."""
    most = config.inner.steps * tokens_per_step_max(config)
    return min(contribution.tokens, most)


# -- speed -----------------------------------------------------------------------------------------------------------


def fastest_step_seconds(island: str, reported: Reported) -> float:
    """Return the shortest time of an inner step that is plausible for an island.

    The lower median of the other islands decides, so a minority can neither speed the bound up nor slow it down.

    Args:
        island: The island.
        reported: The step times that islands report.
    """
    times = StepTimes.of(reported)
    usual = times.median_of_others(island)
    if usual is None:
        return STEP_SECONDS_MIN
    factor = SPEED_MAX if times.count_of_others(island) > 1 else SPEED_MAX_OF_TWO
    return max(STEP_SECONDS_MIN, usual / factor)


def believed_step_seconds(reported: Reported, seen: Mapping[str, float]) -> dict[str, float]:
    """Return the step times that decide how long rounds wait.

    A report is raised to the fastest plausible time. A report that contradicts what the merger saw is replaced by that,
    or by the lower median of the others if that is shorter.

    Args:
        reported: The step times that islands report.
        seen: The seconds between two contributions of an island, over the steps between them.
    """
    believed, times = {}, StepTimes.of(reported)
    for island, seconds in times.items():
        if not is_step_seconds(seconds):
            continue
        believed[island] = max(seconds, fastest_step_seconds(island, times))
        usual = times.median_of_others(island)
        if usual is not None and seconds * SEEN_SLACK < seen.get(island, 0.0):
            believed[island] = max(believed[island], min(seen[island], usual))
    return believed


def _clock(then: float, now: float, unix_seconds: float) -> float:
    """Return a time of the wall clock by the merger's clock, which shows `now` when the wall shows `unix_seconds`."""
    return now - min(max(unix_seconds - then, 0.0), ELAPSED_MAX)


# -- the schedule ----------------------------------------------------------------------------------------------------


def next_step(
    step: int,
    members: Iterable[Contribution],
    reported: Reported,
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
    furthest, times = step, StepTimes.of(reported)
    for c in members:
        possible = least + int(elapsed / _schedule_step_seconds(c.island, times, live))
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
    shard_sequences: int,
) -> str:
    """Return the places of a contribution that move cursors no further than its island can have read.

    A contribution moves a cursor at most to the end of its pass, because an island leases the next pass after the
    merger has merged the end of this one. A place that is too far ahead is moved back. If it was honest, as after a
    broker has lost newer cursors, the island's next contributions move the cursor on.

    Args:
        contribution: A contribution that is `bounded`, and whose places can be parsed.
        steps: In how many steps its island may have read them (`Accounts.steps_read`).
        cursors: The cursor of each started shard.
        waiting: Where contributions that wait for their rounds will move the cursors.
        config: The run's config.
        shard_sequences: How many sequences a shard of the run's corpus has, or fewer.
    """
    data, tokens = config.data, steps * contribution.tokens / contribution.steps * DATA_SLACK
    # The places of a task count batches, of which each step reads one.
    sequences = steps * DATA_SLACK if config.has_own_loops else tokens / data.sequence_length
    reach = math.ceil(sequences) + config.sync.interval * data.batch_size
    believed: list[ReadPosition] = []
    moved: dict[str, tuple[int, int]] = {}
    for place in parse_positions(contribution.data):
        before = max((each[place.range] for each in (cursors, waiting, moved) if place.range in each), default=None)
        if before is None and "/" in place.range and len(cursors) + len(moved) >= data.shards + OTHER_CURSORS_MAX:
            continue
        cursor = before or (0, 0)
        believed.append(_believed_place(place, cursor, reach, shard_sequences))
        reach -= _sequences_between(cursor, believed[-1], shard_sequences)
        moved[place.range] = max(cursor, believed[-1].cursor)
    return " ".join(map(str, believed))


def _believed_place(place: ReadPosition, cursor: tuple[int, int], reach: int, shard_sequences: int) -> ReadPosition:
    if place.cursor <= cursor:
        return place
    pass_number, furthest = cursor[0], cursor[1] + reach
    if place.pass_number == pass_number and not place.ended:
        return replace(place, position=min(place.position, furthest))
    if "/" in place.range or shard_sequences <= furthest:  # the merger does not know the size of other corpora
        return ReadPosition(place.range, pass_number, 0, ended=True)
    return ReadPosition(place.range, pass_number, furthest)


def _sequences_between(cursor: tuple[int, int], place: ReadPosition, shard_sequences: int) -> int:
    """Return how many sequences a believed place moves the cursor on, at least."""
    if place.cursor <= cursor:
        return 0
    return max(0, (shard_sequences if place.ended else place.position) - cursor[1])


def shard_sequences(manifest: Manifest) -> int:
    """Return how many sequences each shard of the run's corpus has at least, apart from its held-out text."""
    corpus, data = manifest.corpus, manifest.config.data
    tokens = (corpus.tokens or corpus.bytes) * (1.0 - HELD_OUT_SHARE_MAX)
    return max(0, int(tokens / (data.sequence_length + 1)) // data.shards - 1)


# -- accounts --------------------------------------------------------------------------------------------------------


class Accounts:
    """What the merger has seen of each island, by its own clock.

    Args:
        config: The run's config.
        fragments: P, the number of fragments.
    """

    def __init__(self, config: RunConfig, fragments: int) -> None:
        self.config, self.fragments = config, fragments
        #: Seconds between two contributions of an island, over the steps between them, as a moving average.
        self.seen: dict[str, float] = {}
        self._accounts: dict[str, Account] = {}
        self._heard: dict[str, float] = {}  # when an island was last heard, by this merger's clock
        self._since: dict[str, float] = {}  # since when it may have trained on fragments that it has not sent yet
        #: Since when no merger has seen who trains and sends; None once this merger has read all that waited for it.
        self._unwatched_since: float | None = None
        self._loaded_at = 0.0
        self._sent: dict[tuple[str, int], float] = {}  # when it last sent a fragment

    def load(
        self, accounts: Mapping[str, Account], now: float, unix_seconds: float, unwatched_seconds: float = 0.0
    ) -> None:
        """Continue from the accounts of the last commit. A clock that was set back makes gaps shorter, not longer.

        Args:
            accounts: The accounts.
            now: The merger's clock.
            unix_seconds: The wall clock.
            unwatched_seconds: How long no merger has merged anything. An island that is there when this merger begins
                may have trained as long, even if no merger has heard of it, and what waits may have been sent as long
                ago. Call `caught_up` when the merger has read it.
        """
        self._unwatched_since = now - min(max(unwatched_seconds, 0.0), ELAPSED_MAX)
        self._loaded_at = now
        self._accounts = dict(accounts)
        self.seen.clear()
        self._sent.clear()
        self._heard = {name: _clock(a.unix_seconds, now, unix_seconds) for name, a in accounts.items()}
        self._since = {name: _clock(a.since, now, unix_seconds) for name, a in accounts.items()}

    def last_heard_at(self, now: float) -> float:
        """Return when any island was last heard, by the merger's clock; `now` if none was."""
        return max(self._heard.values(), default=now)

    def stored(self) -> dict[str, Account]:
        """Return the accounts for the commit."""
        return dict(self._accounts)

    def meet(self, islands: Iterable[str], now: float) -> None:
        """Note islands that send heartbeats, from which on they may have trained."""
        for island in islands:
            if island not in self._since and len(self._since) < 2 * ACCOUNTS_MAX:
                self._since[island] = self._there_since(now)

    def caught_up(self) -> None:
        """Note that everything that waited when the merger began was read. What arrives now has just been sent."""
        self._unwatched_since = None

    def _there_since(self, now: float) -> float:
        """Return when an island that is met now may have begun to train, and what is read now may have been sent."""
        if self._unwatched_since is None or now - self._loaded_at > CATCH_UP_SECONDS:
            return now
        return self._unwatched_since

    def bounded(self, contribution: Contribution, reported: Reported, now: float) -> tuple[Contribution, list[str]]:
        """Return the contribution with claims that its island can have fulfilled, and the names of the lowered claims.

        Args:
            contribution: A contribution without a `contradiction`.
            reported: The step times that islands report.
            now: The merger's clock.
        """
        c = contribution
        steps = min(c.steps, self._steps_possible(c, reported, now))
        tokens = max(1, min(c.tokens * steps // c.steps, int(steps * self._tokens_per_step(c))))
        lowered = [name for name, before, after in (("steps", c.steps, steps), ("tokens", c.tokens, tokens))
                   if after < before]  # fmt: skip
        return (replace(c, steps=steps, tokens=tokens) if lowered else c), lowered

    def steps_read(self, contribution: Contribution, reported: Reported, now: float) -> int:
        """Return in how many steps the island may have read the text that a contribution claims.

        That is more than the steps of the contribution if the island trained on after its last one and waited for
        snapshots, as it does while no merger serves: the work of that time is lost, and the text was read.

        Args:
            contribution: A `bounded` contribution.
            reported: The step times that islands report.
            now: The merger's clock.
        """
        c, known = contribution, self._accounts.get(contribution.island)
        if known is None or known.incarnation != c.incarnation:
            return c.steps
        return max(c.steps, self._steps_possible(c, reported, now))

    def accept(self, contribution: Contribution, closed: int, now: float, unix_seconds: float) -> None:
        """Note a contribution that is going to be merged."""
        c, known = contribution, self._accounts.pop(contribution.island, None)
        if known is not None and known.incarnation == c.incarnation:
            self._note_speed(c, known, now)
            # The batches of a user's own loop may grow without an end, but not faster than BATCH_SLACK allows.
            batch = max(known.batch, c.tokens / c.steps) if self.config.has_own_loops else known.batch
        else:
            batch = c.tokens / c.steps
        self._heard[c.island] = now
        self._sent[c.island, c.fragment] = self._there_since(now)
        began = self._since.setdefault(c.island, self._there_since(now))
        oldest = min(self._sent.get((c.island, p), began) for p in range(self.fragments))
        since = unix_seconds - (now - oldest)
        self._accounts[c.island] = Account(c.incarnation, closed, unix_seconds, since, c.global_step, batch)
        while len(self._accounts) > ACCOUNTS_MAX:
            self._forget(next(iter(self._accounts)))

    def round_of(self, island: str) -> int | None:
        """Return the last closed round when the island was last heard, or None for an unknown island."""
        account = self._accounts.get(island)
        return None if account is None else account.round

    def heard_at(self, island: str) -> float | None:
        """Return when the island was last heard, by the merger's clock, or None for an unknown island."""
        return self._heard.get(island)

    def _forget(self, island: str) -> None:
        del self._accounts[island]
        self._heard.pop(island, None)
        self._since.pop(island, None)
        self.seen.pop(island, None)
        for p in range(self.fragments):
            self._sent.pop((island, p), None)

    def _steps_possible(self, c: Contribution, reported: Reported, now: float) -> int:
        sent = self._sent.get((c.island, c.fragment))
        since = self._since.get(c.island, self._there_since(now)) if sent is None else sent
        elapsed = min(max(now - since, 0.0), ELAPSED_MAX)
        burst = (FIRST_BURST_INTERVALS if sent is None else BURST_INTERVALS) * self.config.sync.interval
        return burst + int(elapsed / fastest_step_seconds(c.island, reported))

    def _tokens_per_step(self, c: Contribution) -> float:
        """Return the most tokens a step. Until an island has declared its batch, it may be any that is admitted."""
        known = self._accounts.get(c.island)
        if known is None or known.incarnation != c.incarnation:
            return float(tokens_per_step_max(self.config))
        usual = 1 if self.config.has_own_loops else self.config.tokens_per_step
        return BATCH_SLACK * max(known.batch, usual)

    def _note_speed(self, c: Contribution, known: Account, now: float) -> None:
        steps = c.global_step - known.global_step
        if steps <= 0:  # sent at the same step boundary, or out of order
            return
        sample = max(0.0, now - self._heard.get(c.island, now)) / steps
        before = self.seen.get(c.island, sample)
        self.seen[c.island] = _SMOOTHING * before + (1.0 - _SMOOTHING) * sample
