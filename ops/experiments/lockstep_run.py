"""A run whose islands take each step together, and adopt at the same step boundary what they have sent there.

No real run can do this. Compared with a `VirtualRun`, it shows what it costs that snapshots come later.
"""

from __future__ import annotations

from archipelago.ops.experiments.virtual_time import VirtualRun


class LockstepRun(VirtualRun):
    """See `VirtualRun`. All islands must be equally fast."""

    def play_one(self) -> None:
        """Let all islands pass their step boundary, merge what they have sent, and let them adopt it and train on."""
        self.clock.now = self._agenda[0][0]
        self._agenda.clear()  # all of it happens now
        for island in list(self.islands.values()):
            if island.finished or island.must_leave:
                self.remove_island(island.name, farewell=True)
        self._act_once()
        self.turn()
        self._act_once()
        for island in self.islands.values():
            self._train(island)
