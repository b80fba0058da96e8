"""Names of the Redis keys of a run. All keys of one shard share a hash tag, so that they can change together."""

from __future__ import annotations

import re

from archipelago.broker.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
REGISTRY = "archipelago:runs"


def is_name(name: str) -> bool:
    """Whether it can stand in a key and in a path."""
    return bool(_NAME.fullmatch(name))


def checked_name(name: str, what: str) -> str:
    """`name`, when it can stand in a key and in a path. Raises ConfigError."""
    if not is_name(name):
        raise ConfigError(f"{what} {name!r:.80} cannot be used", "Use 1 to 64 letters, digits, '.', '_' and '-'.")
    return name


class Keys:
    """The keys of one run, shard 0."""

    def __init__(self, run: str) -> None:
        self.run = checked_name(run, "the run name")
        self.tag = f"{{{run}:s0}}"
        self.manifest = f"{run}:manifest"
        self.islands = f"{run}:islands"
        self.data = f"{run}:data"
        self.actions = f"{run}:actions"
        self.asks = f"{run}:asks"
        self.restored = f"{run}:restored"
        self.evaluations = f"{run}:evaluations"
        self.control = f"{run}:control"
        self.notes = f"{run}:notes"
        self.updates = f"{self.tag}:updates"
        self.snapshots = f"{self.tag}:snapshots"
        self.tape = f"{self.tag}:tape"
        self.lease = f"{self.tag}:lease"
        self.epoch = f"{self.tag}:epoch"
        self.state = f"{self.tag}:state"
        self.books = f"{self.tag}:books"

    def of_the_past(self, fragments: int) -> list[str]:
        """What must not be there when the run begins. Not the epoch: an older merger may still be alive."""
        outers = [self.outer(fragment) for fragment in range(fragments)]
        merger = [self.updates, self.snapshots, self.tape, self.state, self.books, *outers]
        return [*merger, self.data, self.evaluations, self.actions, self.asks, self.restored, self.control, self.notes]

    def island(self, island: str) -> str:
        """The heartbeat of one island."""
        return f"{self.run}:island:{island}"

    def handover(self, who: str) -> str:
        """The answer to an island that asked; `who` is island/incarnation, and neither name can hold a colon."""
        return f"{self.run}:handover:{who.replace('/', ':')}"

    def fragment(self, fragment: int) -> str:
        """The newest full snapshot of a fragment."""
        return f"{self.tag}:fragment:{fragment}"

    def difference(self, fragment: int, version: int) -> str:
        """What leads islands from the version before to that one."""
        return f"{self.tag}:difference:{fragment}:{version}"

    def outer(self, fragment: int) -> str:
        """The merger's own state of a fragment: exact parameters and the outer optimiser's."""
        return f"{self.tag}:outer:{fragment}"

    def chunk(self, name: str, index: int) -> str:
        """One chunk of a large payload."""
        return f"{self.tag}:c:{name}:{index}"
