"""Studies: a TOML file names trials as grids, and a file beside it holds the results, one JSON line per trial.

    about = "the question"
    base = "base.toml"                  # settings of every trial, a file as --config takes it
    seeds = [0, 1, 2]

    [[grid]]                            # the product of all lists; a trial for each seed
    kind = "islands"                    # the default; or parallel, one
    islands = [2, 4]
    slow = 1.0                          # how many times longer the steps of the last island take
    slowed = 1                          # how many islands are slow
    sending = 0                         # for how many steps each contribution of these is on its way
    chips = 0                           # islands fail as on a simulated tape of this many chips; 0: they do not fail
    hostile = 0                         # how many islands are hostile
    attack = "flip"                     # what they do, see ops/experiments/hostile.py
    apart = false                       # each island reads a part of the text of its own
    lockstep = false                    # all islands step at once, and adopt at once what they have sent
    seeds = [0]                         # instead of the study's
    "outer.rule" = ["sgd", "nesterov"]  # a setting

Settings that no file names have the defaults of this version. A trial is identified by the settings that the files
name, so a study pins everything that decides its results.
"""

from __future__ import annotations

import itertools
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from archipelago.broker.errors import ConfigError
from archipelago.ops.experiments.trial import OWN, Trial, key_of

Record = Mapping[str, Any]
_TOP = {"about", "base", "seeds", "grid", "x", "lines"}
_SHAPE = "See ops/experiments/studies/*.toml, and the head of ops/experiments/study.py."


@dataclass(frozen=True)
class Study:
    """A question, and the trials that answer it in the order in which they run."""

    name: str
    about: str
    trials: tuple[Trial, ...]
    #: For a picture with lines: the name on its x axis, `islands`, `slow` or a setting.
    x: str = ""
    #: The names whose values distinguish the lines.
    lines: tuple[str, ...] = ()


def load(folder: Path, name: str) -> Study:
    """Read the study in `FOLDER/NAME.toml`. Raise ConfigError for a file that is missing or is not a study."""
    values = _toml(folder / f"{name}.toml")
    if unknown := sorted(set(values) - _TOP):
        raise ConfigError(
            f"the study {name!r} has unknown keys: {', '.join(unknown)}", _SHAPE, code="study.unknown-key"
        )
    base = _flat(_toml(folder / str(values["base"]))) if "base" in values else {}
    try:
        found = [trial for grid in values.get("grid", ()) for trial in _trials(grid, base, values.get("seeds", [0]))]
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"the study {name!r} has a grid that cannot be read ({error})", _SHAPE, code="study.grid"
        ) from None
    for trial in found:
        _ = trial.config  # Report a wrong setting now, and not after an hour.
    first_seeds_first = sorted(dict.fromkeys(found), key=lambda trial: trial.seed)
    lines = tuple(map(str, values.get("lines", ())))
    return Study(name, str(values.get("about", "")), tuple(first_seeds_first), str(values.get("x", "")), lines)


def names(folder: Path) -> list[str]:
    """Return the names of the studies in a folder: its TOML files that have a grid."""
    return sorted(path.stem for path in folder.glob("*.toml") if "grid" in _toml(path))


def _trials(grid: Mapping[str, Any], base: Mapping[str, Any], seeds: list[int]) -> Iterator[Trial]:
    flat = _flat({k: v for k, v in grid.items() if k != "seeds"})
    axes = {name: value if isinstance(value, list) else [value] for name, value in flat.items()}
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        own = {name: chosen.pop(name) for name in OWN if name in chosen}
        settings = {**base, **chosen}
        for seed in grid.get("seeds", seeds):
            yield Trial.of(settings, int(seed), **own)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in values.items():
        out |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return out


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        there = ", ".join(sorted(p.stem for p in path.parent.glob("*.toml"))) or "none"
        raise ConfigError(
            f"{path} cannot be read ({error.strerror})", f"Files there: {there}.", code="study.unreadable"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML ({error})", _SHAPE, code="study.not-toml") from None


def varying(trials: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names, except `kind`, whose values differ among entries of the same kind."""
    out = []
    for name in dict.fromkeys(name for one in trials for name in one if name != "kind"):
        values = {(one["kind"], repr(one.get(name))) for one in trials}
        if len(values) > len({one["kind"] for one in trials}):
            out.append(name)
    return out


# -- results -------------------------------------------------------------------------------------------------------


def recorded(folder: Path) -> dict[str, Record]:
    """Read all records in a folder, by key, because studies share baselines. Lines that were cut off are skipped."""
    out: dict[str, Record] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
                out.setdefault(key_of(record), record)
            except (ValueError, KeyError, TypeError):
                continue
    return out


def append(path: Path, record: Record) -> None:
    """Append a line. If the previous line was cut off, begin a new line first."""
    whole = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(("" if whole else "\n") + json.dumps(record, sort_keys=True) + "\n")
