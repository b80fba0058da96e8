"""Whether a contribution may be merged: a pure predicate that returns a value, so that every refusal has its reason."""

from __future__ import annotations

from dataclasses import dataclass, field

from archipelago.broker.corpus_shards import parse_places
from archipelago.broker.errors import WireError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Contribution

TOKENS_PER_STEP_MAX = 64
"""An island may train larger batches than the run's, up to this factor: weights grow with tokens squared."""
ROUNDS_AHEAD_MAX = 2
"""How many round trips over the fragments a contribution may be ahead of the last closed round."""
REMEMBERED_MAX = 1024
"""Sequence numbers that are remembered one by one; what is missing further back counts as seen."""


@dataclass(frozen=True)
class Accepted:
    """It joins the next round of its fragment."""

    staleness: int


@dataclass(frozen=True)
class Rejected:
    """It is refused; the island and the operator read `reason`."""

    reason: str


@dataclass
class Sequences:
    """Which sequence numbers of one incarnation of an island were seen: all below `floor`, and those in `above`."""

    floor: int = 0
    above: set[int] = field(default_factory=set)

    def __contains__(self, sequence: int) -> bool:
        return sequence < self.floor or sequence in self.above

    def add(self, sequence: int) -> None:
        """Marks it as seen. Numbers come nearly in order, so `above` stays small; after a gap it is kept small."""
        if sequence >= self.floor:
            self.above.add(sequence)
        if len(self.above) > REMEMBERED_MAX:
            self.floor = min(self.above)
        while self.floor in self.above:
            self.above.remove(self.floor)
            self.floor += 1


def admit(contribution: Contribution, manifest: Manifest, closed: int, version: int) -> Accepted | Rejected:
    """Judges a contribution whose payload decoded; `version` is its fragment's, `closed` the last closed round."""
    config, fragments = manifest.config, len(manifest.fragments)
    if contribution.fragment >= fragments or manifest.fragment_of(contribution.round) != contribution.fragment:
        return Rejected(f"round {contribution.round} does not sync fragment {contribution.fragment}")
    if contribution.round > closed + ROUNDS_AHEAD_MAX * fragments:
        return Rejected(f"round {contribution.round} is far ahead of round {closed}, the last one closed")
    if contribution.base > version:
        return Rejected(f"measured from version {contribution.base}, which does not exist yet (now {version})")
    if contribution.tokens > contribution.steps * config.tokens_per_step * TOKENS_PER_STEP_MAX:
        return Rejected(f"{contribution.tokens} tokens in {contribution.steps} steps cannot be")
    if contribution.codec not in (config.wire.up, config.wire.thin):
        return Rejected(f"codec {contribution.codec[:32]!r}, which this run does not send")
    if fault := _fault_of_places(contribution.data, config.data.shards):
        return Rejected(fault)
    staleness = version - contribution.base
    if staleness > config.sync.staleness_cap:
        return Rejected(f"staleness {staleness} is over the cap of {config.sync.staleness_cap}")
    return Accepted(staleness)


def _fault_of_places(data: str, shards: int) -> str:
    """What is wrong with how far the island says that it has read."""
    try:
        places = parse_places(data)
    except WireError as error:
        return error.reason
    beyond = [place.shard for place in places if int(place.shard.rpartition("/")[2]) >= shards]
    return f"shard {beyond[0]} of {shards} does not exist" if beyond else ""
