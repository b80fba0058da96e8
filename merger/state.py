"""The merger's state besides the waiting contributions, and its JSON form, which every commit stores exactly."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple

import jax
from pydantic import PlainValidator

from archipelago.broker.control import read_settings
from archipelago.broker.errors import ConfigError
from archipelago.broker.messages import COUNT_MAX, Contribution, adapter
from archipelago.broker.ranges import advanced
from archipelago.broker.wire import digest
from archipelago.merger.claims import Account, usual_batch
from archipelago.merger.scores import Score
from archipelago.merger.weights import Norms, RunningMean

#: How many islands have an account. Those that were silent longest are forgotten first.
ACCOUNTS_MAX = 1024
#: How many incarnations of islands are remembered. Those that were silent longest are forgotten first. Each commit
#: takes some 10 µs for each of them.
INCARNATIONS_MAX = 1024
#: How many incarnations of one island are remembered, so that one island cannot make the merger forget the others.
INCARNATIONS_OF_AN_ISLAND = 64
#: How many sequence numbers are remembered one by one. Missing ones further back count as seen.
REMEMBERED_MAX = 1024


@dataclass(frozen=True)
class FragmentState:
    """One fragment of N elements.

    Attributes:
        params_N: The exact parameters, float32.
        outer: The outer optimiser's state, a pytree of arrays.
        published_N: What the islands hold: `params_N`, rounded by the codec of snapshots.
    """

    params_N: jax.Array
    outer: Any
    published_N: jax.Array


class Sequences(NamedTuple):
    """The sequence numbers of one incarnation that were seen: all below `floor`, and those in `above`.

    The last closed round when one was added is in `round`.
    """

    floor: int = 0
    above: frozenset[int] = frozenset()
    round: int = 0

    def __contains__(self, sequence: Any) -> bool:
        return sequence < self.floor or sequence in self.above

    def with_one(self, sequence: int, closed: int = 0) -> Sequences:
        """Return these numbers and one more. Old gaps count as seen, so that `above` stays small."""
        floor, above = self.floor, set(self.above)
        if sequence >= floor:
            above.add(sequence)
        if len(above) > REMEMBERED_MAX:
            floor = min(above)
        while floor in above:
            above.remove(floor)
            floor += 1
        return Sequences(floor, frozenset(above), closed)


class RoundTiming(NamedTuple):
    """Exponential moving averages of a round's times in seconds; None before the first sample, which sets the average.

    Attributes:
        quorum_seconds: T_quorum, from a round's first contribution to its quorum.
        sync_seconds: T_sync, from a round's close to its published snapshot.
    """

    quorum_seconds: float | None = None
    sync_seconds: float | None = None

    def after_quorum(self, sample: float, smoothing: float) -> RoundTiming:
        """Return the averages with one more time to quorum, by the decay `SyncConfig.smoothing`."""
        return RoundTiming(_smoothed(self.quorum_seconds, sample, smoothing), self.sync_seconds)

    def after_sync(self, sample: float, smoothing: float) -> RoundTiming:
        """Return the averages with one more time to sync, by the decay `SyncConfig.smoothing`."""
        return RoundTiming(self.quorum_seconds, _smoothed(self.sync_seconds, sample, smoothing))


def _smoothed(mean: float | None, sample: float, smoothing: float) -> float:
    sample = max(0.0, sample)  # a clock that was set back must not lengthen the window
    return sample if mean is None else smoothing * mean + (1.0 - smoothing) * sample


def saturated(count: int) -> int:
    """Return the count, or the largest one that messages carry."""
    return min(count, COUNT_MAX)


@dataclass
class RunState:
    """The state of the run that belongs to no single fragment.

    Attributes:
        closed: The last round that has closed, 0 before the first.
        step: The furthest global step among merged contributions.
        tokens: Merged tokens, summed over the fragments.
        norms: The norms that clipping compares with, by fragment.
        seen: The sequence numbers of merged or refused contributions, by incarnation.
        cursors: The pass and sequence at which reading of each range of the corpus resumes.
        accounts: What these rounds say of each island whose contributions they merged.
        usual_batch: The usual tokens in a step of these islands (`claims.usual_batch`).
        refused: How many contributions were refused, by code.
        refused_tokens: Tokens of these.
        bytes_up: Bytes of the payloads of merged and refused contributions.
        covered: The last round in a finished checkpoint.
        steered: The operator's settings that the last closed round used in place of the config's (`broker.control`).
        control: The operator's requests that were acted on last.
    """

    closed: int = 0
    step: int = 0
    tokens: int = 0
    merged: int = 0
    staleness: RunningMean = field(default_factory=RunningMean)
    timing: RoundTiming = field(default_factory=RoundTiming)
    norms: dict[int, Norms] = field(default_factory=dict)
    seen: dict[str, Sequences] = field(default_factory=dict)
    cursors: dict[str, tuple[int, int]] = field(default_factory=dict)
    accounts: dict[str, Account] = field(default_factory=dict)
    usual_batch: float = 0.0
    refused: dict[str, int] = field(default_factory=dict)
    refused_tokens: int = 0
    bytes_up: int = 0
    covered: int = 0
    steered: Annotated[dict[str, float], PlainValidator(read_settings)] = field(default_factory=dict)
    control: dict[str, str] = field(default_factory=dict)

    def copy(self) -> RunState:
        values: dict[str, Any] = {name: v.copy() for name, v in vars(self).items() if isinstance(v, dict)}
        return replace(self, **values)

    @property
    def scores(self) -> dict[str, Score]:
        """The score of each island that has an account."""
        return {island: account.score for island, account in self.accounts.items()}

    def after_round(
        self,
        number: int,
        step: int,
        merged: Sequence[Contribution],
        scores: Mapping[str, Score],
        credit: Mapping[str, int],
    ) -> None:
        """Advance this state by a closed round.

        Args:
            step: The global step to which it brings the run.
            scores: The scores of their islands after it; an island that is missing keeps its own.
            credit: The credit of their islands after it (`claims.seen`).
        """
        self.closed, self.step = number, step
        self.tokens = saturated(self.tokens + sum(c.tokens for c in merged))
        self.merged = saturated(self.merged + len(merged))
        self.bytes_up = saturated(self.bytes_up + sum(c.bytes for c in merged))
        for c in sorted(merged, key=lambda c: c.identity):  # so that the result does not depend on the order of arrival
            self.see(c.identity)
            if c.data:
                self.cursors |= advanced(self.cursors, c.positions)
            before = self.accounts.get(c.island, Account())
            self.accounts[c.island] = Account(
                round=number,
                tokens=saturated(before.tokens + c.tokens),
                global_step=c.global_step,
                step_seconds=c.step_seconds,
                batch=c.tokens / c.steps,
                credit=credit[c.island],
                score=scores.get(c.island, before.score),
            )
        for _ in range(len(self.accounts) - ACCOUNTS_MAX):
            del self.accounts[min(self.accounts, key=lambda island: (self.accounts[island].round, island))]
        self.usual_batch = usual_batch(self.accounts, number)

    def refuse(self, code: str, tokens: int, size: int) -> None:
        """Count a contribution that was refused for the reason with that code, with its tokens and bytes."""
        self.refused[code] = saturated(self.refused.get(code, 0) + 1)
        self.refused_tokens = saturated(self.refused_tokens + tokens)
        self.bytes_up = saturated(self.bytes_up + size)

    def counts(self) -> dict[str, int]:
        """Return the run's counters, by the names that `broker.messages.Counters` gives them."""
        return {
            "merged": self.merged,
            "merged_tokens": self.tokens,
            "refused": saturated(sum(self.refused.values())),
            "refused_tokens": self.refused_tokens,
            "bytes_up": self.bytes_up,
        }

    def needed_by(self, fragment: int, islands: AbstractSet[str]) -> RunState:
        """Return this state as far as the merge of a round of that fragment, with these islands, depends on it."""
        accounts = {island: account for island, account in self.accounts.items() if island in islands}
        return RunState(
            closed=self.closed,
            step=self.step,
            staleness=self.staleness,
            norms={p: norms for p, norms in self.norms.items() if p == fragment},
            usual_batch=self.usual_batch,
            accounts={i: Account(round=a.round, credit=a.credit, score=a.score) for i, a in accounts.items()},
            steered=self.steered,
        )

    def has_seen(self, identity: tuple[str, str, int]) -> bool:
        """Return whether this contribution was merged or refused."""
        island, incarnation, sequence = identity
        return sequence in self.seen.get(f"{island}/{incarnation}", ())

    def see(self, identity: tuple[str, str, int]) -> None:
        """Mark a contribution as merged or refused."""
        island, incarnation, sequence = identity
        key = f"{island}/{incarnation}"
        is_new = key not in self.seen
        self.seen[key] = self.seen.get(key, Sequences()).with_one(sequence, self.closed)
        if is_new:
            self._forget(key, f"{island}/", INCARNATIONS_OF_AN_ISLAND)
            self._forget(key, "", INCARNATIONS_MAX)

    def _forget(self, newest: str, prefix: str, kept: int) -> None:
        """Forget the incarnations with that prefix that were silent longest, except as many, and never the newest."""
        others = [key for key in self.seen if key.startswith(prefix) and key != newest]
        others.sort(key=lambda key: (self.seen[key].round, key))
        for forgotten in others[: 1 - kept]:
            del self.seen[forgotten]

    def to_json(self) -> str:
        """Return the JSON for the commit: what a fresh state does not have, and a digest of it, which shows damage."""
        fresh = vars(RunState())
        own = vars(self) | {"norms": {str(p): norms for p, norms in self.norms.items()}}  # JSON sorts its keys as texts
        return digested({name: value for name, value in own.items() if value != fresh[name]})

    @classmethod
    def from_json(cls, text: str) -> RunState:
        """Return the state that `to_json` wrote; a fresh one for no text. Raises ConfigError (`config.lost-state`)."""
        if not text:
            return cls()
        try:
            values = json.loads(text)
            if values.pop("digest") != _digest_of(values):
                raise ValueError("its digest differs")
            state: RunState = adapter(RunState).validate_python(values)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"the merger's state cannot be read ({error!r:.200})",
                "A merger with the --folder of its checkpoints rebuilds it, unless another version has written it.",
                code="config.lost-state",
            ) from None
        return state


def _digest_of(values: dict[str, Any]) -> str:
    return digest(_text(values).encode())  # the broker keeps the keys in no order


def digested(values: dict[str, Any]) -> str:
    """Return a state as JSON, with a digest of itself."""
    return _text(values | {"digest": _digest_of(values)})


def _text(values: dict[str, Any]) -> str:
    return json.dumps(values, sort_keys=True, default=sorted)  # sets become lists
