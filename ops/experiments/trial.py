"""One run of a study: islands in virtual time, or one of their baselines. Settings in, a record out.

A trial is identified by the settings that it names. Settings that it leaves out have the defaults of this version.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archipelago.broker.config import RunConfig, checked
from archipelago.broker.errors import ConfigError, DivergedError

if TYPE_CHECKING:
    from archipelago.islands.tasks.workload import Workload

#: Islands in virtual time; then, on the same number of tokens, data-parallel and one process.
KINDS = ("islands", "parallel", "one")
DISTRIBUTION = "archipelago-train"
#: The packages whose sources decide a result. An editable install may keep each in a folder elsewhere.
PACKAGES = ("archipelago.broker", "archipelago.islands", "archipelago.merger", "archipelago.ops")
#: The sections that each kind of run reads.
_MATTERS = {
    "islands": ("model", "data", "inner", "sync", "merge", "outer", "adopt", "wire"),
    "parallel": ("model", "data", "inner"),
    "one": ("model", "data", "inner"),
}

#: Length of a simulated tape. A longer run starts it again from the beginning.
TAPE_SECONDS = 12 * 3600.0
#: What hostile islands do: `hostile.FORGERIES` names the same.
ATTACKS = ("flip", "noise", "scale", "collude", "labels", "claims", "stale")
#: Settings by dotted name, such as `outer.rule`.
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Trial:
    """One run of a study.

    Attributes:
        kind: One of KINDS.
        islands: The number of islands M, or of workers.
        slow: How many times longer the steps of the last `slowed` islands take.
        slowed: How many islands are slow.
        chips: Islands leave and join as on a simulated tape of this many chips, and train on as many tokens as without.
            Slow islands can be among them.
        sending: How long each contribution of a slow island is on its way, in steps of a fast island.
        hostile: How many of the islands are hostile.
        attack: What they do, a name of `hostile.FORGERIES`.
        apart: Each island reads a part of the text of its own.
        lockstep: All islands step at once, and adopt at the same step boundary what they have sent (`LockstepRun`).
        seed: The seed of the run.
        settings: Pairs of a dotted name and a value, sorted by name.
    """

    kind: str = "islands"
    islands: int = 4
    slow: float = 1.0
    slowed: int = 1
    chips: float = 0.0
    sending: float = 0.0
    hostile: int = 0
    attack: str = ""
    apart: bool = False
    lockstep: bool = False
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
            chips=float(asked.chips),
            sending=sending,
            attack=asked.attack if asked.hostile else "",
        )

    def _require_possible(self) -> None:
        """Raise ConfigError for a combination that no study can have."""
        if self.kind not in KINDS:
            raise ConfigError(
                f"there is no kind of run {self.kind!r}", f"Choose one of {', '.join(KINDS)}.", code="study.kind"
            )
        if type(self.islands) is not int or not 1 <= self.islands <= 64 or not 1.0 <= self.slow < math.inf:
            raise ConfigError(
                f"a study cannot have {self.islands} islands, the last {self.slow} times slower",
                "Give 1 to 64 islands, and a factor of 1 or more.",
                code="study.islands",
            )
        if (
            type(self.slowed) is not int
            or not 1 <= self.slowed <= max(1, self.islands - 1)
            or not 0.0 <= self.chips <= 1e8
            or not 0.0 <= self.sending < math.inf
            or (self.chips and self.sending)
        ):
            raise ConfigError(
                f"a study cannot have {self.slowed} slow islands of {self.islands}, sending = {self.sending} and "
                f"chips = {self.chips:g}",
                "Up to M − 1 of M islands can be slow. A tape has up to 1e8 chips, and nothing on it is late.",
                code="study.slow",
            )
        is_possible = type(self.hostile) is int and 0 <= self.hostile < self.islands
        if not is_possible or (self.hostile and (self.chips or self.attack not in ATTACKS)):
            raise ConfigError(
                f"a study cannot have {self.hostile} of {self.islands} islands hostile with the attack {self.attack!r}",
                f"At least one island is honest, none fails (chips), and the attack is one of {', '.join(ATTACKS)}.",
                code="study.attack",
            )
        if self.lockstep and (self.slow > 1.0 or self.sending or self.chips or self.hostile or self.apart):
            raise ConfigError(
                "a study cannot have lockstep = true with slow, failing, late or hostile islands, or with apart = true",
                "Leave out lockstep, or the others.",
                code="study.lockstep",
            )

    @property
    def config(self) -> RunConfig:
        """The run's config. Raise ConfigError for an unknown setting and for a value out of range."""
        values: dict[str, Any] = {"seed": self.seed}
        for name, value in self.settings:
            section, _, key = name.partition(".")
            values.setdefault(section, {})[key] = value
        return checked(values, "the study's settings")

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
#: Values that records leave out where they have the default.
_OPTIONAL: Mapping[str, Any] = {name: OWN[name] for name in OWN if name not in ("kind", "islands", "slow")}


def key_of(record: Mapping[str, Any]) -> str:
    """Return the key of the trial that a record belongs to."""
    own = {k: record[k] for k in ("kind", "islands", "slow", "seed", "settings")}
    return json.dumps(own | {k: record.get(k, v) for k, v in _OPTIONAL.items()}, sort_keys=True)


def measure(trial: Trial) -> dict[str, Any]:
    """Run the trial and return its record. A run that diverges is a result too, with null as its loss."""
    from archipelago.islands.creation import fitted
    from archipelago.islands.data.corpus import open_corpus
    from archipelago.islands.tasks.ours import our_work
    from archipelago.ops.experiments.baselines import Point

    config = trial.config
    corpus = open_corpus(config.data.corpus)
    config = fitted(config, corpus)
    points: list[Point] = []
    found: dict[str, Any] = {}
    began, used = time.perf_counter(), time.process_time()
    try:
        found = _RUNS[trial.kind](trial, our_work(config, corpus), points.append)
    except DivergedError:
        points.append(Point(points[-1].tokens, math.nan))
    last, first = points[-1].bits_per_byte, points[0].bits_per_byte
    diverged = not (math.isfinite(last) and last < first)
    return {
        "kind": trial.kind,
        "islands": trial.islands,
        "slow": trial.slow,
        "seed": trial.seed,
        **{name: getattr(trial, name) for name, usual in _OPTIONAL.items() if getattr(trial, name) != usual},
        "settings": dict(trial.settings),
        "bits_per_byte": None if diverged else last,
        **({} if diverged or math.isnan(points[-1].test_bits_per_byte) else {"test": points[-1].test_bits_per_byte}),
        "diverged": diverged,
        "tokens": points[-1].tokens,
        "seconds": round(time.perf_counter() - began, 2),
        "cpu_seconds": round(time.process_time() - used, 2),
        **found,
        "curve": [[p.tokens, round(p.bits_per_byte, 5) if math.isfinite(p.bits_per_byte) else None] for p in points],
        "version": version(),
    }


Note = Callable[[Any], None]


def _islands(trial: Trial, workload: Workload, note: Note) -> dict[str, Any]:
    from archipelago.ops.experiments.island_runs import islands, participation, staleness

    if trial.chips:
        return _along_tape(trial, workload, note)
    _, run = islands(workload, trial, note)
    rounds, per_round = participation(run)
    mean, most = staleness(run)
    return {"rounds": rounds, "per_round": round(per_round, 4), "staleness": round(mean, 4), "staleness_max": most}


def _along_tape(trial: Trial, workload: Workload, note: Note) -> dict[str, Any]:
    import numpy as np

    from archipelago.ops.experiments.island_runs import participation
    from archipelago.ops.experiments.tape_run import follow, taped
    from archipelago.ops.simulation.failures import FailureModel, simulate

    model = FailureModel(chips=trial.chips, islands=trial.islands)
    tape = taped(simulate(model, TAPE_SECONDS, np.random.default_rng(trial.seed)), model.step_seconds)
    config = workload.config
    tokens = config.inner.steps * config.tokens_per_step * work_of(trial)
    run, goodput, first, last = follow(workload, tape, tokens, trial.slow, trial.slowed)
    note(first)
    note(last)
    rounds, per_round = participation(run)
    return {"rounds": rounds, "per_round": round(per_round, 4), "goodput": round(goodput, 4), "deaths": run.deaths}


def _parallel(trial: Trial, workload: Workload, note: Note) -> dict[str, Any]:
    from archipelago.ops.experiments.baselines import data_parallel

    # It trains on as many tokens as the islands.
    steps = round(workload.config.inner.steps * work_of(trial) / trial.islands)
    data_parallel(workload, trial.islands, note, steps)
    return {}


def _one(trial: Trial, workload: Workload, note: Note) -> dict[str, Any]:
    from archipelago.ops.experiments.baselines import one_process

    config = workload.config
    one_process(workload, round(config.inner.steps * work_of(trial)) * config.tokens_per_step, note)
    return {}


def work_of(trial: Trial) -> float:
    """Return the steps that all islands make together, in units of the steps of the fastest one."""
    return trial.islands - trial.slowed + trial.slowed / trial.slow


_RUNS: dict[str, Callable[[Trial, Workload, Note], dict[str, Any]]] = {
    "islands": _islands,
    "parallel": _parallel,
    "one": _one,
}


@cache
def version() -> str:
    """Return the distribution's version and twelve digits of the digest of the sources that this process runs."""
    specs = [find_spec(package) for package in PACKAGES]
    folders = [Path(folder) for spec in specs if spec for folder in spec.submodule_search_locations or ()]
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    sources = hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()[:12]
    try:
        return f"{metadata.version(DISTRIBUTION)}+{sources}"
    except metadata.PackageNotFoundError:
        return f"0+{sources}"
