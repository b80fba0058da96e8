"""The client of an island for a broker in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from archipelago.broker.control import heard_by, is_expelled
from archipelago.broker.corpus_shards import Place, choose
from archipelago.broker.memory.state import MemoryState
from archipelago.broker.messages import (
    Contribution,
    Handover,
    Heartbeat,
    from_fields,
    to_fields,
)
from archipelago.broker.names import NameClaim, newest_claim, next_claim


class MemoryIsland:
    """See `broker.transport.IslandClient`."""

    def __init__(self, broker: MemoryState, run: str) -> None:
        self._broker, self._run = broker, run
        self._downloaded: dict[str, int] = {}  # by incarnation: what earlier ones had downloaded

    def publish(self, contribution: Contribution, payload: bytes) -> str:
        with self._broker.opened(self._run) as run:
            received = from_fields(Contribution, to_fields(contribution))  # as a server would receive it
            return run.add(received, payload)

    def holds(self, entry: str) -> bool:
        with self._broker.opened(self._run) as run:
            return run.found(entry) is not None

    def heartbeat(self, heartbeat: Heartbeat) -> dict[str, str]:
        with self._broker.opened(self._run) as run:
            before, _ = run.islands.get(heartbeat.island, (heartbeat, 0.0))
            earlier = before.bytes_down if before.incarnation != heartbeat.incarnation else 0
            down = heartbeat.bytes_down + self._downloaded.setdefault(heartbeat.incarnation, earlier)
            run.islands[heartbeat.island] = (replace(heartbeat, bytes_down=down), self._broker.clock())
            return {name: run.control[name] for name in heard_by(heartbeat.island) if name in run.control}

    def claim_name(self, island: str, incarnation: str) -> NameClaim:
        with self._broker.opened(self._run) as run:
            now_ms = max(0, int(1000 * self._broker.clock()))
            claim = run.names[island] = next_claim(run.names.get(island), incarnation, now_ms)
            return claim

    def confirm_name(self, island: str, claim: NameClaim) -> NameClaim:
        with self._broker.opened(self._run) as run:
            run.names[island] = newest_claim(claim, run.names.get(island))
            return run.names[island]

    def lease_shard(self, shards: Sequence[str], me: str) -> Place | None:
        with self._broker.opened(self._run) as run:
            if is_expelled(run.control, me):
                return None
            busy = {f"{e.sender}/{e.contribution.incarnation}" for e in run.waiting().values()}
            live = run.live(self._broker.clock()) | busy
            chosen = choose(shards, run.cursors, run.holders, me, lambda holder: holder not in live)
            if chosen is None:
                return None
            run.holders[chosen] = me
            return Place(chosen, *run.cursors.get(chosen, (0, 0)))

    def leased(self, shards: Sequence[str], me: str) -> frozenset[str]:
        with self._broker.opened(self._run) as run:
            return frozenset(shard for shard in shards if run.holders.get(shard) == me)

    def lease_evaluation(self, me: str, seconds: float) -> bool:
        with self._broker.opened(self._run) as run:
            now = self._broker.clock()
            holder, until = run.evaluator
            if holder != me and now < until:
                return False
            run.evaluator = (me, now + seconds)
            return seconds > 0.0

    def register_corpus(self, name: str, digest: str) -> str:
        with self._broker.opened(self._run) as run:
            return run.corpora.setdefault(name, digest)

    def claim_checkpoint(self, island: str) -> tuple[int, int] | None:
        with self._broker.opened(self._run) as run:
            if run.restored is None or island in run.returned:
                return None
            run.returned.add(island)
            return run.restored

    def request_state(self, who: str) -> None:
        with self._broker.opened(self._run) as run:
            run.requests.setdefault(who, "")

    def open_requests(self) -> list[str]:
        with self._broker.opened(self._run) as run:
            live = run.live(self._broker.clock())
            return sorted(who for who, giver in run.requests.items() if not giver and who in live)

    def promise_answer(self, who: str, giver: str) -> bool:
        with self._broker.opened(self._run) as run:
            if run.requests.get(who) != "":
                return False
            run.requests[who] = giver
            return True

    def hand_over(self, who: str, handover: Handover, payload: bytes) -> None:
        with self._broker.opened(self._run) as run:
            if who in run.requests:
                run.handovers[who] = (handover, payload)

    def handed_over(self, who: str) -> tuple[Handover, bytes] | None:
        with self._broker.opened(self._run) as run:
            return run.handovers.get(who)

    def withdraw_request(self, who: str) -> None:
        with self._broker.opened(self._run) as run:
            run.requests.pop(who, None)
            run.handovers.pop(who, None)
