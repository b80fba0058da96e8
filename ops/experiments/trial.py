"""One run of a study: islands in virtual time, or what they are measured against. Settings in, a record out.

A trial is known by what it says, and by nothing else: the settings that it leaves out have this version's defaults.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from archipelago.broker.config import RunConfig, checked
from archipelago.broker.errors import ConfigError, DivergedError

KINDS = ("islands", "diloco", "parallel", "one")
"""islands in virtual time; synchronous DiLoCo, data-parallel and one process, on as many tokens"""
DISTRIBUTION, PACKAGES = "archipelago-train", ("broker", "islands", "merger", "ops")
_MATTERS = {
    "islands": ("model", "data", "inner", "sync", "merge", "outer", "adopt", "wire"),
    "diloco": ("model", "data", "inner", "sync.interval", "outer.learning_rate", "outer.momentum"),
    "parallel": ("model", "data", "inner"),
    "one": ("model", "data", "inner"),
}

TAPE_SECONDS = 12 * 3600.0
"""of a simulated tape, which begins again when it is over"""
OWN: Mapping[str, Any] = {
    "kind": "islands", "islands": 4, "slow": 1.0, "slowed": 1, "chips": 0.0, "sending": 0.0, "late": 0.0,
}  # fmt: skip
"""what a trial says beside its settings and its seed, where a study does not"""
Settings = Mapping[str, Any]
"""by dotted name, such as `outer.rule`"""


@dataclass(frozen=True)
class Trial:
    """A kind of run, M, how much slower the last `slowed` islands are, a seed, and settings by dotted name.

    `sending`: for so many steps of a fast island each contribution of a slow one is on its way. `chips`: islands go and
    come as on a simulated tape of so many chips, and train on as many tokens as without. `late`: for so many steps what
    the merger says is on its way to each island.
    """

    kind: str
    islands: int
    slow: float
    seed: int
    settings: tuple[tuple[str, Any], ...]
    slowed: int = 1
    chips: float = 0.0
    sending: float = 0.0
    late: float = 0.0

    @classmethod
    def of(
        cls,
        kind: str,
        islands: int,
        slow: float,
        seed: int,
        settings: Settings,
        slowed: int = 1,
        chips: float = 0.0,
        sending: float = 0.0,
        late: float = 0.0,
    ) -> Trial:
        """The trial; what does not matter to its kind is left out, so that studies share their baselines."""
        if kind not in KINDS:
            raise ConfigError(f"there is no kind of run {kind!r}", f"Choose one of {', '.join(KINDS)}.")
        if type(islands) is not int or not 1 <= islands <= 64 or not 1.0 <= slow < math.inf:
            raise ConfigError(f"{islands} islands, the last {slow} times slower, cannot be", "1 to 64, and 1 or more.")
        if (
            type(slowed) is not int
            or not 1 <= slowed <= max(1, islands - 1)
            or not 0.0 <= chips <= 1e8
            or not (0.0 <= sending < math.inf and 0.0 <= late < math.inf)
            or (chips and (slow > 1.0 or sending or late))
        ):
            raise ConfigError(
                f"{slowed} slow islands of {islands}, {sending} steps to send, {late} to hear, or a tape of {chips:g} "
                "chips, cannot be",
                "Of M islands up to M − 1 can be slow; a tape has its own speeds, and up to 1e8 chips.",
            )
        matters = _MATTERS[kind]
        mine = {k: v for k, v in settings.items() if k in matters or k.partition(".")[0] in matters}
        waits = kind == "diloco" or islands == 1  # who waits for all makes as many steps, however slow the slowest is
        factor = 1.0 if waits else float(slow)
        sending = float(sending) if kind == "islands" and islands > 1 else 0.0
        late = float(late) if kind == "islands" else 0.0
        chips = float(chips) if kind == "islands" else 0.0
        slowed = slowed if factor > 1.0 or sending else 1
        return cls(kind, islands, factor, seed, tuple(sorted(mine.items())), slowed, chips, sending, late)

    @property
    def config(self) -> RunConfig:
        """The run's config. Raises ConfigError for a setting that is not there or out of range."""
        values: dict[str, Any] = {"seed": self.seed}
        for name, value in self.settings:
            section, _, key = name.partition(".")
            values.setdefault(section, {})[key] = value
        return checked(values, "the study's settings")

    @property
    def said(self) -> dict[str, Any]:
        """All but the seed, by name: what it says of itself, and its settings."""
        return {name: getattr(self, name) for name in OWN} | dict(self.settings)

    @property
    def key(self) -> str:
        """What tells it from every other trial."""
        return json.dumps(dataclasses.asdict(self) | {"settings": dict(self.settings)}, sort_keys=True)


_LATER: Mapping[str, Any] = {name: OWN[name] for name in ("slowed", "chips", "sending", "late")}
"""what records that are older than these lack"""


def key_of(record: Mapping[str, Any]) -> str:
    """The key of the trial that a record is of."""
    own = {k: record[k] for k in ("kind", "islands", "slow", "seed", "settings")}
    return json.dumps(own | {k: record.get(k, v) for k, v in _LATER.items()}, sort_keys=True)


def measure(trial: Trial) -> dict[str, Any]:
    """Runs the trial; one that diverges is a result too, with null for its loss."""
    from archipelago.islands.creation import fitted
    from archipelago.islands.data.corpus import open_corpus
    from archipelago.ops.experiments.baselines import Point

    config = trial.config
    corpus = open_corpus(config.data.corpus)
    config = fitted(config, corpus)
    points: list[Point] = []
    found: dict[str, Any] = {}
    began, used = time.perf_counter(), time.process_time()
    try:
        found = _RUNS[trial.kind](trial, config, corpus, points.append)
    except DivergedError:
        points.append(Point(points[-1].tokens, math.nan))
    last, first = points[-1].bits_per_byte, points[0].bits_per_byte
    diverged = not (math.isfinite(last) and last < first)
    return {
        "kind": trial.kind,
        "islands": trial.islands,
        "slow": trial.slow,
        "seed": trial.seed,
        **{name: getattr(trial, name) for name, usual in _LATER.items() if getattr(trial, name) != usual},
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


def _islands(trial: Trial, config: RunConfig, corpus: Any, note: Note) -> dict[str, Any]:
    from archipelago.ops.experiments.parity import islands, own_bits_per_byte, participation, staleness

    if trial.chips:
        return _along_tape(trial, config, corpus, note)
    _, run = islands(config, corpus, trial.islands, trial.slow, note, trial.slowed, trial.sending, trial.late)
    rounds, per_round = participation(run)
    mean, most = staleness(run)
    found = {"rounds": rounds, "per_round": round(per_round, 4), "staleness": round(mean, 4), "staleness_max": most}
    return found | ({"own_bits_per_byte": own_bits_per_byte(run, corpus)} if run.merger.rules.outer.looks_ahead else {})


def _along_tape(trial: Trial, config: RunConfig, corpus: Any, note: Note) -> dict[str, Any]:
    import numpy as np

    from archipelago.ops.experiments.parity import participation
    from archipelago.ops.experiments.tape_run import follow
    from archipelago.ops.simulation.failures import FailureModel, simulate
    from archipelago.ops.simulation.tape import taped

    model = FailureModel(chips=trial.chips, islands=trial.islands)
    tape = taped(simulate(model, TAPE_SECONDS, np.random.default_rng(trial.seed)), model.step_seconds)
    run, goodput, first, last = follow(
        config, corpus, tape, config.inner.steps * config.tokens_per_step * trial.islands
    )
    note(first)
    note(last)
    rounds, per_round = participation(run)
    return {"rounds": rounds, "per_round": round(per_round, 4), "goodput": round(goodput, 4), "deaths": run.deaths}


def _diloco(trial: Trial, config: RunConfig, corpus: Any, note: Note) -> dict[str, Any]:
    from archipelago.ops.experiments.baselines import DILOCO_MOMENTUM, DILOCO_RATE, diloco

    said = dict(trial.settings)
    rate, momentum = said.get("outer.learning_rate", DILOCO_RATE), said.get("outer.momentum", DILOCO_MOMENTUM)
    diloco(config, corpus, trial.islands, note, rate, momentum)
    return {}


def _parallel(trial: Trial, config: RunConfig, corpus: Any, note: Note) -> dict[str, Any]:
    from archipelago.ops.experiments.baselines import data_parallel

    steps = round(config.inner.steps * work(trial) / trial.islands)  # as many tokens as the islands had
    config = dataclasses.replace(config, inner=dataclasses.replace(config.inner, steps=steps))
    data_parallel(config, corpus, trial.islands, note)
    return {}


def _one(trial: Trial, config: RunConfig, corpus: Any, note: Note) -> dict[str, Any]:
    from archipelago.ops.experiments.baselines import one_process

    one_process(config, corpus, round(config.inner.steps * work(trial)) * config.tokens_per_step, note)
    return {}


def work(trial: Trial) -> float:
    """How much the islands do together, in units of what the fastest does."""
    return trial.islands - trial.slowed + trial.slowed / trial.slow


_RUNS: dict[str, Callable[[Trial, RunConfig, Any, Note], dict[str, Any]]] = {
    "islands": _islands, "diloco": _diloco, "parallel": _parallel, "one": _one,
}  # fmt: skip


@cache
def version() -> str:
    """The distribution's version and twelve digits of the digest of its sources, as they are on this machine."""
    root = Path(__file__).parents[2]
    paths = sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))
    sources = hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()[:12]
    try:
        return f"{metadata.version(DISTRIBUTION)}+{sources}"
    except metadata.PackageNotFoundError:
        return f"0+{sources}"
