"""An island done again from its actions: the same batches, steps, adoptions and sendings, without Redis and clocks.

Pure but for the device: published parameters, their stamps and other islands' states come from whoever replays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from archipelago.broker.codecs import Vector, body_of
from archipelago.broker.errors import ArchipelagoError
from archipelago.broker.manifest import Manifest
from archipelago.islands.data.batches import Batches
from archipelago.islands.data.tokenizer import Tokens
from archipelago.islands.inner import InnerState, InnerSteps, begin
from archipelago.islands.sync.replica import Replica


class ActionError(ArchipelagoError):
    """The actions have a gap, or an action that cannot be done."""


@dataclass(frozen=True)
class Point:
    """All that an incarnation was after so many of its actions."""

    inner: InnerState
    references: Sequence[jax.Array]
    batches: dict[str, int | str]
    global_step: int


@dataclass(frozen=True)
class Surroundings:
    """What an island learns from others. `published(p, version)` gives float32 [N] and its stamp, a global step."""

    published: Callable[[int, int], tuple[Vector, int]]
    point: Callable[[str, int], Point]
    """what another incarnation (`ISLAND/INCARNATION`) was after that many actions"""


@dataclass
class Redone:
    """One incarnation. `sent` holds the body of what it measured, by sequence number, until it is taken."""

    who: str
    actions: Sequence[str]
    manifest: Manifest
    steps: InnerSteps
    text: Tokens
    around: Surroundings
    points_wanted: Collection[int] = ()
    """after how many actions somebody else will want to know what it was"""
    sent: dict[int, bytes] = field(default_factory=dict)
    points: dict[int, Point] = field(default_factory=dict)
    done: int = 0

    def __post_init__(self) -> None:
        self._sequence = 0
        self._replica = Replica(self.manifest)
        self._inner: InnerState | None = None
        self._global_step = 0
        self._batches = Batches(self.text, self.manifest.config, lambda: None)

    def until_sent(self, sequence: int) -> bytes:
        """Does what it did until it sent that contribution; its body, as the codec encodes it. Raises ActionError."""
        while self._sequence <= sequence:
            self._next()
        return self.sent.pop(sequence)

    def until(self, count: int) -> Point:
        """What it was after that many actions. Raises ActionError."""
        while self.done < count:
            self._next()
        try:
            return self.points.pop(count)
        except KeyError:
            raise ActionError(f"{self.who} is past its action {count}") from None

    def _next(self) -> None:
        if self.done >= len(self.actions):
            raise ActionError(f"the actions of {self.who} end after {self.done} actions")
        action = self.actions[self.done]
        try:
            self._do(action)
        except (ValueError, IndexError, KeyError, AssertionError) as error:
            raise ActionError(f"action {self.done} of {self.who}, {action!r:.60}, cannot be done ({error!r})") from None
        self.done += 1
        if self.done in self.points_wanted:
            self.points[self.done] = self._point()

    def _do(self, action: str) -> None:
        kind, rest = action[:1], action[1:]
        word, _, value = action.partition(":")
        if word == "join":
            self._join([int(version) for version in value.split(",")])
        elif word == "moments":
            self._inner = self._state()._replace(optimizer=self._other(value).inner.optimizer)
        elif word == "whole":
            self._become(self._other(value))
        elif kind == "d":
            self._batches.begin(rest)
        elif kind == "f":
            self._batches.forget(rest.split(","))
        elif kind == "n":
            self._step(int(rest))
        elif kind == "a":
            fragment, _, version = rest.partition(":")
            self._adopt(int(fragment), int(version))
        elif kind == "s":
            number, _, name = rest.partition(":")
            p = self.manifest.fragment_of(int(number))
            parts = self._replica.measure(p, self._state().params, name)
            self.sent[self._sequence] = body_of(parts)
            self._sequence += 1
        else:
            raise ValueError("unknown")

    def _state(self) -> InnerState:
        assert self._inner is not None, "it never joined"  # noqa: S101
        return self._inner

    def _other(self, value: str) -> Point:
        who, _, count = value.partition("@")
        return self.around.point(who, int(count))

    def _point(self) -> Point:
        inner: InnerState = jax.tree.map(jnp.copy, self._state())
        return Point(inner, list(self._replica.references), self._batches.state(), self._global_step)

    def _join(self, versions: Sequence[int]) -> None:
        found = [self.around.published(p, version) for p, version in enumerate(versions)]
        self._inner = begin(self.manifest.config.inner, self._replica.begin([vector_N for vector_N, _ in found]))
        self._global_step = max(stamp for _, stamp in found)

    def _become(self, point: Point) -> None:
        self._inner = point.inner
        self._replica.references = list(point.references)
        self._batches.restore(point.batches)
        self._global_step = point.global_step

    def _step(self, n: int) -> None:
        batch = jnp.asarray(self._batches.next(n))
        self._inner, _ = self.steps(self._state(), batch, jnp.asarray(self._global_step, jnp.int32))
        self._global_step += n

    def _adopt(self, fragment: int, version: int) -> None:
        new_N, stamp = self.around.published(fragment, version)
        params = self._replica.adopt(fragment, self._state().params, new_N)
        self._inner = self._state()._replace(params=params)
        self._global_step = max(self._global_step, stamp)


def corpus_of(who: str, actions: Mapping[str, Sequence[str]]) -> str:
    """The corpus that an incarnation trained on, as its shards name it, from everybody's actions; empty for the run's.

    Where no shard names one, it reads on where the incarnation was that it took over `whole`. Raises ActionError.
    """
    passed: set[str] = set()
    while who in actions and who not in passed:
        passed.add(who)
        shards = [action[1:].partition(":")[0] for action in actions[who] if action[:1] == "d"]
        names = {shard.rpartition("/")[0] for shard in shards if "/" in shard}
        if len(names) > 1:
            raise ActionError(f"the actions of {who} name the corpora {', '.join(sorted(names)):.200}: it has one")
        if names:
            return names.pop()
        taken = [action for action in actions[who] if action.startswith("whole:")]
        who = taken[-1].partition(":")[2].partition("@")[0] if taken else ""
    return ""


def wanted_points(actions: dict[str, Any]) -> dict[str, set[int]]:
    """Which incarnations' states others took over, and after how many actions, from everybody's actions."""
    wanted: dict[str, set[int]] = {}
    for mine in actions.values():
        for action in mine:
            word, _, value = action.partition(":")
            if word in ("moments", "whole"):
                who, _, count = value.partition("@")
                wanted.setdefault(who, set()).add(int(count))
    return wanted
