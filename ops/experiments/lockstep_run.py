"""A run whose islands take each step together, and adopt at the same step boundary what they have sent there.

No real run can do this. Compared with a `VirtualRun`, it shows what it costs that snapshots come later.
"""

from __future__ import annotations

import heapq

from archipelago.islands.worker import Island
from archipelago.ops.experiments.virtual_time import VirtualRun


class LockstepRun(VirtualRun):
    """See `VirtualRun`. All islands must be equally fast."""

    def play_one(self) -> None:
        """Let all islands pass their step boundary, merge what they have sent, and let them adopt it and train on."""
        self.clock.now = self._agenda[0][0]
        able: list[Island] = []
        while self._agenda and self._agenda[0][0] <= self.clock.now:
            _, _, island, _ = heapq.heappop(self._agenda)
            if island.finished or island.must_leave:
                self.remove_island(island.name, farewell=True)
            else:
                able.append(island)
        self._pass_boundary(able)
        self.turn()
        self._pass_boundary(able)
        for island in able:
            island.advance()
            self._schedule(island, self.clock.now + self._step_seconds[island.name] * island.scan_steps)

    def _pass_boundary(self, islands: list[Island]) -> None:
        for island in islands:
            self._exchange(island)
            island.boundary()
            self._exchange(island)
