"""The names of a run's keys in Redis.

All keys of a shard K of a run share the hash tag `{RUN:sK}`, so that one node of a cluster has all of them. A run with
one shard has the shard 0. Only the names of all runs lie elsewhere (`archipelago:runs`). Each shard has the keys below,
for its own fragments. Those of shard 0 that belong to the run exist only there: `members`, `taken`, `name`, `corpora`,
`asks`, `handover`, `evaluations` and `evaluator`.

Every key has one kind of writer, so that the access rules of a role can name its keys. All roles read all keys.
docs/reference/keys.md says what each key holds, and who writes it. An island's name cannot contain a colon.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from archipelago.broker.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
#: The set of the names of all runs at a server.
REGISTRY = "archipelago:runs"
#: What the names of the chunks of an answer to a newcomer begin with.
HANDOVER = "h."


def is_name(name: object) -> bool:
    """Return whether the name can be a part of a key and of a path."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def names_in(members: Iterable[bytes]) -> list[str]:
    """Return the valid names among the members of a set, sorted. Other programs may have added other members."""
    return sorted(name for member in members if is_name(name := member.decode("utf-8", "replace")))


def checked_name(name: str, what: str) -> str:
    """Return `name`. Raises ConfigError if it cannot be a part of a key and of a path."""
    if not is_name(name):
        raise ConfigError(
            f"{what} {name!r:.80} cannot be used", "Use 1 to 64 letters, digits, '.', '_' and '-'.", code="config.name"
        )
    return name


class Keys:
    """The keys of one shard of a run. A pattern of numbers for `shard` makes each key a pattern of keys."""

    def __init__(self, run: str, shard: int | str = 0) -> None:
        self.run = checked_name(run, "the run name")
        self.tag = f"{{{run}:s{shard}}}"
        self.islands = f"{self.tag}:islands"
        self.manifest = f"{self.tag}:manifest"
        self.members = f"{self.tag}:members"
        self.data = f"{self.tag}:data"
        self.corpora = f"{self.tag}:corpora"
        self.requests = f"{self.tag}:asks"
        self.evaluations = f"{self.tag}:evaluations"
        self.evaluator = f"{self.tag}:evaluator"
        self.control = f"{self.tag}:control"
        self.notes = f"{self.tag}:notes"
        self.snapshots = f"{self.tag}:snapshots"
        self.tape = f"{self.tag}:tape"
        self.lease = f"{self.tag}:lease"
        self.epoch = f"{self.tag}:epoch"
        self.standbys = f"{self.tag}:standbys"
        self.state = f"{self.tag}:state"
        self.counters = f"{self.tag}:counters"
        self.kept_entries = f"{self.tag}:kept"

    @classmethod
    def patterns(cls, run: str, shards: int) -> list[Keys]:
        """Return the keys of all shards of a run, as patterns. Those of a run with one shard are its own keys."""
        if shards == 1:
            return [cls(run)]
        return [cls(run, digits) for digits in ("[0-9]", "[0-9][0-9]")[: 1 if shards <= 10 else 2]]

    def of_the_past(self, fragments: Iterable[int], islands: Iterable[str]) -> list[str]:
        """Return the keys that must not exist when the run begins: those of its fragments, and of an earlier run.

        The epoch is not among them: a merger of an earlier run of that name may still be alive.
        """
        stay = (self.run, self.tag, self.manifest, self.members, self.epoch, self.lease, self.standbys)
        own = [key for key in vars(self).values() if key not in stay]
        states = [key(fragment) for fragment in fragments for key in (self.head, self.outer)]
        return [*own, *states, *(key for name in islands for key in self.of_island(name)[1:])]

    def short(self, key: str) -> str:
        """Return the key without the name of the run."""
        return key.removeprefix(f"{self.tag}:")

    def updates(self, island: str) -> str:
        return f"{self.tag}:updates:{island}"

    def taken(self, name: str) -> str:
        return f"{self.tag}:taken:{name}"

    def island(self, island: str) -> str:
        return f"{self.tag}:island:{island}"

    def said(self, island: str) -> tuple[str, str]:
        """Return the keys of the notes and of the evaluations that an island has written."""
        return f"{self.notes}:{island}", f"{self.evaluations}:{island}"

    def of_island(self, island: str) -> tuple[str, ...]:
        """Return the keys of which one must exist for an island to be known, the heartbeat first."""
        return self.island(island), self.updates(island), *self.said(island)

    def name(self, island: str) -> str:
        return f"{self.tag}:name:{island}"

    def handover(self, who: str) -> str:
        """Return the key of the answer to `who` (island/incarnation). Neither name can contain a colon."""
        return f"{self.tag}:handover:{who.replace('/', ':')}"

    def head(self, fragment: int) -> str:
        return f"{self.tag}:head:{fragment}"

    def fragment(self, fragment: int) -> str:
        return f"{self.tag}:fragment:{fragment}"

    def difference(self, fragment: int, version: int) -> str:
        return f"{self.tag}:difference:{fragment}:{version}"

    def kept(self, entry: str) -> str:
        """Return the key of a merged contribution, by the name of its entry, NAME/ID."""
        return f"{self.tag}:kept:{entry.replace('/', ':')}"

    def outer(self, fragment: int) -> str:
        """Return the key of the merger's own state of a fragment: exact parameters and outer optimiser state."""
        return f"{self.tag}:outer:{fragment}"

    def handover_chunks(self, giver: str) -> str:
        """Return what the keys of the chunks of an island's answers begin with. `*` stands for any island."""
        return f"{self.tag}:c:{giver}:{HANDOVER}"

    def chunk_prefix(self, owner: str = "") -> str:
        """Return what the keys of the chunks of an island's payloads begin with; those of mergers for no owner."""
        return f"{self.tag}:c:{owner}:" if owner else f"{self.tag}:m:"

    def kept_prefix(self, owner: str) -> str:
        """Return what the keys of the chunks of an island's merged payloads begin with. Only mergers write these."""
        return f"{self.tag}:m:{owner}:"

    def chunk(self, name: str, index: int, owner: str = "") -> str:
        """Return the key of one chunk of a large payload. `owner` is an island's name, or empty for a merger."""
        return f"{self.chunk_prefix(owner)}{name}:{index}"
