"""The coordinator of synchronous DiLoCo (arXiv 2311.08105). Pure."""

from __future__ import annotations

from collections.abc import Sequence

from archipelago.ops.chaos.lockstep.coordinator import Bundle, Coordinator, Order, Step


class Diloco(Coordinator):
    """Each worker makes H inner steps; then one outer step moves to the mean of all parameters.

    A killed worker begins its round again, with the round's parameters and with the moments and text position that it
    had at the end of the round before. At the end, a round closes early with the steps that each worker has made.
    """

    def __init__(self, names: Sequence[str], interval: int) -> None:
        super().__init__(names)
        self._interval = interval
        self._steps: dict[str, list[Step]] = {}
        self._arrived: list[str] = []
        #: The newest round whose shared state each worker has saved.
        self._saved: dict[str, int] = {}
        self._waiting: list[str] = []

    def _added(self, name: str, now: float) -> None:
        self._waiting.append(name)
        self._enter(now)

    def _removed(self, name: str, now: float) -> None:
        self._steps.pop(name, None)
        for group in (self._arrived, self._waiting):
            if name in group:
                group.remove(name)
        if self.ending:
            self._finish(now)
        else:
            self._enter(now)

    def _enter(self, now: float) -> None:
        """Let the waiting workers begin the round from any worker's file.

        If no worker lived to save this round, all go back to the round before it.
        """
        if self.ending or not self._waiting:
            return
        if self.n and not self._donor() and len(self._waiting) == len(self._up):
            self._roll_back(now)
        donor = self._donor()
        if self.n and not donor:
            return  # A living worker is about to save it.
        for name in self._waiting:
            self._steps[name] = []
            load = Order("load", self.n, file=self._shared_file(donor), own=self._own_file(name, self.n))
            self._send(name, load if self.n else Order("begin"), *self._step(name))
        self._waiting.clear()

    def _roll_back(self, now: float) -> None:
        self.n = max(self._saved.values(), default=0)
        self.ledger.roll_back(self.n, now)

    def _donor(self) -> str:
        return next((name for name, n in self._saved.items() if n == self.n), "")

    def _shared_file(self, name: str) -> str:
        return f"shared-{name}-{self.n % 2}"

    def _own_file(self, name: str, n: int) -> str:
        return f"own-{name}-{n % 2}"

    def _step(self, name: str) -> tuple[Order, ...]:
        made = len(self._steps[name])
        step = Order("step", self.n * self._interval + made)
        return (step, *self._share(name)) if made + 1 == self._interval else (step,)

    def _share(self, name: str) -> tuple[Order, ...]:
        """The own state is saved first, because the next round may need it as soon as this one closes."""
        return Order("save own", self.n + 1, file=self._own_file(name, self.n + 1)), Order("share", self.n + 1)

    def _completed(self, name: str, bundle: Bundle, now: float) -> None:
        for order in bundle.orders:
            if order.what == "save":
                self._saved[name] = order.n
                self._enter(now)
        if bundle.has("step"):
            self._steps[name].append(Step(now, name))
        if bundle.has("share"):
            self._arrived.append(name)
        elif not self.ending:
            self._send(name, *self._step(name))
        self._advance(now)

    def _advance(self, now: float) -> None:
        if self.ending:
            self._finish(now)
        elif not self._cut and len(self._arrived) == len(self.names):
            self._close(now)

    def _close(self, now: float) -> None:
        members = tuple(name for name in self.names if name in self._arrived)
        self.n += 1
        self.ledger.commit(self.n, (step for name in members for step in self._steps[name]), now)
        self._arrived.clear()
        for name in members:
            self._steps[name] = []
            step = () if self.ending else self._step(name)
            save = Order("save", self.n, file=self._shared_file(name))
            self._send(name, Order("merge", self.n, members), save, *step)

    def _finish(self, now: float) -> None:
        """Close the last round with the steps that each worker has made, once none is in the middle of a step."""
        for name, steps in self._steps.items():
            if steps and name not in self._arrived and name not in self._busy:
                self._send(name, *self._share(name))
        if self._busy:
            return
        if self._arrived:
            self._close(now)
            return
        if self.n and not self._donor():
            self._roll_back(now)
        self.final = self._shared_file(self._donor()) if self.n else ""
