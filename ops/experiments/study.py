"""Studies: a TOML file that names trials as grids, and beside it a file of what came out, one JSON line a trial.

    about = "what it asks"
    base = "base.toml"                  # settings of every trial, a file as --config takes it
    seeds = [0, 1, 2]

    [[grid]]                            # the product of all lists; a trial for each seed
    kind = "islands"                    # the default; or diloco, parallel, one
    islands = [2, 4]
    slow = 1.0                          # the default; the last island's steps take so many times longer
    slowed = 1                          # the default; so many islands are slow
    sending = 0                         # the default; their contributions are so many steps on their way
    late = 0                            # the default; what the merger says is so many steps on its way to each island
    chips = 0                           # the default; or islands fail as on a simulated tape of so many chips
    seeds = [0]                         # instead of the study's
    "outer.rule" = ["sgd", "nesterov"]  # a setting

Settings that no file names have this version's defaults, and a trial is known by what the files say: pin what matters.
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
    """A question, and the trials that answer it, in the order in which they run."""

    name: str
    about: str
    trials: tuple[Trial, ...]
    x: str = ""
    """where the picture is to have lines: what runs along its axis, `islands`, `slow` or a setting"""
    lines: tuple[str, ...] = ()
    """and what tells one line from another"""


def load(folder: Path, name: str) -> Study:
    """The study in `FOLDER/NAME.toml`. Raises ConfigError for a file that is not there or does not say one."""
    values = _toml(folder / f"{name}.toml")
    if unknown := sorted(set(values) - _TOP):
        raise ConfigError(f"the study {name!r} has unknown keys: {', '.join(unknown)}", _SHAPE)
    base = _flat(_toml(folder / str(values["base"]))) if "base" in values else {}
    try:
        found = [trial for grid in values.get("grid", ()) for trial in _trials(grid, base, values.get("seeds", [0]))]
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"the study {name!r} has a grid that cannot be read ({error})", _SHAPE) from None
    for trial in found:
        _ = trial.config  # said now, not after an hour
    first_seeds_first = sorted(dict.fromkeys(found), key=lambda trial: trial.seed)
    lines = tuple(map(str, values.get("lines", ())))
    return Study(name, str(values.get("about", "")), tuple(first_seeds_first), str(values.get("x", "")), lines)


def names(folder: Path) -> list[str]:
    """The studies in a folder: TOML files with a grid."""
    return sorted(path.stem for path in folder.glob("*.toml") if "grid" in _toml(path))


def _trials(grid: Mapping[str, Any], base: Mapping[str, Any], seeds: list[int]) -> Iterator[Trial]:
    flat = _flat({k: v for k, v in grid.items() if k != "seeds"})
    axes = {name: value if isinstance(value, list) else [value] for name, value in flat.items()}
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        own = {name: chosen.pop(name) for name in OWN if name in chosen}
        settings = {**base, **chosen}
        for seed in grid.get("seeds", seeds):
            yield Trial.of(**{**OWN, **own}, seed=int(seed), settings=settings)


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
        raise ConfigError(f"{path} cannot be read ({error.strerror})", f"Files there: {there}.") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML ({error})", _SHAPE) from None


def varying(said: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names, `kind` apart, of which not all of a kind say the same."""
    out = []
    for name in dict.fromkeys(name for one in said for name in one if name != "kind"):
        values = {(one["kind"], repr(one.get(name))) for one in said}
        if len(values) > len({one["kind"] for one in said}):
            out.append(name)
    return out


# -- results -------------------------------------------------------------------------------------------------------


def recorded(folder: Path) -> dict[str, Record]:
    """All records in a folder, by key: studies share their baselines. A line that was cut off is no record."""
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
    """One more line; a line before it that was cut off stays one of its own."""
    whole = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(("" if whole else "\n") + json.dumps(record, sort_keys=True) + "\n")
