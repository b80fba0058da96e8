"""Replay an island from its actions: the same batches, steps, adoptions and sends, without Redis and clocks.

Published parameters and the states of other islands come from the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from archipelago.broker.codecs import Vector, body_of
from archipelago.broker.errors import ArchipelagoError
from archipelago.broker.manifest import Manifest
from archipelago.islands.data.batches import Batches
from archipelago.islands.data.tokenizer import Tokens
from archipelago.islands.inner import InnerState, InnerSteps, begin
from archipelago.islands.moments import SyncedState
from archipelago.islands.sync.actions import (
    Action,
    Adopt,
    BeginPass,
    ForgetShards,
    Join,
    Length,
    RestoreWhole,
    Send,
    Steps,
    TakeMoments,
    word,
)
from archipelago.islands.sync.replica import Replica


class ActionError(ArchipelagoError):
    """The actions of an island have a gap, or one of them cannot be repeated."""

    code = "replay.action"


@dataclass(frozen=True)
class Point:
    """The whole state of an incarnation after some of its actions."""

    inner: InnerState
    references: Sequence[jax.Array]
    batches: dict[str, int | str]
    global_step: int
    unsent: Sequence[int]


@dataclass(frozen=True)
class Surroundings:
    """State from outside an incarnation: published parameters and the states of other incarnations.

    Attributes:
        published: From a fragment and a version to its parameters, float32 [N], and its global step.
        point: From another incarnation (`NAME/INCARNATION`) and a number of its actions to its state after these.
    """

    published: Callable[[int, int], tuple[Vector, int]]
    point: Callable[[str, int], Point]


@dataclass
class ReplayedIsland:
    """The replay of one incarnation.

    Attributes:
        who: The island and its incarnation.
        actions: Its actions in order.
        manifest: The run.
        steps: The compiled inner steps.
        text: The training text.
        around: The state that it received from outside.
        points_wanted: The numbers of actions after which another island needs this one's state.
        sent: The bodies of its contributions by shard and sequence number, until they are taken.
        points: The wanted states, until they are taken.
        done: The number of actions that were repeated so far.
    """

    who: str
    actions: Sequence[Action]
    manifest: Manifest
    steps: InnerSteps
    text: Tokens
    around: Surroundings
    points_wanted: Collection[int] = ()
    sent: dict[tuple[int, int], bytes] = field(default_factory=dict)
    points: dict[int, Point] = field(default_factory=dict)
    done: int = 0

    def __post_init__(self) -> None:
        self._sequences = [0] * self.manifest.shards
        self._replica = Replica(self.manifest)
        self._synced = SyncedState(self.manifest)
        self._unsent = [0] * len(self.manifest.fragments)  # inner steps since each was sent or taken over
        self._inner: InnerState | None = None
        self._global_step = 0
        self._run_steps = self.manifest.config.inner.steps
        self._batches = Batches(self.text, self.manifest.config, lambda: None)

    def until_sent(self, sequence: int, shard: int = 0) -> bytes:
        """Repeat all actions until that contribution to a shard is sent, and return its encoded body.

        Raises:
            ActionError: The actions have a gap before it.
        """
        while self._sequences[shard] <= sequence:
            self._next()
        return self.sent.pop((shard, sequence))

    def until(self, count: int) -> Point:
        """Repeat the first `count` actions and return the state after them. Raises ActionError."""
        while self.done < count:
            self._next()
        try:
            return self.points.pop(count)
        except KeyError:
            raise ActionError(f"{self.who} has already repeated action {count}") from None

    def _next(self) -> None:
        if self.done >= len(self.actions):
            raise ActionError(f"the actions of {self.who} end after {self.done} actions")
        action = self.actions[self.done]
        try:
            self._do(action)
        except (ValueError, IndexError, KeyError, AssertionError) as error:
            what = f"action {self.done} of {self.who}, {word(action)!r:.60}, cannot be repeated ({error!r})"
            raise ActionError(what) from None
        self.done += 1
        if self.done in self.points_wanted:
            self.points[self.done] = self._point()

    def _do(self, action: Action) -> None:
        match action:
            case Join(versions):
                self._join(versions)
            case TakeMoments(who, index):
                self._inner = self._state()._replace(optimizer=self.around.point(who, index).inner.optimizer)
            case RestoreWhole(who, index):
                self._become(self.around.point(who, index))
            case BeginPass(point):
                self._batches.begin(point)
            case ForgetShards(shards):
                self._batches.forget(shards)
            case Steps(count, is_held):
                self._step(count, is_held=is_held)
            case Length(steps):
                self._run_steps = steps
            case Adopt(fragment, version):
                self._adopt(fragment, version)
            case Send(number, codec):
                p = self.manifest.fragment_of(number)
                parts = self._replica.measure(p, self._synced.tensors(p, self._state()), codec)
                self._unsent[p] = 0
                shard = self.manifest.shard_layout.shard_of(number)
                self.sent[shard, self._sequences[shard]] = body_of(parts)
                self._sequences[shard] += 1

    def _state(self) -> InnerState:
        assert self._inner is not None, "the actions do not begin with a join"  # noqa: S101
        return self._inner

    def _point(self) -> Point:
        inner: InnerState = jax.tree.map(jnp.copy, self._state())
        references = list(self._replica.references)
        return Point(inner, references, self._batches.state(), self._global_step, list(self._unsent))

    def _join(self, versions: Sequence[int]) -> None:
        found = [self.around.published(p, version) for p, version in enumerate(versions)]
        self._inner = begin(self.manifest.config.inner, self._replica.begin([vector_N for vector_N, _ in found]))
        self._global_step = max(stamp for _, stamp in found)

    def _become(self, point: Point) -> None:
        self._inner = point.inner
        self._replica.references = list(point.references)
        self._batches.restore(point.batches)
        self._global_step = point.global_step
        self._unsent = list(point.unsent)

    def _step(self, n: int, *, is_held: bool) -> None:
        batch = jnp.asarray(self._batches.next(n))
        is_own = self._run_steps == self.manifest.config.inner.steps
        length = () if is_own else (jnp.asarray(self._run_steps, jnp.int32),)
        step = jnp.asarray(min(self._global_step, self._run_steps), jnp.int32)
        self._inner, _ = self.steps(self._state(), batch, step, *length)
        self._global_step += 0 if is_held else n
        self._unsent = [steps + n for steps in self._unsent]

    def _adopt(self, fragment: int, version: int) -> None:
        new_N, stamp = self.around.published(fragment, version)
        self._inner = self._synced.adopt(self._replica, fragment, self._state(), new_N, self._unsent[fragment])
        if not self._replica.rule.keeps_progress:
            self._unsent[fragment] = 0
        self._global_step = max(self._global_step, stamp)


def corpus_of(who: str, actions: Mapping[str, Sequence[Action]]) -> str:
    """Return the corpus that an incarnation was trained on; empty for the run's.

    The corpus is part of the names of its shards. If no shard names one, the incarnation that it restored is searched.

    Args:
        who: The incarnation.
        actions: The actions of all incarnations.

    Raises:
        ActionError: The shards name several corpora.
    """
    passed: set[str] = set()
    while who in actions and who not in passed:
        passed.add(who)
        shards = [action.shard for action in actions[who] if isinstance(action, BeginPass)]
        names = {shard.rpartition("/")[0] for shard in shards if "/" in shard}
        if len(names) > 1:
            raise ActionError(f"the actions of {who} name several corpora: {', '.join(sorted(names)):.200}")
        if names:
            return names.pop()
        restored = [action.who for action in actions[who] if isinstance(action, RestoreWhole)]
        who = restored[-1] if restored else ""
    return ""


def wanted_points(actions: Mapping[str, Sequence[Action]]) -> dict[str, set[int]]:
    """Return the incarnations whose state other ones took over, and after how many actions."""
    wanted: dict[str, set[int]] = {}
    for mine in actions.values():
        for action in mine:
            if isinstance(action, TakeMoments | RestoreWhole):
                wanted.setdefault(action.who, set()).add(action.index)
    return wanted
