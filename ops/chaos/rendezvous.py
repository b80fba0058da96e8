"""Who of a group that trains in step does what next: three ways to train, as state machines. Pure: times are arguments.

Workers (`ops.lockstep`) decide nothing. Each is given bundles of orders, does them in turn, and says when it is done
with one; what it has to share lies in its slot by then. The group hears who comes (compiled, ready to train), who is
gone, whose link is cut, and gives out bundles. It is never gone itself, and hears of a death at once: real ones have
to find out, and to meet again.

Numbers: `n` counts exchanges, which are steps of data-parallel and rounds of DiLoCo. A worker's slot and its files
alternate between two places by the parity of n, so that what others still read is never written.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from archipelago.broker.errors import ConfigError

TIMEOUT_SECONDS = 1.0
"""An elastic group goes on without who is so late, over the longest step. Real ones wait for 10 s and more."""

Way = Literal["data-parallel", "elastic data-parallel", "synchronous DiLoCo"]
WAYS: tuple[Way, ...] = get_args(Way)
What = Literal["begin", "load", "work", "offer", "merge", "keep", "keep own"]


@dataclass(frozen=True)
class Order:
    """One thing for a worker to do.

    `begin` anew, or `load` what `file` and then its `own` hold; `work`: a step, of which `n` were made before;
    `offer` the result into slot `n`; `merge` what `members` offered in slot `n`; `keep` what all have, or its own
    part of it, in `file`.
    """

    what: What
    n: int = 0
    members: tuple[str, ...] = ()
    file: str = ""
    own: str = ""


@dataclass(frozen=True)
class Bundle:
    """Orders for one worker. It answers with the ticket."""

    to: str
    ticket: int
    orders: tuple[Order, ...]

    def has(self, what: What) -> bool:
        """Whether that is among them."""
        return any(order.what == what for order in self.orders)


@dataclass(frozen=True)
class Step:
    """A step that a worker made, and when."""

    at: float
    worker: str


@dataclass
class Ledger:
    """Which steps are in the parameters, and how many there were at what time."""

    made: list[Step] = field(default_factory=list)
    """all of them, also those that were taken back"""
    curve: list[tuple[float, int]] = field(default_factory=list)
    """(when, steps in the parameters from then on)"""
    _exchanges: list[tuple[int, tuple[Step, ...]]] = field(default_factory=list)
    _count: int = 0

    @property
    def useful(self) -> list[Step]:
        """The steps that are in the parameters."""
        return [step for _, steps in self._exchanges for step in steps]

    def put(self, n: int, steps: Iterable[Step], now: float) -> None:
        """The exchange that makes n of them brought these into the parameters."""
        self._exchanges.append((n, tuple(steps)))
        self._count += len(self._exchanges[-1][1])
        self.curve.append((now, self._count))

    def back_to(self, n: int, now: float) -> None:
        """The parameters are those after n exchanges again."""
        while self._exchanges and self._exchanges[-1][0] > n:
            self._count -= len(self._exchanges.pop()[1])
        self.curve.append((now, self._count))


class Group:
    """What the three ways share: who is up, what each was given last, whose link is cut."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.ledger = Ledger()
        self.n = 0
        self.ending = False
        self.final: str | None = None
        """once it has ended: the file with what all have, `` for what they began with"""
        self._up: dict[str, Bundle | None] = {}
        self._busy: set[str] = set()
        self._cut: set[str] = set()
        self._tickets = 0
        self._out: list[Bundle] = []

    def take(self) -> list[Bundle]:
        """The bundles that are to be given out, in order."""
        out, self._out = self._out, []
        return out

    def comes(self, name: str, now: float) -> None:
        """A new process by that name is ready to train."""
        self._up[name] = None
        self._came(name, now)

    def goes(self, name: str, now: float) -> None:
        """Its process is gone."""
        if name in self._up and self.final is None:
            del self._up[name]
            self._busy.discard(name)
            self._went(name, now)

    def done(self, name: str, ticket: int, steps: int, now: float) -> None:
        """It has done that bundle, `steps` among it. Of an older one than it was given last, only steps count."""
        self.ledger.made += [Step(now, name)] * steps
        bundle = self._up.get(name)
        if bundle is not None and bundle.ticket == ticket and self.final is None:
            self._busy.discard(name)
            self._did(name, bundle, now)

    def cut(self, name: str) -> None:
        """It cannot be reached: what it offers does not count until its link is healed."""
        self._cut.add(name)

    def heal(self, name: str, now: float) -> None:
        """It can be reached again."""
        self._cut.discard(name)
        self._look(now)

    def tick(self, now: float) -> None:
        """Time passes."""

    def end(self, now: float) -> None:
        """No step more: says in `final`, sooner or later, where the parameters are."""
        self.ending = True
        self._finish(now)

    def _give(self, name: str, *orders: Order) -> None:
        self._tickets += 1
        bundle = Bundle(name, self._tickets, orders)
        self._up[name] = bundle
        self._busy.add(name)
        self._out.append(bundle)

    def _came(self, name: str, now: float) -> None:
        raise NotImplementedError

    def _went(self, name: str, now: float) -> None:
        raise NotImplementedError

    def _did(self, name: str, bundle: Bundle, now: float) -> None:
        raise NotImplementedError

    def _look(self, now: float) -> None:
        """Goes on where nobody is missing any more."""
        raise NotImplementedError

    def _finish(self, now: float) -> None:
        raise NotImplementedError


class _Parallel(Group):
    """Data-parallel: a step is an exchange; every so many steps one worker keeps what all have."""

    def __init__(self, names: Sequence[str], keep_every: int) -> None:
        super().__init__(names)
        self._keep_every = keep_every
        self._kept, self._kept_in = 0, ""
        self._arrived: dict[str, float] = {}

    def _step(self) -> tuple[Order, ...]:
        return Order("work", self.n), Order("offer", self.n + 1)

    def _first(self) -> Order:
        return Order("load", self._kept, file=self._kept_in) if self._kept else Order("begin")

    def _checkpoint(self, name: str) -> tuple[Order, ...]:
        """Where it is due. Never into the file of the last one, nor one of another's: who was dropped, and wakes up in
        the middle of this, spoils nobody's.
        """
        if self.n - self._kept < self._keep_every:
            return ()
        return (Order("keep", self.n, file=f"checkpoint-{name}-{0 if self._kept_in.endswith('1') else 1}"),)

    def _note_kept(self, bundle: Bundle) -> None:
        for order in bundle.orders:
            if order.what == "keep" and order.file.startswith("checkpoint"):
                self._kept, self._kept_in = order.n, order.file
            elif order.what == "keep" and order.file == FINAL:
                self.final = FINAL

    def _back(self, now: float) -> None:
        self.n = self._kept
        self._arrived.clear()
        self.ledger.back_to(self.n, now)

    def _commit(self, now: float) -> None:
        self.n += 1
        self.ledger.put(self.n, (Step(at, name) for name, at in self._arrived.items()), now)
        self._arrived.clear()


FINAL = "final"


class DataParallel(_Parallel):
    """Without elasticity: a step needs everybody; after a death all go back to the checkpoint, once all are there."""

    def _came(self, name: str, now: float) -> None:
        if len(self._up) == len(self.names) and not self.ending:
            for each in self.names:
                self._give(each, self._first(), *self._step())

    def _went(self, name: str, now: float) -> None:
        self._back(now)
        for each in self._up:
            self._up[each] = None  # what they are at is for nothing
        if self.ending:
            self._finish(now)

    def _did(self, name: str, bundle: Bundle, now: float) -> None:
        self._note_kept(bundle)
        if bundle.has("offer"):
            self._arrived[name] = now
            self._look(now)

    def _look(self, now: float) -> None:
        if self.ending or self._cut or len(self._arrived) < len(self.names):
            return
        members = tuple(self.names)
        self._commit(now)
        for name in self.names:
            keep = self._checkpoint(name) if name == self.names[0] else ()
            self._give(name, Order("merge", self.n, members), *keep, *self._step())

    def _finish(self, now: float) -> None:
        if len(self._up) == len(self.names):
            self._give(self.names[0], Order("keep", self.n, file=FINAL))
        else:
            self.final = self._kept_in


class Elastic(_Parallel):
    """Whoever is there makes the step. Who comes gets what all have from a member, between two steps.

    Late is who has not arrived a while after all others; who is dropped, and was alive after all, comes anew.
    """

    def __init__(self, names: Sequence[str], keep_every: int, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        super().__init__(names, keep_every)
        self._timeout_seconds = timeout_seconds
        self._members: list[str] = []
        self._coming: list[str] = []
        self._begun = False
        self._giver = ""

    def _came(self, name: str, now: float) -> None:
        self._coming.append(name)
        self._begin_again(now)

    def _begin_again(self, now: float) -> None:
        """Where nobody has the parameters: from the checkpoint; the very first time once all are there."""
        self._begun = self._begun or len(self._coming) == len(self.names)
        coming = [name for name in self._coming if name not in self._cut]
        if self._members or self.ending or not self._begun or not coming:
            return
        self._back(now)
        self._giver = ""
        self._members = sorted(coming, key=self.names.index)
        self._coming = [name for name in self._coming if name in self._cut]
        for name in self._members:
            self._give(name, self._first(), *self._step())

    def _went(self, name: str, now: float) -> None:
        for some in (self._members, self._coming):
            if name in some:
                some.remove(name)
        self._arrived.pop(name, None)
        if not self._members:
            self._back(now)
            self._begin_again(now)
        if self.ending:
            self._finish(now)
        else:
            self._look(now)

    def _did(self, name: str, bundle: Bundle, now: float) -> None:
        if name not in self._members:
            if name not in self._coming:
                self._coming.append(name)
            self._begin_again(now)
            return
        self._note_kept(bundle)
        self._arrived[name] = now
        self._look(now)

    def heal(self, name: str, now: float) -> None:
        """It can be reached again."""
        super().heal(name, now)
        self._begin_again(now)

    def tick(self, now: float) -> None:
        """Drops who is late."""
        there = [at for name, at in self._arrived.items() if name not in self._cut]
        if self.ending or not there or now - max(there) < self._timeout_seconds:
            return
        for name in [n for n in self._members if n not in self._arrived or n in self._cut]:
            self._members.remove(name)
            if self._arrived.pop(name, None) is not None:
                self._coming.append(name)  # it waits already, and cannot be reached
        self._look(now)

    def _look(self, now: float) -> None:
        there = [name for name in self._members if name in self._arrived and name not in self._cut]
        if self.ending or not there or len(there) < len(self._members):
            return
        if self._giver:
            self._admit(now)
            return
        members = tuple(self._members)
        self._commit(now)
        merge = Order("merge", self.n, members)
        first, *others = members
        if any(name not in self._cut for name in self._coming):
            self._giver = first
            self._give(first, merge, Order("keep", self.n, file=_given(first)))
            for name in others:
                self._give(name, merge)
            return
        self._give(first, merge, *self._checkpoint(first), *self._step())
        for name in others:
            self._give(name, merge, *self._step())

    def _admit(self, now: float) -> None:
        """All members have merged, and one has kept it for those who come."""
        self._arrived.clear()
        if self._giver not in self._members:
            self._giver = self._members[0]
            self._arrived = dict.fromkeys(self._members[1:], now)
            self._give(self._giver, Order("keep", self.n, file=_given(self._giver)))
            return
        load, self._giver = Order("load", self.n, file=_given(self._giver)), ""
        for name in self._members:
            self._give(name, *self._step())
        for name in [name for name in self._coming if name not in self._cut]:
            self._coming.remove(name)
            self._members.append(name)
            self._give(name, load, *self._step())
        self._members.sort(key=self.names.index)

    def _finish(self, now: float) -> None:
        if self._members:
            self._give(self._members[0], Order("keep", self.n, file=FINAL))
        elif self.final is None:
            self.final = self._kept_in


def _given(name: str) -> str:
    return f"given-{name}"


class Diloco(Group):
    """Synchronous DiLoCo (arXiv 2311.08105): H steps of everybody's own, then one outer step on the average of all.

    Who dies begins its round again: with the round's parameters, and with its own moments and place in the text as
    they were at the end of the round before. In the end a round closes early, with what everybody has.
    """

    def __init__(self, names: Sequence[str], interval: int) -> None:
        super().__init__(names)
        self._interval = interval
        self._steps: dict[str, list[Step]] = {}
        self._arrived: list[str] = []
        self._kept: dict[str, int] = {}
        """by worker, the newest round of which its file has what all have"""
        self._waiting: list[str] = []

    def _came(self, name: str, now: float) -> None:
        self._waiting.append(name)
        self._enter(now)

    def _went(self, name: str, now: float) -> None:
        self._steps.pop(name, None)
        for some in (self._arrived, self._waiting):
            if name in some:
                some.remove(name)
        if self.ending:
            self._finish(now)
        else:
            self._enter(now)

    def _enter(self, now: float) -> None:
        """Those who wait begin the round, from a file of anybody's; the one before, where nobody lived to keep it."""
        if self.ending or not self._waiting:
            return
        if self.n and not self._giver() and len(self._waiting) == len(self._up):
            self._back(now)
        giver = self._giver()
        if self.n and not giver:
            return  # somebody is about to keep it
        for name in self._waiting:
            self._steps[name] = []
            load = Order("load", self.n, file=self._common(giver), own=self._own(name, self.n))
            self._give(name, load if self.n else Order("begin"), *self._step(name))
        self._waiting.clear()

    def _back(self, now: float) -> None:
        self.n = max(self._kept.values(), default=0)
        self.ledger.back_to(self.n, now)

    def _giver(self) -> str:
        return next((name for name, n in self._kept.items() if n == self.n), "")

    def _common(self, name: str) -> str:
        return f"common-{name}-{self.n % 2}"

    def _own(self, name: str, n: int) -> str:
        return f"own-{name}-{n % 2}"

    def _step(self, name: str) -> tuple[Order, ...]:
        made = len(self._steps[name])
        work = Order("work", self.n * self._interval + made)
        return (work, *self._offer(name)) if made + 1 == self._interval else (work,)

    def _offer(self, name: str) -> tuple[Order, ...]:
        """Its own part is kept first: once the round closes, it is there for the next."""
        return Order("keep own", self.n + 1, file=self._own(name, self.n + 1)), Order("offer", self.n + 1)

    def _did(self, name: str, bundle: Bundle, now: float) -> None:
        for order in bundle.orders:
            if order.what == "keep":
                self._kept[name] = order.n
                self._enter(now)
        if bundle.has("work"):
            self._steps[name].append(Step(now, name))
        if bundle.has("offer"):
            self._arrived.append(name)
        elif not self.ending:
            self._give(name, *self._step(name))
        self._look(now)

    def _look(self, now: float) -> None:
        if self.ending:
            self._finish(now)
        elif not self._cut and len(self._arrived) == len(self.names):
            self._close(now)

    def _close(self, now: float) -> None:
        members = tuple(name for name in self.names if name in self._arrived)
        self.n += 1
        self.ledger.put(self.n, (step for name in members for step in self._steps[name]), now)
        self._arrived.clear()
        for name in members:
            self._steps[name] = []
            after = () if self.ending else self._step(name)
            self._give(name, Order("merge", self.n, members), Order("keep", self.n, file=self._common(name)), *after)

    def _finish(self, now: float) -> None:
        """Who is in the middle of a round offers what it has, once it is done with its step; then it closes."""
        for name, steps in self._steps.items():
            if steps and name not in self._arrived and name not in self._busy:
                self._give(name, *self._offer(name))
        if self._busy:
            return
        if self._arrived:
            self._close(now)
            return
        if self.n and not self._giver():
            self._back(now)
        self.final = self._common(self._giver()) if self.n else ""


@dataclass(frozen=True)
class Setting:
    """What the workers of a group have in common."""

    way: Way
    config: str
    """the run's, as JSON"""
    names: tuple[str, ...]
    step_seconds: Mapping[str, float]
    exchange: str
    """a folder in memory: the socket and the slots"""
    folder: str
    """where files are kept"""
    outer_rate: float
    outer_momentum: float
    """of DiLoCo's Nesterov step"""

    @property
    def socket(self) -> str:
        """Where orders come from."""
        return f"{self.exchange}/socket"

    def to_text(self) -> str:
        """One JSON object, which `from_text` reads back."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Setting:
        """Raises ConfigError."""
        try:
            values = json.loads(text)
            return cls(**{**values, "names": tuple(values["names"])})
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"that is no setting of a group ({error!r:.80})", "`archipelago chaos --baselines` writes one."
            ) from None


def group_of(setting: Setting, interval: int, checkpoint_seconds: float) -> Group:
    """The state machine of that way. `interval`: H; checkpoints are so many seconds of undisturbed steps apart."""
    longest = max(setting.step_seconds.values())
    keep_every = max(1, math.ceil(checkpoint_seconds / longest))
    match setting.way:
        case "data-parallel":
            return DataParallel(setting.names, keep_every)
        case "elastic data-parallel":
            return Elastic(setting.names, keep_every, TIMEOUT_SECONDS + longest)
        case "synchronous DiLoCo":
            return Diloco(setting.names, interval)
