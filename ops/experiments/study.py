"""`archipelago bench study`: run each trial of a study once, over any number of sessions, and show the results.

A TOML file names trials as grids, and a file beside it holds the results, one JSON line per trial.

    about = "the question"
    base = "base.toml"                  # settings of every trial, a file as --config takes it
    seeds = [0, 1, 2]

    [[grid]]                            # the product of all lists; a trial for each seed
    kind = "islands"                    # the default; or parallel, one
    islands = [2, 4]
    slow = 1.0                          # how many times longer the steps of the last island take
    slowed = 1                          # how many islands are slow
    sending = 0                         # for how many steps each contribution of these is on its way
    hostile = 0                         # how many islands are hostile
    attack = "flip"                     # what they do, see ops/experiments/island_runs.py
    apart = false                       # each island reads a part of the text of its own
    frameworks = ""                     # "jax pytorch" trains a Llama in PyTorch beside our model in JAX
    seeds = [0]                         # instead of the study's
    "outer.rule" = ["sgd", "nesterov"]  # a setting

Settings that no file names have the defaults of this version. A trial is identified by the settings that the files
name, so a study pins everything that decides its results.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import time
import tomllib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import tyro

from archipelago.broker.config import flat
from archipelago.broker.errors import ConfigError
from archipelago.broker.files import write_atomically
from archipelago.broker.observe.losses import rounded
from archipelago.broker.process import finite, keep_compiled, print_json
from archipelago.ops.bench.output import table
from archipelago.ops.experiments.trial import OWN, Record, Trial, TrialRow, grouped, key_of, measure
from archipelago.ops.launch.devices import accelerators
from archipelago.ops.launch.supervisor import ONE_THREAD
from archipelago.ops.settings import say, table_console

if TYPE_CHECKING:
    from archipelago.islands.tasks.workload import Workload

_TOP = {"about", "base", "seeds", "grid"}
_SHAPE = "See ops/experiments/studies/*.toml, and the head of ops/experiments/study.py."
#: The studies that come with the package.
SHIPPED = Path(__file__).with_name("studies")
#: The folder for their results, in the working directory.
RESULTS = Path("studies")
#: Two runs are compared when their tokens differ by at most this share. Islands end within a few steps of each other.
SAME_TOKENS = 0.03
#: The settings of the merger's rule against hostile islands.
_RULES = ("merge.scores", "merge.share_cap")
#: Several processes share the accelerators. Without any, the arrays are so small that a second thread costs more than
#: it saves.
_SHARED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


@dataclass(frozen=True)
class StudyOptions:
    """Run a study, a grid of trials in virtual time, from where it was left; or show its results.

    Each result is one line of `NAME.jsonl` and is never measured again. A trial that is cut is shown as far as it came,
    and begins anew. It computes with one thread: to use more cores, give the same command in several shells, which
    share the trials.
    """

    name: Annotated[str, tyro.conf.Positional]
    """The study. docs/results/studies.md lists those that come with the package."""
    show: bool = False
    """Run nothing. Print the table of the results so far."""
    folder: Path | None = None
    """The folder with studies of your own (NAME.toml), which also gets the results. The default is the studies that
    come with the package, with results in ./studies.
    """
    json: bool = False
    """Print one JSON object."""


def main(options: StudyOptions) -> int:
    studies, results = options.folder or SHIPPED, options.folder or RESULTS
    study = load(studies, options.name)

    def known() -> Mapping[str, Record]:
        return recorded(studies, study.name) | recorded(results, study.name)

    if not options.show:
        os.environ.update((_SHARED if accelerators() else ONE_THREAD) | os.environ)  # before JAX looks at its devices
        keep_compiled()
        run(study, results, known)
    ended = known()
    found = show(study, ended, quiet=options.json)
    varied = varying([trial.named_values for trial in study.trials])
    for trial in study.trials:
        if trial.key not in ended and (record := unfinished(results / f"{study.name}.jsonl", trial)):
            say(f"unfinished, {record['share']:.0%} done: {in_words(trial, record, varied)}")
    if options.json:
        print_json(finite(found))
    return 0


# -- the file ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Study:
    """A question, and the trials that answer it in the order in which they run."""

    name: str
    about: str
    trials: tuple[Trial, ...]


def load(folder: Path, name: str) -> Study:
    """Read the study in `FOLDER/NAME.toml`. Raise ConfigError for a file that is missing or is not a study."""
    values = _toml(folder / f"{name}.toml")
    if unknown := sorted(set(values) - _TOP):
        raise ConfigError(f"the study {name!r} has unknown keys: {', '.join(unknown)}", _SHAPE, code="study.shape")
    base = flat(_toml(folder / str(values["base"]))) if "base" in values else {}
    top = {"seeds": values.get("seeds", [0])}
    try:
        found = [trial for grid in values.get("grid", ()) for trial in trials_of({**top, **grid}, base)]
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"the study {name!r} has a grid that cannot be read ({error})", _SHAPE, code="study.shape"
        ) from None
    for trial in found:
        _ = trial.config  # Report a wrong setting now, and not after an hour.
    first_seeds_first = sorted(dict.fromkeys(found), key=lambda trial: trial.seed)
    return Study(name, str(values.get("about", "")), tuple(first_seeds_first))


def trials_of(grid: Mapping[str, Any], base: Mapping[str, Any]) -> Iterator[Trial]:
    """Yield the trials of a grid, a trial for each of its seeds. The settings of `base` are those of all trials."""
    lists = flat({k: v for k, v in grid.items() if k != "seeds"})
    axes = {name: value if isinstance(value, list) else [value] for name, value in lists.items()}
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        own = {name: chosen.pop(name) for name in OWN if name in chosen}
        if unknown := sorted(name for name in chosen if "." not in name):
            raise ValueError(f"unknown: {', '.join(unknown)}")
        settings = {**base, **chosen}
        for seed in grid["seeds"]:
            yield Trial.of(settings, int(seed), **own)


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        others = (p for p in path.parent.glob("*.toml") if p != path and b"grid" in p.read_bytes())  # not a base
        there = ", ".join(sorted(p.stem for p in others)) or "none"
        what = f"{path} cannot be read as TOML ({error})"
        raise ConfigError(what, f"{_SHAPE} Studies in {path.parent}: {there}.", code="study.shape") from None


def varying(trials: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names, except `kind`, whose values differ among entries of the same kind."""
    out = []
    for name in dict.fromkeys(name for one in trials for name in one if name != "kind"):
        values = {(one["kind"], repr(one.get(name))) for one in trials}
        if len(values) > len({one["kind"] for one in trials}):
            out.append(name)
    return out


# -- results ----------------------------------------------------------------------------------------------------------


def recorded(folder: Path, study: str = "") -> dict[str, Record]:
    """Read all records in a folder, by key, because studies share baselines. Those of the study come first."""
    paths = sorted(folder.glob("*.jsonl"), key=lambda path: (path.stem != study, path.name))
    found = [record for path in paths for record in records(path)]
    return {key_of(record): record for record in reversed(found)}  # the first record of a trial counts


def records(path: Path) -> Iterator[Record]:
    """Yield the records in a file, if it is there. Lines that were cut off are skipped."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
            key_of(record)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        yield record


def append(path: Path, record: Record) -> None:
    """Append a line. If the previous line was cut off, begin a new line first."""
    whole = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(("" if whole else "\n") + json.dumps(record, sort_keys=True) + "\n")


# -- trials -----------------------------------------------------------------------------------------------------------


def run(study: Study, folder: Path, known: Callable[[], Mapping[str, Record]]) -> int:
    """Run the trials that have no result and that no other process runs. Append each to `FOLDER/NAME.jsonl` at its end.

    Return the number of trials that ran.
    """
    left = sum(trial.key not in known() for trial in study.trials)
    say(f"{study.name}: {len(study.trials)} trials, {left} to run")
    began, done = time.monotonic(), 0
    varied = [name for name in varying([trial.named_values for trial in study.trials]) if name != "islands"]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{study.name}.jsonl"
    for trial in unmeasured(study.trials, path, known):
        record = measured(trial, path)
        done += 1
        minutes = (time.monotonic() - began) / done * (left - done) / 60
        say(f"{done}/{left}  {in_words(trial, record, varied)}  {record['seconds']:.0f} s, {minutes:.0f} min left")
    return done


def measured(
    trial: Trial, path: Path, work: Workload | None = None, progress: Callable[[Record], None] = lambda record: None
) -> Record:
    """Run a trial, and append its record to `path`. At each evaluation the record so far is kept in a file beside it.

    If the trial is cut, that file stays until the trial is run again.
    """
    file = _so_far(path, trial)
    file.parent.mkdir(exist_ok=True)

    def keep(record: Record) -> None:
        write_atomically(file, json.dumps(finite(record), sort_keys=True))
        progress(record)

    record = measure(trial, work, progress=keep)
    append(path, finite(record))
    file.unlink(missing_ok=True)
    return record


def unfinished(path: Path, trial: Trial) -> Record | None:
    """Return what is kept of a trial that was cut or that runs; `path` is where its record will go."""
    return next((record for record in records(_so_far(path, trial)) if key_of(record) == trial.key), None)


def _so_far(path: Path, trial: Trial) -> Path:
    return path.with_suffix(".unfinished") / f"{zlib.crc32(trial.key.encode()):08x}.json"


def unmeasured(trials: Sequence[Trial], path: Path, known: Callable[[], Mapping[str, Record]]) -> Iterator[Trial]:
    """Yield the trials that have no result and that no other process runs. `path` is where their records go."""
    with path.with_name(f".{path.stem}.lock").open("ab") as lock:
        for trial in trials:
            if _claimed(lock, zlib.crc32(trial.key.encode())) and trial.key not in known():
                yield trial


def _claimed(lock: IO[bytes], number: int) -> bool:
    """Lock a trial for this process until it ends. Return False if another process has it."""
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
    except BlockingIOError:
        return False
    except OSError:
        return True  # Some network file systems have no locks. There, processes may run a trial twice.
    return True


def in_words(trial: Trial, record: Record, varied: Sequence[str]) -> str:
    """Return one line about a result, with its values of the settings in `varied`."""
    loss = "diverged" if record["diverged"] else rounded(record["bits_per_byte"])
    settings = trial.named_values
    shown = "".join(f" {name}={settings[name]}" for name in varied if name in settings)
    return f"{loss}  {trial.kind} M={trial.islands} seed={trial.seed}{shown}"


# -- the table ---------------------------------------------------------------------------------------------------------


def show(study: Study, known: Mapping[str, Record], quiet: bool = False) -> dict[str, Any]:
    """Print the table. Return the rows as plain data, best first for each number of islands."""
    rows = grouped([known[trial.key] for trial in study.trials if trial.key in known])
    if not rows:
        say(f"{study.name}: nothing is recorded yet")
        return {"study": study.name, "about": study.about, "rows": []}
    columns = ["kind", *varying([row.settings for row in rows])]
    found = [_plain(row, rows, columns) for row in sorted(rows, key=lambda row: (row.settings["islands"], row.mean))]
    if not quiet:
        console = table_console()
        console.print(study.about)
        console.print(table([{**row, **{name: str(row[name]) for name in columns}} for row in found], console.width))
    return {"study": study.name, "about": study.about, "rows": found}


def baseline(row: TrialRow, rows: Sequence[TrialRow]) -> TrialRow | None:
    """Return the row that a row is compared with.

    For a row with hostile islands this is the run in which they are absent, and for an honest row with the merger's
    scores the same row without them, if the study has it. All others are compared with the best data-parallel row of
    the same model and data, with the same number of islands and of tokens.
    """
    honest = [other for other in rows if not other.settings["hostile"] and _identity(other) == _identity(row)]
    if row.settings["hostile"] or row.settings.get("merge.scores"):
        without = [other for other in honest if not other.settings.get("merge.scores")]
        cap = row.settings.get("merge.share_cap")
        others = without or (honest if row.settings["hostile"] else [])
        if others or row.settings["hostile"]:
            return min(others, key=lambda other: other.settings.get("merge.share_cap") != cap, default=None)
    same = [
        other for other in rows
        if other.settings["kind"] == "parallel" and other.settings["islands"] == row.settings["islands"]
        and abs(other.tokens / row.tokens - 1) <= SAME_TOKENS and _data(other) == _data(row)
    ]  # fmt: skip
    return min(same, key=lambda other: other.mean, default=None)


def _data(row: TrialRow) -> dict[str, Any]:
    """Return the settings of a row's model and data."""
    return {name: value for name, value in row.settings.items() if name.startswith(("model.", "data."))}


def _identity(row: TrialRow) -> tuple[Any, ...]:
    """Return what a row shares with the row that it is compared with: all but the attack and the merger's rule."""
    others = {k: v for k, v in row.settings.items() if k not in ("islands", "hostile", "attack", *_RULES)}
    honest = row.settings["islands"] - row.settings["hostile"]
    return honest, sorted(others.items(), key=str)


def _plain(row: TrialRow, rows: Sequence[TrialRow], columns: Sequence[str]) -> dict[str, Any]:
    best = baseline(row, rows)
    return {
        **{name: row.settings.get(name, "") for name in columns},
        "seeds": len(row.records),
        "diverged": row.diverged,
        "tokens": round(row.tokens),
        "bits_per_byte": row.mean,
        "spread": row.spread,
        "to_parallel": row.ratio(best),
        "to_parallel_on_test": row.ratio(best, "test"),
    }
