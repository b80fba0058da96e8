"""`archipelago replay RUN`: a recorded run done again without Redis and without clocks, to the same bits."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from archipelago.broker.codecs import Vector
from archipelago.broker.config import RunConfig, checked
from archipelago.broker.errors import ArchipelagoError, ConfigError, DataError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import TapeEntry
from archipelago.broker.process import keep_compiled, print_json
from archipelago.broker.transport import Delivery
from archipelago.broker.wire import digest, digest_of, pack_body, unpack
from archipelago.merger import record as records
from archipelago.merger.record import Record
from archipelago.ops.settings import say

if TYPE_CHECKING:
    from archipelago.islands.replay import Redone
    from archipelago.islands.sync.actions import Action

ALIASES = {"lr": "learning_rate"}
WHAT_IF = ("merge", "outer")
"""sections of the config that only the merger's rules read: the contributions on record stay what they were"""
SAY_EVERY = 200
"""rounds"""


@dataclass(frozen=True)
class ReplayOptions:
    """Run a recorded run again, merger and islands, and compare every digest; or ask what other rules had made of it.

    Records are kept by `up --record` and `init --record`.
    """

    run: Annotated[str, tyro.conf.Positional]
    """name of the run"""
    folder: Path = Path("runs")
    """where runs are; the record is FOLDER/RUN/merger/record"""
    islands: bool = True
    """do the islands' training again too; else their recorded contributions are taken"""
    set: tuple[str, ...] = ()
    """what if: other rules for the merger, such as outer.lr=0.5 merge.rest=average, for the recorded contributions"""
    json: bool = False
    """print one JSON object"""


def main(options: ReplayOptions) -> int:
    """0 when all came out as recorded (or a what-if was answered), 1 when something did not."""
    record = records.read(options.folder / options.run / "merger" / "record")
    config = with_settings(record.manifest.config, options.set)
    keep_compiled()
    found = (
        what_if(record, config, [_key(setting) for setting in options.set])
        if options.set
        else again(record, islands=options.islands)
    )
    if options.json:
        print_json(found)
    else:
        _say(found)
    return 0 if found["same"] or options.set else 1


def with_settings(config: RunConfig, settings: Sequence[str]) -> RunConfig:
    """The config with some of the merger's rules changed. Raises ConfigError for what is not one of those."""
    values = dataclasses.asdict(config)
    for setting in settings:
        _, equals, text = setting.partition("=")
        section, _, name = _key(setting).partition(".")
        if not equals or section not in WHAT_IF or name not in values[section]:
            known = [f"{part}.{key}" for part in WHAT_IF for key in values[part]]
            raise ConfigError(f"--set {setting!r} names no rule of the merger", f"Set one of {', '.join(known)}.")
        try:
            values[section][name] = json.loads(text)
        except ValueError:
            values[section][name] = text
    return checked(values, "--set")


def _key(setting: str) -> str:
    """The section and the name in `section.name=value`, as the config spells them."""
    section, _, name = setting.partition("=")[0].strip().partition(".")
    return f"{section}.{ALIASES.get(name, name.replace('-', '_'))}"


class Again:
    """A recorded run, round by round. `delivery` says what stands for a recorded contribution."""

    def __init__(self, record: Record, config: RunConfig) -> None:
        from archipelago.merger.round_merge import RoundMerge, new_state
        from archipelago.merger.state import RunState

        self.record = record
        self.manifest = replace(record.manifest, config=config)
        self.rules = RoundMerge.of(self.manifest)
        self.state = RunState()
        vectors = [unpack(data, size) for (_, data), size in zip(record.beginning, self.manifest.sizes, strict=True)]
        self.fragments = [new_state(vector_N, self.rules.outer) for vector_N in vectors]
        self.uses: Counter[tuple[int, int]] = Counter()
        """how often each version of each fragment will be asked for: what nobody asks for is not kept"""
        self.published = {(p, 0): (vector_N, 0) for p, vector_N in enumerate(vectors)}

    def rounds(self) -> Sequence[tuple[TapeEntry, tuple[Delivery, ...]]]:
        """The rounds in order. Raises ConfigError where one is missing."""
        numbers = sorted(self.record.rounds)
        missing = [number for number in range(1, max(numbers, default=0) + 1) if number not in self.record.rounds]
        if missing:
            raise ConfigError(
                f"round {missing[0]} is not in the record ({len(missing)} are missing)",
                "Was another machine's merger serving then? Its folder has the rest: copy the files together.",
            )
        return [self.record.rounds[number] for number in numbers]

    def redo(self, tape: TapeEntry, deliveries: Sequence[Delivery]) -> None:
        """One round; raises DifferenceError."""
        from archipelago.merger.replay import replay_round

        p = tape.fragment
        self.fragments[p] = replay_round(self.rules, self.state, self.fragments[p], tape, deliveries)
        self._publish(tape)

    def redo_differently(self, tape: TapeEntry, deliveries: Sequence[Delivery], pinned: Collection[str]) -> None:
        """One round by other rules; nothing is compared. What was steered is, but for `pinned` settings."""
        from archipelago.merger.replay import apply_steering, merge_recorded

        p = tape.fragment
        apply_steering(self.rules, self.state, tape, pinned)
        merged, round_sum = merge_recorded(self.rules, self.state, self.fragments[p], tape, deliveries)
        self.rules.advance(self.state, tape.round, merged, round_sum)
        self.fragments[p] = merged.state

    def _publish(self, tape: TapeEntry) -> None:
        if not self.uses[tape.fragment, tape.version]:
            return
        import numpy as np

        seen_N = np.asarray(self.fragments[tape.fragment].published_N)
        self.published[tape.fragment, tape.version] = (seen_N, tape.step)

    def digests(self) -> list[str]:
        """Of each fragment's parameters."""
        import numpy as np

        return [digest_of(np.asarray(fragment.published_N)) for fragment in self.fragments]


def again(record: Record, *, islands: bool) -> dict[str, Any]:
    """The run done again: what came out, and the first difference if there is one."""
    from archipelago.merger.replay import DifferenceError

    run = Again(record, record.manifest.config)
    crew = Crew(run) if islands else None
    first_difference, taken = "", 0
    rounds = run.rounds()
    for tape, deliveries in rounds:
        try:
            redone = [crew.contribution(delivery) if crew else delivery for delivery in deliveries]
            run.redo(tape, redone)
        except DifferenceError as error:
            first_difference = error.what
            break
        taken += len(deliveries)
        if tape.round % SAY_EVERY == 0:
            say(f"  round {tape.round} of {len(rounds)}: the same so far")
    expected = {tape.fragment: tape.digest for tape, _ in rounds}
    found = dict(enumerate(run.digests()))
    return {
        "run": record.manifest.run,
        "rounds": run.state.closed,
        "rounds_recorded": len(rounds),
        "contributions": taken,
        "trained_again": crew.trained if crew else 0,
        "islands_from_payloads": crew.lost if crew else {},
        "fragments": [{"fragment": p, "digest": found[p], "recorded": expected.get(p, "")} for p in found],
        "first_difference": first_difference,
        "same": not first_difference and all(found[p] == expected.get(p, found[p]) for p in found),
    }


class Crew:
    """The islands of a recorded run, each done again as far as its next contribution asks for.

    An island whose actions have a gap (a Redis that lost it) or whose own corpus is not here goes by its payloads.
    """

    def __init__(self, run: Again) -> None:
        from archipelago.islands.sync.actions import unfolded

        self.run = run
        self.manifest: Manifest = run.manifest
        self.trained = 0
        self.lost: dict[str, str] = {}
        self._pinned: dict[str, str] = {}
        logged: dict[str, list[Any]] = {}
        for actions in run.record.actions:
            logged.setdefault(f"{actions.island}/{actions.incarnation}", []).append(actions)
        self._actions = {who: unfolded(mine) for who, mine in logged.items()}
        run.uses = _uses_of_versions(self._actions)
        self._members: dict[str, Redone] = {}
        self._make = self._maker()

    def _maker(self) -> Callable[[str], Redone]:
        from archipelago.islands.data.corpus import open_corpus
        from archipelago.islands.inner import compile_steps
        from archipelago.islands.models.registry import build
        from archipelago.islands.replay import Redone, Surroundings, corpus_of, wanted_points

        config = self.manifest.config
        corpus = open_corpus(self.manifest.corpus.name)
        if corpus.identity != self.manifest.corpus:
            raise DataError(
                f"the corpus {corpus.name!r} here is not the one that the run was trained on",
                "Copy that one here, or replay without training: --no-islands.",
            )
        steps = compile_steps(build(config.model), config.inner)
        wanted = wanted_points(self._actions)
        around = Surroundings(self._published, lambda who, count: self._member(who).until(count))

        def make(who: str) -> Redone:
            pinned = corpus_of(who, self._actions)
            text = open_corpus(pinned).train if pinned else corpus.train
            if pinned:
                self._pinned[who] = pinned
            return Redone(who, self._actions[who], self.manifest, steps, text, around, wanted.get(who, ()))

        return make

    def contribution(self, delivery: Delivery) -> Delivery:
        """The contribution, once its island has made it again. Raises DifferenceError when it makes another one."""
        from archipelago.islands.replay import ActionError
        from archipelago.merger.replay import DifferenceError

        contribution = delivery.contribution
        assert contribution is not None  # noqa: S101 - the record holds no other
        who = f"{contribution.island}/{contribution.incarnation}"
        if who in self.lost:
            return delivery
        try:
            body = self._member(who).until_sent(contribution.sequence)
        except (ActionError, DataError, ConfigError) as error:  # the last: no corpus can have the name in actions
            self.lost[who] = error.what
            return delivery
        size = self.manifest.sizes[contribution.fragment]
        payload = pack_body(body, contribution.codec, size, self.manifest.config.wire.zstd_level)
        if digest(payload) != contribution.digest:
            unequal = int((unpack(delivery.payload, size) != unpack(payload, size)).sum())
            if unequal:
                pinned = self._pinned.get(who)  # whose digest is in no record
                raise DifferenceError(
                    f"contribution {contribution.identity_text} to round {contribution.round} (fragment "
                    f"{contribution.fragment}): {unequal} of {size} elements differ from the recorded payload"
                    + (f"; is the corpus {pinned!r} here the one that it was trained on?" if pinned else "")
                )
        self.trained += 1
        return delivery  # the same values; whether they were compressed is the link's affair

    def _member(self, who: str) -> Redone:
        from archipelago.islands.replay import ActionError

        if who not in self._actions:
            raise ActionError(f"the record has no actions of {who}")
        if who not in self._members:
            self._members[who] = self._make(who)
        return self._members[who]

    def _published(self, fragment: int, version: int) -> tuple[Vector, int]:
        found = self.run.published[fragment, version]
        self.run.uses[fragment, version] -= 1
        if not self.run.uses[fragment, version]:
            del self.run.published[fragment, version]
        return found


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


def what_if(record: Record, config: RunConfig, pinned: Collection[str] = ()) -> dict[str, Any]:
    """The recorded contributions merged by other rules, and what held-out text says of both.

    `pinned` settings stay as they are in the config, also where the run was steered.
    """
    from archipelago.merger.replay import DifferenceError

    recorded, other = Again(record, record.manifest.config), Again(record, config)
    for tape, deliveries in recorded.rounds():
        try:
            recorded.redo(tape, deliveries)
        except DifferenceError as error:
            raise ArchipelagoError(
                f"the record does not replay: {error.what}", "Run `archipelago replay` on it."
            ) from None
        other.redo_differently(tape, deliveries, pinned)
    from archipelago.broker import config as configs

    return {
        "run": record.manifest.run,
        "rounds": recorded.state.closed,
        "changed": configs.differences(record.manifest.config, config),
        "bits_per_byte_recorded": _bits_per_byte(recorded),
        "bits_per_byte_what_if": _bits_per_byte(other),
        "same": recorded.digests() == other.digests(),
    }


def _bits_per_byte(run: Again) -> float:
    import numpy as np

    from archipelago.islands.data.corpus import open_corpus
    from archipelago.islands.evaluation import assemble, compile_validation

    config = run.manifest.config
    measure = compile_validation(config, open_corpus(config.data.corpus))
    return measure(assemble(run.manifest, [np.asarray(fragment.published_N) for fragment in run.fragments]))


def _say(found: Mapping[str, Any]) -> None:
    if "changed" in found:
        say(f"run {found['run']!r}: {found['rounds']} rounds with their recorded contributions")
        for change in found["changed"]:
            say(f"  {change}")
        say(f"held-out bits per byte: {found['bits_per_byte_recorded']:.4f} as recorded, "
            f"{found['bits_per_byte_what_if']:.4f} by these rules")  # fmt: skip
        say("The islands trained from what was published then: the more the rules differ, the less this says.")
        return
    say(f"run {found['run']!r}: {found['rounds']} of {found['rounds_recorded']} rounds done again, with "
        f"{found['contributions']} contributions, {found['trained_again']} of them trained again")  # fmt: skip
    for who, why in found["islands_from_payloads"].items():
        say(f"  {who} goes by its recorded payloads: {why}")
    for fragment in found["fragments"]:
        same = "same" if fragment["digest"] == fragment["recorded"] else f"recorded {fragment['recorded'] or 'nothing'}"
        say(f"  fragment {fragment['fragment']}: {fragment['digest']}  {same}")
    say(f"first difference: {found['first_difference']}" if found["first_difference"] else "no bit differs")
