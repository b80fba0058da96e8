"""Hostile moves in a simulated run: real mergers and islands in virtual time, and an attacker between them.

Arithmetic is that of `tests.simulation.arithmetic`, so this runs in processes of its own (`tests.simulation.storm`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from archipelago.broker.codecs import Vector
from archipelago.broker.corpus_shards import parse_places
from archipelago.broker.errors import BrokerError, WireError
from archipelago.broker.messages import Contribution, Member, Refusal, TapeEntry, from_fields, to_fields
from archipelago.broker.wire import pack
from tests import samples
from tests.hostile.attacker import header
from tests.hostile.moves import Move
from tests.simulation.invariants import Invariants
from tests.simulation.processes import RUN
from tests.simulation.simulated_run import Simulation
from tests.simulation.storm import require_progress

NAME = "mallory"
#: Events between two hostile moves.
PAUSE = 4
#: Events before the first move, in which the islands join.
FIRST = 40
#: Events after the last move, before the run must be as it would be without it.
REST = 60
#: The run may go ahead at most this many times as fast as its islands, because honest speeds differ that much.
SPEED_MAX = 40


class HostileInvariants(Invariants):
    """The invariants of all storms. What the attacker itself has trained and read is not asserted."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        #: The shards that the attacker says it has read. The islands do not read again what it took from them.
        self.claimed: set[str] = set()

    def _check_passes(self, passes: Mapping[str, int]) -> None:
        """A claim moves a cursor by what the attacker can have read, so only the other shards must stay even."""
        super()._check_passes({shard: n for shard, n in passes.items() if shard not in self.claimed} or {"": 0})

    def _check_tokens(self, books: Mapping[str, int], pending: int) -> None:
        """The books count fewer tokens of a refused contribution than it claims."""

    def sent_by_attacker(self, entry: str, contribution: Contribution, payload: bytes) -> None:
        """The attacker has sent a contribution."""
        self.entries[entry] = (contribution, payload)
        self.accepted += 1

    def _merge(self, entry: TapeEntry, member: Member, again: bool) -> None:
        if member.island != NAME:
            super()._merge(entry, member, again)
            return
        assert member.identity_text not in self.merged, f"{member.identity_text} is merged twice"
        self.merged.add(member.identity_text)
        for place in parse_places(member.data):
            self.claimed.add(place.shard)
            self.cursors[place.shard] = max(place.cursor, self.cursors.get(place.shard, (0, 0)))

    def _check_refusals(self) -> None:
        for _, event in self.simulation.run.events:
            if isinstance(event, Refusal) and not event.repeat:
                assert event.island not in self.simulation.wanted, f"{event} was honest"


class AttackedSimulation(Simulation):
    """A run without other faults, and with an attacker."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.hostile = HostileInvariants(self)
        self.invariants = [self.hostile]
        self.faults = False
        self.sequence = 0

    # -- moves --------------------------------------------------------------------------------------------------------

    def make(self, move: Move) -> None:
        """Make one move. What the broker's own code refuses to take is not sent."""
        if self.run is None:
            return
        try:
            getattr(self, f"_hostile_{move.kind}")(move)
        except (BrokerError, WireError):
            return

    def _hostile_contribution(self, move: Move) -> None:
        for _ in range(move.count):
            contribution, payload = self._crafted(move)
            entry = self.run.add(contribution, payload, NAME)
            self.hostile.sent_by_attacker(entry, contribution, payload)

    def _crafted(self, move: Move) -> tuple[Contribution, bytes]:
        closed = self.run.tape[-1].round if self.run.tape else 0
        number = closed + 1
        p = self.manifest.fragment_of(number)
        payload = _body(move.body, self.manifest.sizes[p], self.manifest.config.wire.up)
        self.sequence += 1
        honest = samples.contribution(
            payload, island=NAME, incarnation="z", sequence=self.sequence, round=number, fragment=p,
            base=self.run.fragments[p][0].version, tokens=4, steps=1, global_step=1, codec=self.manifest.config.wire.up,
        )  # fmt: skip
        fields = {**header(to_fields(honest), payload), **{name: str(value) for name, value in move.claims}}
        return from_fields(Contribution, fields), payload

    def _hostile_heartbeat(self, move: Move) -> None:
        fields = to_fields(samples.heartbeat(NAME, incarnation="z"))
        fields |= {name: str(value) for name, value in move.claims}
        beat = from_fields(type(samples.heartbeat()), fields)
        self.broker.connect(RUN).island.heartbeat(replace(beat, island=NAME))

    def _hostile_leases(self, move: Move) -> None:
        island = self.broker.connect(RUN).island
        island.heartbeat(samples.heartbeat(NAME, incarnation="z"))
        shards = [str(shard) for shard in range(self.manifest.config.data.shards)]
        while island.lease_shard(shards, f"{NAME}/z") is not None:
            shards = shards[1:]

    def _hostile_requests(self, move: Move) -> None:
        island = self.broker.connect(RUN).island
        for number in range(20):
            island.request_state(f"{NAME}/{number}")
        for who in list(self.run.requests):
            island.promise_answer(who, NAME)

    def _hostile_handovers(self, move: Move) -> None:
        island = self.broker.connect(RUN).island
        for who in list(self.run.requests):
            island.hand_over(who, samples.handover(b"nonsense"), b"nonsense")

    def _hostile_restored(self, move: Move) -> None:
        island = self.broker.connect(RUN).island
        for name in self.wanted:
            island.claim_checkpoint(name)

    # -- the oracle ---------------------------------------------------------------------------------------------------

    def check_unharmed(self) -> None:
        """Assert that the schedule is that of the islands, and that no ghost takes part."""
        fastest = max(process.island.totals.steps for process in self.islands)
        step = self.run.tape[-1].step
        assert step <= SPEED_MAX * fastest, f"the run is at step {step}, and its fastest island made {fastest}"
        assert self.run.tape[-1].live <= len(self.wanted) + 1


#: The moves that a client of a broker in memory can make.
KINDS = ("contribution", "heartbeat", "leases", "requests", "handovers", "restored")


def _body(name: str, size: int, codec: str) -> bytes:
    values_N: Vector = np.zeros(size, np.float32)
    if name == "noise":
        values_N = np.random.default_rng(0).normal(0, 1, size).astype(np.float32)
    if name in ("large", "nan"):
        values_N = np.full(size, np.float32(1e30) if name == "large" else np.float32(np.nan))
    with np.errstate(all="ignore"):
        payload = pack(values_N, codec, 0)
    return {"garbage": b"garbage", "truncated": payload[:-1], "empty": b""}.get(name, payload)


def play(seed: int, moves: list[Move]) -> dict[str, Any]:
    """Play a run with these moves. Assert that it is unharmed. Return what it reached."""
    simulation = AttackedSimulation(seed)
    for event in range(FIRST + PAUSE * len(moves)):
        simulation.play()
        simulation.check()
        if event >= FIRST and (event - FIRST) % PAUSE == 0:
            simulation.make(moves[(event - FIRST) // PAUSE])
    simulation.settle(REST)
    require_progress(simulation)
    simulation.check_unharmed()
    simulation.hostile.check_replay()
    return {"round": simulation.run.tape[-1].round, "step": simulation.run.tape[-1].step}
