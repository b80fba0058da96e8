"""Train the islands of a recorded run again, from the log of their actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from archipelago.broker.errors import ConfigError, DataError
from archipelago.broker.messages import Contribution
from archipelago.broker.transport import Delivery
from archipelago.broker.wire import digest, pack_body, unpack
from archipelago.ops.experiments.recorded_run import RecordedRun, RecordedShard

if TYPE_CHECKING:
    from archipelago.islands.replay import ReplayedIsland
    from archipelago.islands.sync.actions import Action


class RecordedIslands:
    """The islands of a recorded run. Each trains as far as its next contribution needs.

    An island uses its recorded payloads instead if Redis lost some of its actions, or if the corpus that it trained on
    is not on this machine.

    Attributes:
        count: Contributions that were trained again.
        lost: The islands that use their payloads, with the reason.
    """

    def __init__(self, run: RecordedRun) -> None:
        from archipelago.islands.sync.actions import unfolded

        self.run = run
        self.manifest = run.manifest
        self.count = 0
        self.lost: dict[str, str] = {}
        self._pinned: dict[str, str] = {}
        logged: dict[str, list[Any]] = {}
        for shard in run.shards:  # an island's actions go with its contributions
            for actions in shard.record.actions:
                logged.setdefault(f"{actions.island}/{actions.incarnation}", []).append(actions)
        self._actions = {who: unfolded(mine) for who, mine in logged.items()}
        run.expect(_uses_of_versions(self._actions))
        self._members: dict[str, ReplayedIsland] = {}
        self._make = self._maker()

    def _maker(self) -> Callable[[str], ReplayedIsland]:
        """Return a function that makes an island by name. Raise DataError if this machine lacks the run's corpus."""
        from archipelago.islands.data.corpus import open_corpus
        from archipelago.islands.inner import compile_steps
        from archipelago.islands.models.registry import build
        from archipelago.islands.replay import ReplayedIsland, Surroundings, corpus_of, wanted_points

        config = self.manifest.config
        corpus = open_corpus(self.manifest.corpus.name)
        if corpus.identity != self.manifest.corpus:
            raise DataError(
                f"the corpus {corpus.name!r} here is not the one that the run was trained on",
                "Copy that one here, or replay without training: --no-islands.",
                code="replay.other-corpus",
            )
        steps = compile_steps(build(config.model), config.inner)
        wanted = wanted_points(self._actions)
        around = Surroundings(self.run.take, lambda who, count: self._member(who).until(count))

        def make(who: str) -> ReplayedIsland:
            pinned = corpus_of(who, self._actions)
            text = open_corpus(pinned).train if pinned else corpus.train
            if pinned:
                self._pinned[who] = pinned
            return ReplayedIsland(who, self._actions[who], self.manifest, steps, text, around, wanted.get(who, ()))

        return make

    def contribution(self, shard: RecordedShard, delivery: Delivery) -> Delivery:
        """Let the island make a contribution to a shard again. Raise DifferenceError if the result differs."""
        from archipelago.islands.replay import ActionError

        contribution = delivery.contribution
        assert contribution is not None  # noqa: S101 - a record holds only readable deliveries
        who = f"{contribution.island}/{contribution.incarnation}"
        if who in self.lost:
            return delivery
        try:
            body = self._member(who).until_sent(contribution.sequence, shard.manifest.shard)
        except (ActionError, DataError, ConfigError) as error:  # A corpus name that cannot exist is a ConfigError.
            self.lost[who] = error.what
            return delivery
        size = shard.manifest.sizes[contribution.fragment]
        payload = pack_body(body, contribution.codec, size, self.manifest.config.wire.zstd_level)
        if digest(payload) != contribution.digest:  # The same values may be compressed differently.
            self._compare(who, contribution, size, delivery.payload, payload)
        self.count += 1
        return delivery

    def _compare(self, who: str, contribution: Contribution, size: int, recorded: bytes, payload: bytes) -> None:
        """Raise DifferenceError if the two payloads hold different values."""
        from archipelago.merger.replay import DifferenceError

        unequal = int((unpack(recorded, size) != unpack(payload, size)).sum())
        if not unequal:
            return
        pinned = self._pinned.get(who)  # No record has the digest of an island's own corpus.
        raise DifferenceError(
            f"contribution {contribution.identity_text} to round {contribution.round} (fragment "
            f"{contribution.fragment}): {unequal} of {size} elements differ from the recorded payload"
            + (f"; is the corpus {pinned!r} here the one that it was trained on?" if pinned else "")
        )

    def _member(self, who: str) -> ReplayedIsland:
        from archipelago.islands.replay import ActionError

        if who not in self._actions:
            raise ActionError(f"the record has no actions of {who}")
        if who not in self._members:
            self._members[who] = self._make(who)
        return self._members[who]


def _uses_of_versions(actions: Mapping[str, Sequence[Action]]) -> Counter[tuple[int, int]]:
    """Count how often each version of each fragment was adopted."""
    from archipelago.islands.sync.actions import Adopt, Join

    uses: Counter[tuple[int, int]] = Counter()
    for mine in actions.values():
        for action in mine:
            match action:
                case Join(versions):
                    uses.update(enumerate(versions))
                case Adopt(fragment, version):
                    uses[fragment, version] += 1
                case _:
                    pass
    return uses
