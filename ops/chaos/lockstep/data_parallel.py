"""Coordinators of data-parallel training, with a fixed group of workers and with an elastic one. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from archipelago.ops.chaos.lockstep.coordinator import FINAL, Bundle, Coordinator, Order, Step

#: An elastic group drops a worker that is late by more than this and the longest step. Real systems wait for 10 s
#: and more.
TIMEOUT_SECONDS = 1.0


class _Synchronous(Coordinator):
    """Every step is an exchange. After every `save_every` steps, one worker saves the shared state."""

    def __init__(self, names: Sequence[str], save_every: int) -> None:
        super().__init__(names)
        self._save_every = save_every
        self._saved, self._saved_in = 0, ""
        self._arrived: dict[str, float] = {}

    def _step(self) -> tuple[Order, ...]:
        return Order("step", self.n), Order("share", self.n + 1)

    def _first(self) -> Order:
        return Order("load", self._saved, file=self._saved_in) if self._saved else Order("begin")

    def _checkpoint(self, name: str) -> tuple[Order, ...]:
        """Return the order that saves a checkpoint, if one is due.

        The file is neither that of the last checkpoint nor one of another worker. So a worker that was dropped and
        wakes up while it saves cannot damage a checkpoint.
        """
        if self.n - self._saved < self._save_every:
            return ()
        return (Order("save", self.n, file=f"checkpoint-{name}-{0 if self._saved_in.endswith('1') else 1}"),)

    def _note_saved(self, bundle: Bundle) -> None:
        for order in bundle.orders:
            if order.what == "save" and order.file.startswith("checkpoint"):
                self._saved, self._saved_in = order.n, order.file
            elif order.what == "save" and order.file == FINAL:
                self.final = FINAL

    def _roll_back(self, now: float) -> None:
        self.n = self._saved
        self._arrived.clear()
        self.ledger.roll_back(self.n, now)

    def _commit(self, now: float) -> None:
        self.n += 1
        self.ledger.commit(self.n, (Step(at, name) for name, at in self._arrived.items()), now)
        self._arrived.clear()


class DataParallel(_Synchronous):
    """A fixed group, in which a step needs all workers. After a death, all load the checkpoint once all are present."""

    def _added(self, name: str, now: float) -> None:
        if len(self._up) == len(self.names) and not self.ending:
            for each in self.names:
                self._send(each, self._first(), *self._step())

    def _removed(self, name: str, now: float) -> None:
        self._roll_back(now)
        for each in self._up:
            self._up[each] = None  # Their present bundles belong to steps that were rolled back.
        if self.ending:
            self._finish(now)

    def _completed(self, name: str, bundle: Bundle, now: float) -> None:
        self._note_saved(bundle)
        if bundle.has("share"):
            self._arrived[name] = now
            self._advance(now)

    def _advance(self, now: float) -> None:
        if self.ending or self._cut or len(self._arrived) < len(self.names):
            return
        members = tuple(self.names)
        self._commit(now)
        for name in self.names:
            save = self._checkpoint(name) if name == self.names[0] else ()
            self._send(name, Order("merge", self.n, members), *save, *self._step())

    def _finish(self, now: float) -> None:
        if len(self._up) == len(self.names):
            self._send(self.names[0], Order("save", self.n, file=FINAL))
        else:
            self.final = self._saved_in


class Elastic(_Synchronous):
    """An elastic group: the present members make the step, and new ones get the state from a member between two steps.

    A member is dropped if it has not arrived some time after the others. If it was alive after all, it joins again.
    """

    def __init__(self, names: Sequence[str], save_every: int, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        super().__init__(names, save_every)
        self._timeout_seconds = timeout_seconds
        self._members: list[str] = []
        self._joining: list[str] = []
        self._begun = False
        self._donor = ""

    def _added(self, name: str, now: float) -> None:
        self._joining.append(name)
        self._begin_again(now)

    def _begin_again(self, now: float) -> None:
        """If no member is left, load the checkpoint. The first time, wait until all workers are there."""
        self._begun = self._begun or len(self._joining) == len(self.names)
        joining = [name for name in self._joining if name not in self._cut]
        if self._members or self.ending or not self._begun or not joining:
            return
        self._roll_back(now)
        self._donor = ""
        self._members = sorted(joining, key=self.names.index)
        self._joining = [name for name in self._joining if name in self._cut]
        for name in self._members:
            self._send(name, self._first(), *self._step())

    def _removed(self, name: str, now: float) -> None:
        for group in (self._members, self._joining):
            if name in group:
                group.remove(name)
        self._arrived.pop(name, None)
        if not self._members:
            self._roll_back(now)
            self._begin_again(now)
        if self.ending:
            self._finish(now)
        else:
            self._advance(now)

    def _completed(self, name: str, bundle: Bundle, now: float) -> None:
        if name not in self._members:
            if name not in self._joining:
                self._joining.append(name)
            self._begin_again(now)
            return
        self._note_saved(bundle)
        self._arrived[name] = now
        self._advance(now)

    def heal(self, name: str, now: float) -> None:
        """Note that a worker's link works again."""
        super().heal(name, now)
        self._begin_again(now)

    def tick(self, now: float) -> None:
        """Drop the members that are late."""
        there = [at for name, at in self._arrived.items() if name not in self._cut]
        if self.ending or not there or now - max(there) < self._timeout_seconds:
            return
        for name in [n for n in self._members if n not in self._arrived or n in self._cut]:
            self._members.remove(name)
            if self._arrived.pop(name, None) is not None:
                self._joining.append(name)  # It is alive but cut off, and already waits.
        self._advance(now)

    def _advance(self, now: float) -> None:
        there = [name for name in self._members if name in self._arrived and name not in self._cut]
        if self.ending or not there or len(there) < len(self._members):
            return
        if self._donor:
            self._admit(now)
            return
        members = tuple(self._members)
        self._commit(now)
        merge = Order("merge", self.n, members)
        first, *others = members
        if any(name not in self._cut for name in self._joining):
            self._donor = first
            self._send(first, merge, Order("save", self.n, file=_donated(first)))
            for name in others:
                self._send(name, merge)
            return
        self._send(first, merge, *self._checkpoint(first), *self._step())
        for name in others:
            self._send(name, merge, *self._step())

    def _admit(self, now: float) -> None:
        """Admit the joining workers: all members have merged, and the donor has saved the state for them."""
        self._arrived.clear()
        if self._donor not in self._members:
            self._donor = self._members[0]
            self._arrived = dict.fromkeys(self._members[1:], now)
            self._send(self._donor, Order("save", self.n, file=_donated(self._donor)))
            return
        load, self._donor = Order("load", self.n, file=_donated(self._donor)), ""
        for name in self._members:
            self._send(name, *self._step())
        for name in [name for name in self._joining if name not in self._cut]:
            self._joining.remove(name)
            self._members.append(name)
            self._send(name, load, *self._step())
        self._members.sort(key=self.names.index)

    def _finish(self, now: float) -> None:
        if self._members:
            self._send(self._members[0], Order("save", self.n, file=FINAL))
        elif self.final is None:
            self.final = self._saved_in


def _donated(name: str) -> str:
    return f"donated-{name}"
