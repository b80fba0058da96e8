"""`archipelago bench parity`: the loss of islands and of data-parallel training at equal tokens, trial by trial.

Everything but the wall clock is exact: real islands, a real merger, and the real codec for every contribution. Only the
step times are simulated. With one seed, a difference below about one per cent means little.

Each trial is one line of a file, with its curve, and is never run again. So a comparison that takes long can be made in
several calls: each one runs what is left, in the order of ARMS, and shows all that there is. A trial that is cut is
shown with the share that is done, and compared with others at its own number of tokens.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import tyro

from archipelago.broker.config import InnerConfig, RunConfig, checked, flat
from archipelago.broker.errors import ConfigError, require_number
from archipelago.broker.files import make_untracked
from archipelago.broker.observe.losses import LossUnit, loss_unit, rounded
from archipelago.broker.process import keep_compiled
from archipelago.islands.tasks.task import TaskFile
from archipelago.ops.bench.output import OutputOptions, finish
from archipelago.ops.experiments.study import SAME_TOKENS, measured, records, trials_of, unfinished, unmeasured
from archipelago.ops.experiments.trial import ISLANDS_MAX, Record, Trial, TrialRow, key_of
from archipelago.ops.launch.init import trainable
from archipelago.ops.settings import is_given, say

if TYPE_CHECKING:
    from archipelago.islands.tasks.workload import Workload

#: The syncs of each fragment, unless --inner.steps is given.
SYNCS = 50

ArmName = Literal[
    "parallel", "islands", "parallel-muon", "muon-0.6", "muon-0.8", "isoloco", "rda", "jax", "pytorch", "jax-pytorch"
]


_MUON, _NESTEROV = {"inner.optimizer": "muon"}, {"outer.rule": "nesterov"}
_FLOAT32 = {"model.compute_dtype": "float32"}
#: Everything that can be tried, as a grid of a study. The first seven are tried by default, the most informative first.
#: Their order was written down before any of them was run with 25 M parameters.
ARMS: Mapping[ArmName, Mapping[str, Any]] = {
    # Is the loss of islands at most 1 % above that of data-parallel training?
    "parallel": {"kind": "parallel"},
    "islands": {},
    # How far are they from the better baseline?
    "parallel-muon": {"kind": "parallel", **_MUON},
    # Does Muon inside, with the outer momentum of MuLoCo (arXiv 2505.23725), shorten that distance?
    "muon-0.6": {**_MUON, **_NESTEROV, "outer.momentum": 0.6},
    "muon-0.8": {**_MUON, **_NESTEROV, "outer.momentum": 0.8},
    # Is the outer step of IsoLoCo (arXiv 2607.03011) better than our schedule?
    "isoloco": {**_NESTEROV, "outer.momentum": 0.8, "outer.learning_rate": 1.8},
    # What is isotropic merging worth?
    "rda": {"merge.embedding": "rda", "merge.rest": "rda"},
    # Does it matter in which framework islands train?
    "jax": {"frameworks": "jax", **_FLOAT32},
    "pytorch": {"frameworks": "pytorch", **_FLOAT32},
    "jax-pytorch": {"frameworks": "jax pytorch", **_FLOAT32},
}
#: What the others are compared with.
BASELINES: tuple[ArmName, ...] = ("parallel", "parallel-muon", "jax", "pytorch")
#: What is tried of a user's task.
FEW: tuple[ArmName, ...] = ("parallel", "islands")
DEFAULT: tuple[ArmName, ...] = tuple(name for name, arm in ARMS.items() if "frameworks" not in arm)


class _TimeOverError(Exception):
    """The time of `--minutes` is over."""


@dataclass(frozen=True)
class ParityOptions(OutputOptions):
    """Compare losses at equal tokens, in virtual time: islands with data-parallel training, and other ways to merge.

    Each fragment has 50 syncs at the interval of the settings, unless --inner.steps is given: twice as many at half of
    that interval (--intervals). Results are kept in the folder `parity` of the output, so the comparison can be made in
    several calls.
    """

    task: str | None = None
    """A task of your own, FILE.py:NAME, in place of one of our models (docs/guide/tasks.md)."""

    trials: tuple[ArmName, ...] = ()
    """What to try, in this order. The default is the first seven; of a task the first two. The last three
    train a Llama in PyTorch beside our model in JAX, on the same tokens and in float32."""
    islands: tuple[int, ...] = (8,)
    """The numbers of islands M to compare."""
    intervals: tuple[int, ...] = ()
    """The intervals H to compare, in inner steps, such as 12 24 48. The default is that of the settings."""
    slow: float = 1.0
    """The last island's steps take this many times longer."""
    seeds: tuple[int, ...] = ()
    """The seeds to take means and spreads over, such as 0 1 2. The default is the settings' own."""
    minutes: float = math.inf
    """Begin no trial after this time, and end the one that runs at its next evaluation. The same command goes on later;
    what was ended begins anew, so give it more time than a trial takes. With 0 it shows the results so far."""
    config: Path | None = None
    """A TOML file with settings. Flags win over it."""
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)


def main(options: ParityOptions) -> int:
    config = checked(options.settings)
    for count in options.islands or (0,):
        require_number("--islands", count, f"Give numbers from 1 to {ISLANDS_MAX}.", 1, ISLANDS_MAX)
    require_number("--slow", options.slow, "Give a factor of at least 1.", 1.0)
    keep_compiled()
    work = trainable(config, options.task)
    if work.config.inner.steps == InnerConfig().steps and not is_given("--inner.steps", options.config):
        work = work.changed(inner=replace(work.config.inner, steps=SYNCS * config.sync.interval))
    found = parity(work, options)
    return finish("parity", found, options) if found["rows"] else 0


class Place(NamedTuple):
    """A row of the table: a name in ARMS, and the M and H of its trials."""

    arm: ArmName
    islands: int
    interval: int

    def __str__(self) -> str:
        return f"{self.arm}, M = {self.islands}, H = {self.interval}"


def parity(work: Workload, options: ParityOptions) -> dict[str, Any]:
    """Run the trials that have no result yet, as long as there is time.

    Return plain data with a row for each arm, M and H that has results.

    Raises ConfigError if the task is wrong, has no evaluation (`task.evaluate`), or cannot be tried so
    (`config.value`).
    """
    work.require_evaluation()
    plan, task = list(_planned(work, options)), work.named.name or work.config.model.size
    unit, path = loss_unit(work.named.data), options.output / "parity" / f"{task}.jsonl"
    make_untracked(options.output)
    path.parent.mkdir(exist_ok=True)

    def known() -> Mapping[str, Record]:
        return {key_of(record): record for record in records(path)}

    earlier = known()
    kept = sum(trial.key in earlier for _, trial in plan)
    _run_left(work, options, plan, path, known)
    ended, found, cut = known(), defaultdict[Place, list[Record]](list), defaultdict[Place, list[Record]](list)
    for place, trial in plan:
        if record := ended.get(trial.key):
            found[place].append(record)
        elif record := unfinished(path, trial):
            cut[place].append(record)
    left = len(plan) - sum(map(len, found.values()))
    if kept:
        say(f"{kept} of {len(plan)} results are of earlier calls: if {task} has changed since, delete {path}")
    if left:
        say(f"{left} of {len(plan)} trials are left: give the same command again")
    if cut:
        say("unfinished trials have their share in the column done, and their ratios are at their own tokens")
    also = ["spread"] * (len(options.seeds) > 1) + ["done"] * bool(cut)
    everything = {place: [*found.get(place, ()), *cut.get(place, ())] for place in (*found, *cut)}
    rows = [*found.items(), *((place, [record]) for place, records in cut.items() for record in records)]
    return {
        "config": work.config.digest(), "task": task, "slow": options.slow, "unit": unit.name, "left": left,
        "rows": [_row(place, records, everything, unit, also) for place, records in rows],
    }  # fmt: skip


def _run_left(
    work: Workload,
    options: ParityOptions,
    plan: Sequence[tuple[Place, Trial]],
    path: Path,
    known: Callable[[], Mapping[str, Record]],
) -> None:
    """Run the trials that have no result yet until the time is over."""
    names = {trial: f"{place}, seed {trial.seed}" for place, trial in plan}
    unit, deadline = loss_unit(work.named.data), time.monotonic() + 60 * options.minutes

    def note(name: str, record: Record) -> None:
        """Say the loss of a trial so far, because a trial may take an hour. End the trial if there is no more time."""
        tokens, bits = record["curve"][-1]
        loss = unit.from_evaluation(math.nan if bits is None else bits)
        say(f"{name}: {rounded(loss)} {unit.name} after {tokens:,} tokens, {record['share']:.0%}")
        if time.monotonic() >= deadline and record["share"] < 1.0:
            raise _TimeOverError

    with suppress(_TimeOverError):
        for trial in unmeasured([*names], path, known):
            if time.monotonic() >= deadline:
                break
            of_trial = work.of(work.named.under(trial.config), trial.config)
            measured(trial, path, of_trial, partial(note, names[trial]))


def _planned(work: Workload, options: ParityOptions) -> Iterator[tuple[Place, Trial]]:
    """Yield the trials in order, each with its row."""
    is_task, config, usual = isinstance(work.named, TaskFile), work.config, work.config.sync.interval
    for name in options.trials or (FEW if is_task else DEFAULT):
        arm = ARMS[name]
        if is_task and ("frameworks" in arm or (work.model.has_own_optimizer and "inner.optimizer" in arm)):
            raise ConfigError(
                f"the trial {name!r} is not one of the task {work.named.name!r}, which has its own loss and optimiser",
                "Leave it out, or compare one of our models.",
                code="config.value",
            )
        axes = {"islands": list(options.islands), "sync.interval": list(options.intervals or (usual,))}
        grid = {**arm, **axes, "slow": options.slow, "seeds": options.seeds or [config.seed]}
        for trial in dict.fromkeys(trials_of(grid, flat(config))):  # baselines have no intervals
            _ = trial.config  # Report a wrong setting now, and not after an hour.
            yield Place(name, trial.islands, dict(trial.settings).get("sync.interval", usual)), trial


def _row(
    place: Place, records: Sequence[Record], seen: Mapping[Place, Sequence[Record]], unit: LossUnit, also: Sequence[str]
) -> dict[str, Any]:
    """Return a line of the table. A column has the ratio to each baseline with as many islands and the same interval.

    `seen` has all records, also of trials that were cut, and `also` the columns that not every table has.
    """
    row, first, ratios = TrialRow({}, tuple(records)), records[0], dict[str, float]()
    spread = unit.from_evaluation(row.spread) if len(records) > 1 else math.nan
    for name in dict.fromkeys(other.arm for other in seen if other.arm in BASELINES):
        has_interval = "kind" not in ARMS[name]  # unlike data-parallel training
        same = (
            seen[other]
            for other in seen
            if (other.arm, other.islands) == (name, place.islands)
            and (not has_interval or other.interval == place.interval)
        )
        beside = _beside(first, next(same, ()))
        # A user's loss may be negative; then ratios mean nothing.
        has_ratio = all(loss > 0 for loss in beside.losses.values())
        ratios[f"to_{name}"] = row.ratio(beside) if has_ratio else math.nan
    return {
        "trial": place.arm,
        "islands": place.islands,
        "interval": place.interval,
        **({"done": first.get("share", 1.0)} if "done" in also else {}),
        "tokens": first["tokens"],
        "loss": unit.from_evaluation(row.mean),
        **({"spread": spread} if "spread" in also else {}),
        **ratios,
        "rounds": first.get("rounds", 0),
        "per_round": first.get("per_round", 0.0),
    }


def _beside(record: Record, others: Sequence[Record]) -> TrialRow:
    """Return those of a baseline's records that a record is compared with: the finished ones if it is finished.

    A record of a trial that was cut is compared with their evaluations at its number of tokens, where there are any.
    """
    if "share" not in record:
        return TrialRow({}, tuple(other for other in others if "share" not in other))
    tokens, found = record["tokens"], list[Record]()
    for other in others:
        distances = [(abs(at - tokens), loss) for at, loss in other["curve"] if loss is not None]
        distance, loss = min(distances, default=(math.inf, math.nan))
        found += [{**other, "bits_per_byte": loss}] if distance <= SAME_TOKENS * tokens else []
    return TrialRow({}, tuple(found))
