"""Attacks on a simulated run: real mergers and islands in virtual time at a fake Redis, and an attacker between them.

The attacker adds events to `Simulation`, and exceptions to its invariants for what it has sent itself.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from archipelago.broker.messages import Contribution, Refusal, RoundMember, TapeEntry
from archipelago.broker.ranges import parse_positions
from archipelago.broker.wire import digest
from archipelago.merger.service import LEASE_SECONDS
from tests import samples
from tests.hostile.attacker import Attacker
from tests.hostile.attacks import ATTACKS, Attack, contributions, heartbeat, leases, make
from tests.simulation.faults import FaultRates
from tests.simulation.invariants import Invariants
from tests.simulation.processes import RUN
from tests.simulation.simulated_run import Simulation
from tests.simulation.storm import require_progress

NAME = "mallory"
#: Attacks that are made once more, because each makes other claims.
MESSAGES = (contributions, heartbeat)
#: Events after each attack, in which the merger dies once.
PAUSE = 8
#: After this number of attacks, the run must make progress with all islands.
TOGETHER = 7
#: Events between two looks at whether the first attack may begin.
FIRST = 20
#: The share of a full flood that the attacker sends.
SCALE = 0.001
#: The run may go ahead at most this many times as fast as its islands, because honest speeds differ that much.
SPEED_MAX = 40
#: A claim moves a cursor to the end of a pass, and perhaps it is merged before another one that did so.
PASSES = 2
#: The largest share of a round that one island may have, as a multiple of the others' mean.
SHARE_CAP = 2.0


class HostileInvariants(Invariants):
    """The invariants of all storms. What the attacker itself has trained and read is not asserted."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        #: The ranges that the attacker says it has read. The islands do not read again what it took from them.
        self.claimed: set[str] = set()

    def wrote(self, epoch: int) -> None:
        """Without the key of the epoch, which the attacker deletes, a number may be given again."""
        self.epoch = max(epoch, self.epoch)

    def _check_resumes(self, run: Any) -> None:
        """The attacker forges these events."""

    def _check_counters(self, counters: Mapping[str, int], waiting: Sequence[Contribution]) -> None:
        """The attacker deletes the counters, and fewer tokens are counted than it claims."""

    def _check_passes(self, passes: Mapping[str, int]) -> None:
        """A claim moves a cursor by what the attacker can have read, so only the other ranges must stay even."""
        super()._check_passes({name: n for name, n in passes.items() if name not in self.claimed} or {"": 0})

    def _read_tape(self, run: Any, again: bool = False) -> None:
        for entry in run.tape[self._known(run) :]:
            for member in entry.members:
                if not self._is_honest(member) and (found := run.kept.get(member.entry)) is not None:
                    self.entries[member.entry] = (found.contribution, run.payload(member.entry))
            self._check_shares(entry)
        super()._read_tape(run, again)

    def excuse_readers(self) -> None:
        """The attacker has taken ranges from living islands. These may read on, although others lease the ranges."""
        self.has_taken = True
        for reader in (reader for readers in self.readers.values() for reader in readers):
            reader.is_excused = True

    def _is_honest(self, member: RoundMember) -> bool:
        return member.island in self.simulation.wanted

    def _check_shares(self, entry: TapeEntry) -> None:
        """Check that no hostile island weighs more than a set share of a round."""
        honest = {member.island for member in entry.members if self._is_honest(member)}
        for member in entry.members:
            if honest and not self._is_honest(member):
                others = len({each.island for each in entry.members}) - 1
                assert member.weight <= SHARE_CAP / (SHARE_CAP + others) + 1e-6, entry

    def _merge(self, entry: TapeEntry, member: RoundMember, again: bool) -> None:
        if self._is_honest(member):
            super()._merge(entry, member, again)
            return
        assert member.identity_text not in self.merged, f"{member.identity_text} is merged twice"
        self.merged.add(member.identity_text)
        contribution, payload = self.entries[member.entry]
        assert contribution.digest == digest(payload), f"merged a payload with another digest: {contribution}"
        for place in parse_positions(member.data):
            before = self.cursors.get(place.range, (0, 0))
            assert place.cursor <= (before[0] + PASSES, 0), f"a cursor jumped from {before} to {place}"
            self.claimed.add(place.range)
            self.cursors[place.range] = max(place.cursor, before)

    def _check_refusals(self) -> None:
        for _, event in self.simulation.run.events:
            if isinstance(event, Refusal) and not event.repeat and event.island in self.simulation.wanted:
                assert event.identity_text not in self.acknowledged, f"{event} was honest"


class AttackedSimulation(Simulation):
    """A run at a fake Redis without other faults, and with an attacker."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, on_redis=True, rates=FaultRates.none())
        self.hostile = HostileInvariants(self)
        self.invariants = [self.hostile]
        self.faults = False
        self.dice = random.Random(seed)
        self.attacker = Attacker(self.broker.client, self.manifest, NAME, victim=self.wanted[0], scale=SCALE)

    def attack(self, attack: Attack) -> None:
        """Make one attack, and let the run go on. The merger dies meanwhile, so that another one loads the run."""
        make(attack, self.attacker, self.dice)
        self.broker.touched()
        if attack is leases:
            self.hostile.excuse_readers()
        death = self.dice.randrange(PAUSE)
        for event in range(PAUSE):
            if event == death:
                self.kill_mergers()
                self.clock.now += LEASE_SECONDS + 1
            self.play()
            self.check()
        fastest = max(process.island.totals.steps for process in self.islands)
        last = self.run.tape[-1]
        assert last.step <= SPEED_MAX * fastest, f"the run is at step {last.step}, its fastest island at {fastest}"
        assert last.live <= len(self.wanted) + 1

    def check_unharmed(self) -> None:
        """Check that the run makes progress, and that an operator can read it."""
        require_progress(self)
        view = samples.view_of(self.broker.connect(RUN))
        assert view.live <= len(self.wanted) + 1


def play(seed: int) -> None:
    """Play a run with all attacks, in any order. Assert that it is unharmed."""
    simulation = AttackedSimulation(seed)
    while not simulation.complete():  # a merger whose state is damaged needs a checkpoint
        simulation.settle(FIRST)
    attacks = [*ATTACKS, *MESSAGES]
    for number, attack in enumerate(simulation.dice.sample(attacks, len(attacks)), 1):
        try:
            simulation.attack(attack)
            if number % TOGETHER == 0:
                simulation.check_unharmed()
        except Exception as error:
            raise AssertionError(f"after {attack.__name__}") from error
    simulation.check_unharmed()
    for each in simulation.invariants:
        each.check_nothing_lost()
        each.check_replay()
