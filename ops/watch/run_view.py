"""The state of a run, as plain data: what the terminal, the page, the metrics and the report show, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from archipelago.broker.control import DRAIN, EXPEL, Control
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Counters, Evaluation, Refusal, TapeEntry
from archipelago.broker.observe.merge_load import few_syncs
from archipelago.broker.presence import Heartbeat
from archipelago.broker.shards.reader import holders_in_words, numbered
from archipelago.broker.transport import MergerStatus, Standby
from archipelago.ops.watch.formatting import ago


@dataclass(frozen=True, kw_only=True)
class IslandView(Heartbeat):
    """One island: its last heartbeat, with the loss in the run's unit, and what others know about it.

    Attributes:
        live: Whether it sent a heartbeat lately and has not left.
        last_seen_seconds: The age of its last heartbeat.
        participation: Share of the recent rounds that merged it.
        score: How well its newest merged contribution's island agrees with the others; 1 is usual, 0 unrelated.
        factor: The factor on the weight of its newest merged contribution; below 1 it was lowered.
        tokens_merged: The merged part of its tokens, mean over the fragments.
    """

    name: str
    live: bool
    last_seen_seconds: float
    participation: float
    score: float
    factor: float
    tokens_merged: int

    @property
    def is_silent(self) -> bool:
        """Whether it sends no heartbeats, and did not say that it leaves."""
        return not self.live and self.state not in ("left", "done")


@dataclass(frozen=True)
class RunView:
    """The state of one run.

    Attributes:
        known: Islands seen in the last day.
        live: Islands that sent a heartbeat lately and have not left.
        participating: Live islands that recent rounds have merged.
        unit: The unit of all losses, such as `bits per byte`. `loss` is that of training.
        held_out_first: The loss on held-out text at the first evaluation.
        tokens_merged: This and the following are the run's accounts of tokens (`_token_accounts`).
        shards: The fragments of each shard, in a run with several.
        ended: The shards that have made all steps of the run.
        rounds_behind: How many rounds with smaller numbers than the newest one are not closed yet.
        unreachable: The shards that cannot be reached, each with the reason. The figures are those of the others.
        memory_limit_bytes: Redis's maxmemory; 0 if it has none.
        refuses_writes: By which code and why the Redis refuses writes, and what to do; empty if it takes them.
        unreadable: Records in Redis that this reader could not read and skipped, by name.
        merger: The merger that holds the lease, and the time since the last round closed.
        refused: Why the last merger refused to serve the run, while none serves it.
        unsaved: Why the last merger writes no checkpoints, while they fail.
        uncopied: Why a merger does not copy its checkpoints to the bucket, while that fails.
        refusals: The newest refusals without repeats, oldest first, each with the broker's unix time in seconds.
        covered: The last round in a finished checkpoint; 0 if there is none.
        tape: The recent rounds, oldest first, as the evaluations are.
        address: How commands name the run's Redis here; empty if $ARCHIPELAGO_URL does.
        folder: How commands name the run's folder here; empty if it has none.
        up: The command that continues a run of `up` whose own Redis has ended; empty for others.
    """

    manifest: Manifest
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
    tokens_lost: int
    tokens_trained: int
    counters: Counters
    pending: int
    memory_bytes: int
    memory_limit_bytes: int
    islands: tuple[IslandView, ...]
    refuses_writes: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    frozen_parameters: int = 0
    shards: tuple[tuple[int, ...], ...] = ()
    ended: tuple[int, ...] = ()
    rounds_behind: int = 0
    unreachable: Mapping[int, str] = field(default_factory=dict, hash=False)
    merger: MergerStatus = field(default_factory=MergerStatus)
    standbys: tuple[Standby, ...] = ()
    refused: str = ""
    unsaved: str = ""
    uncopied: str = ""
    control: Control = field(default_factory=Control, hash=False)
    refusals: tuple[tuple[float, Refusal], ...] = ()
    refused_by_code: Mapping[str, int] = field(default_factory=dict, hash=False)
    covered: int = 0
    tape: Sequence[TapeEntry] = ()
    evaluations: Sequence[Evaluation] = ()
    address: str = "URL"
    folder: str = ""
    up: str = ""

    @property
    def unfinished(self) -> bool:
        """Whether the run has steps to make, or one of its shards has and contributions wait there.

        Islands leave once the first shard has made all steps. So a shard that has lost their last ones stays behind.
        """
        known = max(1, len(self.shards)) - len(self.unreachable)
        return self.step < self.steps or (self.pending > 0 and len(self.ended) < known)

    @property
    def syncs(self) -> float:
        """How often each fragment was synchronised, on average. A round synchronises one of them."""
        return (self.rounds - self.rounds_behind) / max(1, self.fragments)

    @property
    def few_syncs(self) -> str:
        """What is wrong with the syncs that the run had, or will have at its end; empty if there are enough."""
        if not self.unfinished:
            return few_syncs(self.syncs)
        return few_syncs(self.steps / self.manifest.config.sync.interval, "will have")

    @property
    def round_seconds(self) -> float:
        """Seconds since the newest round of any shard closed; NaN before the first."""
        known = [each.still_seconds for each in self.merger.shards or (self.merger,) if not each.is_away]
        return min(known, default=math.nan) if self.rounds else math.nan

    @property
    def lacks_merger(self) -> bool:
        """Whether no merger serves a run that had one, or whose islands have sent contributions."""
        return not self.merger.holder and (self.merger.epoch > 0 or self.merger.still_seconds > 0.0)


def size_in_words(manifest: Manifest) -> str:
    """Return a run's task, parameters and fragments in words."""
    frozen = f" ({manifest.frozen_parameters:,} more are frozen)" if manifest.frozen_parameters else ""
    shards = f" and {manifest.shards} shards" if manifest.shards > 1 else ""
    task = f"task {manifest.task}, " if manifest.task else ""
    return f"{task}{manifest.parameters:,} parameters{frozen} in {len(manifest.fragments)} fragments{shards}"


def evaluated(view: RunView, now: float) -> str:
    """Return when the held-out loss was measured and of which round, or how to get one, as a sentence."""
    newest = view.evaluations[-1] if view.evaluations else None
    if newest is None or not newest.unix_seconds:
        if view.manifest.has_scripts:
            return "no held-out loss: give `join` an `evaluate`, or call `run.report(held_out=…)`"
        if_any = ", if the task has an `evaluate`" if view.manifest.task else ""
        return f"no held-out loss yet: one island evaluates as soon as it trains{if_any}"
    by = f" by {newest.by}" if newest.by else ""
    behind = view.rounds - newest.round
    rounds = "the newest"
    if behind > 0:
        rounds = f"{behind:,} {'round' if behind == 1 else 'rounds'} ago"
    elif behind < 0 and view.manifest.shards == 1:
        rounds = "before the run went back"
    age = ago(max(0.0, now - newest.unix_seconds))
    return f"held-out loss of round {newest.round:,} ({rounds}), evaluated {age} ago{by}"


def merger_in_words(view: RunView) -> str:
    """Return who serves the run, when the last round closed, and who stands by."""
    status = view.merger
    whose = " of the slowest shard" if status.shards else ""
    last = f", the last round{whose} closed {ago(status.still_seconds)} ago" if status.still_seconds else ""
    waiting = f"; standing by: {', '.join(standby.name for standby in view.standbys)}" if view.standbys else ""
    if status.unreachable:
        waiting = f"; {numbered('shard', status.unreachable)} cannot be reached{waiting}"
    if status.holder:
        verb = "serve" if len(status.holders) > 1 else "serves"
        return f"{status.holder} {verb} with epoch {status.epoch}{last}{waiting}"
    if not view.unfinished:
        return f"the run is finished, so no merger serves it{last}{waiting}"
    if status.holders:
        missing = numbered("shard", status.unserved)
        return f"no merger serves {missing}; the others have {holders_in_words(status)}{last}{waiting}"
    past = f" (the last epoch was {status.epoch})" if status.epoch else ""
    why = f". {view.refused}" if view.refused else ""
    return f"no merger serves the run{past}{last}{waiting}{why}"


def describe_control(control: Control) -> str:
    """Describe the requests of operators in words. Return an empty string if there are none."""
    words = ["merging is paused"] if control.is_paused else []
    words += [f"{name} = {value}" for name, value in control.settings.items()]
    for wish, action in ((DRAIN, "is asked to leave"), (EXPEL, "is expelled")):
        words += [f"{island} {action}" for island, wanted in control.islands.items() if wanted == wish]
    words += [f"{name} is ignored ({why})" for name, why in control.faults.items()]
    return ", ".join(words)
