"""One run of a study: islands in virtual time, or one of their baselines. Settings in, a record out.

A trial is identified by the settings that it names. Settings that it leaves out have the defaults of this version.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from archipelago.broker.config import RunConfig, checked
from archipelago.broker.errors import ConfigError, DivergedError
from archipelago.broker.machine import require_extra
from archipelago.broker.process import finite
from archipelago.ops.bench.provenance import provenance
from archipelago.ops.launch.init import workload_of

if TYPE_CHECKING:
    from archipelago.islands.tasks.workload import Workload

#: Islands in virtual time; then, on the same number of tokens, data-parallel and one process.
KINDS = ("islands", "parallel", "one")
#: The sections that each kind of run reads.
_MATTERS = {
    "islands": ("model", "data", "inner", "sync", "merge", "outer", "adopt", "wire"),
    "parallel": ("model", "data", "inner"),
    "one": ("model", "data", "inner"),
}

#: The most islands of a run in virtual time.
ISLANDS_MAX = 64
#: What hostile islands do: `island_runs.FORGERIES` and `island_runs.LITTLE` name the same.
ATTACKS = ("flip", "noise", "scale", "collude", "labels", "stale", "little-0.6", "little-1.0", "little-1.5")
#: Settings by dotted name, such as `outer.rule`.
Settings = Mapping[str, Any]
#: The result of a trial.
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Trial:
    """One run of a study.

    Attributes:
        islands: The number of islands M, or of workers.
        slow: How many times longer the steps of the last `slowed` islands take.
        sending: How long each contribution of a slow island is on its way, in steps of a fast island.
        attack: What they do, one of ATTACKS.
        apart: Each island reads a part of the text of its own.
        frameworks: Those in which the islands train, in turn, such as `jax pytorch`; empty for our worker.
        settings: Pairs of a dotted name and a value, sorted by name.
    """

    kind: str = "islands"
    islands: int = 4
    slow: float = 1.0
    slowed: int = 1
    sending: float = 0.0
    hostile: int = 0
    attack: str = ""
    apart: bool = False
    frameworks: str = ""
    seed: int = 0
    settings: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, settings: Settings, seed: int = 0, **own: Any) -> Trial:
        """Make a trial without the values that its kind does not read, so that studies share their baselines."""
        asked = cls(**own, seed=seed)
        asked._require_possible()
        matters, slow = _MATTERS[asked.kind], 1.0 if asked.islands == 1 else float(asked.slow)
        named = {name: value for name, value in settings.items() if name.partition(".")[0] in matters}
        asked = replace(asked, slow=slow, settings=tuple(sorted(named.items())))
        if asked.kind != "islands":
            ignored = {name: value for name, value in OWN.items() if name not in ("kind", "islands", "slow", "slowed")}
            return replace(asked, **ignored, slowed=asked.slowed if slow > 1.0 else 1)
        sending = float(asked.sending) if asked.islands > 1 else 0.0
        return replace(
            asked,
            slowed=asked.slowed if slow > 1.0 or sending else 1,
            sending=sending,
            attack=asked.attack if asked.hostile else "",
        )

    def _require_possible(self) -> None:
        """Raise ConfigError for a combination that no study can have (`study.trial`)."""
        whole = [self.islands, self.slowed, self.hostile]
        is_possible = (
            self.kind in KINDS
            and all(type(number) is int for number in whole)  # A study file may give text.
            and 1 <= self.islands <= ISLANDS_MAX
            and 1 <= self.slowed <= max(1, self.islands - 1)
            and 1.0 <= self.slow < math.inf
            and 0.0 <= self.sending < math.inf
            and 0 <= self.hostile < self.islands
            and (not self.hostile or self.attack in ATTACKS)
            and set(self.frameworks.split()) <= {"jax", "pytorch"}
            and not (self.frameworks and (self.hostile or self.apart or self.sending))
        )
        if not is_possible:
            asked = {name: getattr(self, name) for name in OWN if getattr(self, name) != OWN[name]}
            raise ConfigError(
                f"a study cannot have a trial of {asked}",
                f"The kinds are {', '.join(KINDS)}. Of 1 to {ISLANDS_MAX} islands, one is not slow, one not hostile; "
                f"attacks are {', '.join(ATTACKS)}; frameworks are jax and pytorch, whose islands are honest, read the "
                "same text and send at once.",
                code="study.trial",
            )

    @property
    def config(self) -> RunConfig:
        """The run's config. Raise ConfigError for an unknown setting and for a value out of range."""
        values: dict[str, Any] = {"seed": self.seed}
        for name, value in self.settings:
            section, _, key = name.partition(".")
            values.setdefault(section, {})[key] = value
        return checked(values, "the settings of a trial")

    @property
    def named_values(self) -> dict[str, Any]:
        """All values except the seed, by name."""
        return {name: getattr(self, name) for name in OWN} | dict(self.settings)

    @property
    def key(self) -> str:
        """The identity of the trial."""
        return json.dumps(dataclasses.asdict(self) | {"settings": dict(self.settings)}, sort_keys=True)


#: The values of a trial other than its settings and its seed, with their defaults.
OWN: Mapping[str, Any] = {
    each.name: each.default for each in dataclasses.fields(Trial) if each.name not in ("seed", "settings")
}


def key_of(record: Mapping[str, Any]) -> str:
    """Return the key of the trial that a record belongs to."""
    own = {name: record.get(name, usual) for name, usual in OWN.items()}  # older records lack newer values
    return json.dumps(own | {name: record[name] for name in ("seed", "settings")}, sort_keys=True)


@dataclass(frozen=True)
class CurvePoint:
    """One evaluation of a run.

    Attributes:
        tokens: Tokens trained on so far.
        bits_per_byte: Loss on the validation text, which is used to choose rates and rules.
        test_bits_per_byte: Loss on the test text, which is not used for any choice.
        share: The share of the run that is over.
    """

    tokens: int
    bits_per_byte: float
    test_bits_per_byte: float = math.nan
    share: float = 0.0


#: Receives each evaluation of a run.
Progress = Callable[[CurvePoint], None]


def measure(
    trial: Trial,
    work: Workload | None = None,
    progress: Callable[[Record], None] = lambda record: None,
) -> dict[str, Any]:
    """Run the trial and return its record. A run that diverges is a result too, with null as its loss.

    By default it trains one of our models with its settings. At each evaluation, `progress` gets the record so far,
    which also has the `share` of the run that is over.
    """
    if work is None:
        work = workload_of(trial.config, None)
    points: list[CurvePoint] = []
    began, used = time.perf_counter(), time.process_time()

    def record(least: float, **found: Any) -> dict[str, Any]:
        last = points[-1]
        diverged = not (math.isfinite(last.bits_per_byte) and last.bits_per_byte < least)
        return {
            **dataclasses.asdict(trial),
            "settings": dict(trial.settings),
            "bits_per_byte": None if diverged else last.bits_per_byte,
            **({} if diverged or math.isnan(last.test_bits_per_byte) else {"test": last.test_bits_per_byte}),
            "diverged": diverged,
            "tokens": last.tokens,
            "seconds": round(time.perf_counter() - began, 2),
            "cpu_seconds": round(time.process_time() - used, 2),
            **found,
            "curve": finite([[point.tokens, round(point.bits_per_byte, 5)] for point in points]),
            "provenance": provenance(),
        }

    def note(point: CurvePoint) -> None:
        points.append(point)
        progress(record(math.inf, share=point.share))

    found: dict[str, Any] = {}
    try:
        found = _played(trial, work, note)
    except DivergedError:
        points.append(CurvePoint(points[-1].tokens, math.nan))
    return record(points[0].bits_per_byte, **found)


def _played(trial: Trial, workload: Workload, note: Progress) -> dict[str, Any]:
    """Train as the trial says, and report each evaluation. Return what the record has of islands."""
    from archipelago.ops.experiments import baselines
    from archipelago.ops.experiments.island_runs import figures, islands

    if trial.frameworks:
        require_extra("llama", "Training in PyTorch")
        from archipelago.ops.experiments.both_frameworks import played

        return played(trial, workload, note)
    steps = workload.config.inner.steps * work_of(trial)  # Baselines train on as many tokens as the islands.
    if trial.kind == "islands":
        return figures(islands(workload, trial, note))
    workers = trial.islands if trial.kind == "parallel" else 1
    baselines.train(workload, workers, max(1, round(steps / workers)), note)
    return {}


def work_of(trial: Trial) -> float:
    """Return the steps that all islands make together, in units of the steps of the fastest one."""
    return trial.islands - trial.slowed + trial.slowed / trial.slow


# -- the same trial with several seeds ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrialRow:
    """The records of a trial with different seeds, sorted by seed."""

    #: The settings, and the values of OWN.
    settings: Settings
    records: tuple[Record, ...]

    @property
    def losses(self) -> dict[int, float]:
        """Bits per byte of the validation text by seed; empty when a seed diverged."""
        return self.by_seed("bits_per_byte")

    def by_seed(self, text: str) -> dict[int, float]:
        """Return bits per byte by seed, of the validation text (`bits_per_byte`) or the test text (`test`)."""
        return {} if self.diverged else {r["seed"]: r[text] for r in self.records if text in r}

    @property
    def diverged(self) -> int:
        """The number of seeds that diverged."""
        return sum(bool(r["diverged"]) for r in self.records)

    @property
    def tokens(self) -> float:
        """Mean number of tokens over the seeds."""
        return fmean(r["tokens"] for r in self.records)

    @property
    def mean(self) -> float:
        """Mean loss over the seeds, infinite when one of them diverged."""
        return fmean(self.losses.values()) if self.losses else math.inf

    @property
    def spread(self) -> float:
        """The standard deviation of the loss over the seeds; 0 for one seed."""
        return stdev(self.losses.values()) if len(self.losses) > 1 else 0.0

    def ratio(self, other: TrialRow | None, text: str = "bits_per_byte") -> float:
        """Return the mean ratio of this loss to the other's, over the seeds that both have; NaN without any."""
        others = other.by_seed(text) if other else {}
        ratios = [loss / others[seed] for seed, loss in self.by_seed(text).items() if seed in others]
        return fmean(ratios) if ratios else math.nan


def grouped(records: Iterable[Record]) -> list[TrialRow]:
    """Group the records into rows: the same trial with different seeds is one row."""
    by: defaultdict[str, list[Record]] = defaultdict(list)
    for record in records:
        by[key_of({**record, "seed": 0})].append(record)
    return [
        TrialRow({**{name: r[0].get(name, usual) for name, usual in OWN.items()}, **r[0]["settings"]},
            tuple(sorted(r, key=lambda record: record["seed"])))
        for r in by.values()
    ]  # fmt: skip
