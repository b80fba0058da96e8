"""The coordinator of workers that train in lockstep: a state machine that decides what each worker does next. Pure.

Workers (`lockstep.worker`) decide nothing. Each receives bundles of orders, carries them out in turn, and reports when
a bundle is done; its shared vector is then in its slot. The coordinator learns which workers are ready, gone or cut
off, and hands out bundles. It never fails and learns of a death at once, unlike the coordinators of real systems.

`n` counts exchanges: steps of data-parallel training, or rounds of DiLoCo. A worker's slot and its files alternate
between two places by the parity of `n`, so that nothing is overwritten while others still read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

Method = Literal["data-parallel", "elastic data-parallel", "synchronous DiLoCo"]
METHODS: tuple[Method, ...] = get_args(Method)
Action = Literal["begin", "load", "step", "share", "merge", "save", "save own"]
#: The name of the file that holds the final shared state.
FINAL = "final"


@dataclass(frozen=True)
class Order:
    """One thing for a worker to do.

    Attributes:
        what: `begin` from the first parameters; `load` the shared state from `file` and the own state from `own`;
            make a `step`; `share` the result in slot `n`; `merge` what `members` share in slot `n`; `save` the shared
            state, or `save own` state, into `file`.
        n: The exchange, or for `step` the number of steps before it.
        members: The workers whose slots are merged.
        file: Name of the file to read or write.
        own: Name of the file with the worker's own state.
    """

    what: Action
    n: int = 0
    members: tuple[str, ...] = ()
    file: str = ""
    own: str = ""


@dataclass(frozen=True)
class Bundle:
    """Orders for the worker `to`, which reports the ticket once they are done."""

    to: str
    ticket: int
    orders: tuple[Order, ...]

    def has(self, what: Action) -> bool:
        """Return whether the bundle contains an order of that kind."""
        return any(order.what == what for order in self.orders)


@dataclass(frozen=True)
class Step:
    """A step that a worker has made, and its time."""

    at: float
    worker: str


@dataclass
class Ledger:
    """The steps that were made, and those that are in the parameters.

    Attributes:
        made: All steps, including those that were rolled back.
        curve: (time, steps in the parameters from then on).
    """

    made: list[Step] = field(default_factory=list)
    curve: list[tuple[float, int]] = field(default_factory=list)
    _exchanges: list[tuple[int, tuple[Step, ...]]] = field(default_factory=list)
    _count: int = 0

    @property
    def useful(self) -> list[Step]:
        """The steps that are in the parameters."""
        return [step for _, steps in self._exchanges for step in steps]

    def commit(self, n: int, steps: Iterable[Step], now: float) -> None:
        """Add the steps of the n-th exchange to the parameters."""
        self._exchanges.append((n, tuple(steps)))
        self._count += len(self._exchanges[-1][1])
        self.curve.append((now, self._count))

    def roll_back(self, n: int, now: float) -> None:
        """Return to the parameters after `n` exchanges."""
        while self._exchanges and self._exchanges[-1][0] > n:
            self._count -= len(self._exchanges.pop()[1])
        self.curve.append((now, self._count))


class Coordinator:
    """The state that all methods need: the workers that are up, their last bundles, and the links that are cut.

    Attributes:
        names: All workers.
        ledger: The steps so far.
        n: The number of exchanges so far.
        ending: Whether `end` was called.
        final: After the end, the file with the final shared state; "" for the first parameters.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.ledger = Ledger()
        self.n = 0
        self.ending = False
        self.final: str | None = None
        self._up: dict[str, Bundle | None] = {}
        self._busy: set[str] = set()
        self._cut: set[str] = set()
        self._tickets = 0
        self._out: list[Bundle] = []

    def take(self) -> list[Bundle]:
        """Return the bundles to send, in order, and forget them."""
        out, self._out = self._out, []
        return out

    def add(self, name: str, now: float) -> None:
        """Register a new process of that worker, which is ready to train."""
        self._up[name] = None
        self._added(name, now)

    def remove(self, name: str, now: float) -> None:
        """Note that the process of that worker is gone."""
        if name in self._up and self.final is None:
            del self._up[name]
            self._busy.discard(name)
            self._removed(name, now)

    def complete(self, name: str, ticket: int, steps: int, now: float) -> None:
        """Note that a worker has done a bundle with `steps` steps.

        If a newer bundle has replaced it, only its steps are recorded.
        """
        self.ledger.made += [Step(now, name)] * steps
        bundle = self._up.get(name)
        if bundle is not None and bundle.ticket == ticket and self.final is None:
            self._busy.discard(name)
            self._completed(name, bundle, now)

    def cut(self, name: str) -> None:
        """Note that a worker is cut off. Its shared vectors do not count until its link heals."""
        self._cut.add(name)

    def heal(self, name: str, now: float) -> None:
        """Note that a worker's link works again."""
        self._cut.discard(name)
        self._advance(now)

    def tick(self, now: float) -> None:
        """Check timeouts. Call this regularly."""

    def end(self, now: float) -> None:
        """Stop training. `final` will then name the parameters, perhaps after more bundles."""
        self.ending = True
        self._finish(now)

    def _send(self, name: str, *orders: Order) -> None:
        self._tickets += 1
        bundle = Bundle(name, self._tickets, orders)
        self._up[name] = bundle
        self._busy.add(name)
        self._out.append(bundle)

    def _added(self, name: str, now: float) -> None:
        raise NotImplementedError

    def _removed(self, name: str, now: float) -> None:
        raise NotImplementedError

    def _completed(self, name: str, bundle: Bundle, now: float) -> None:
        raise NotImplementedError

    def _advance(self, now: float) -> None:
        """Begin the next exchange if no worker is missing."""
        raise NotImplementedError

    def _finish(self, now: float) -> None:
        raise NotImplementedError
