"""The runs of a Redis and of a folder, side by side. They are read only while somebody looks at a page."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from archipelago.broker.config import RunConfig, differing, from_toml
from archipelago.broker.errors import ArchipelagoError
from archipelago.broker.manifest import loss_unit
from archipelago.broker.shards.transport import opened
from archipelago.broker.transport import Transport
from archipelago.ops.dashboard.history import joined_evaluations
from archipelago.ops.dashboard.trails import thinned
from archipelago.ops.watch import run_list, run_summary
from archipelago.ops.watch.run_view import RECENT_ROUNDS, glance

#: Seconds for which a list is shown again.
FRESH_SECONDS = 15.0
#: Runs of each place, and points of each curve and differing settings of each run.
RUNS_MOST, POINTS_MOST, DIFFERENCES_MOST = 30, 120, 8

Opened = Callable[[str], Transport]


@dataclass(frozen=True)
class RunRow:
    """One run.

    Attributes:
        place: `redis`, or the folder that holds its report.
        state: See `archipelago.ops.watch.run_list.RunEntry`.
        unit: The unit of its losses.
        tokens: Tokens that its islands have trained on.
        curve: Pairs of tokens and held-out loss, in order.
        differs: The settings in which it differs from the run of the page, as `NAME: its own → the page's`.
    """

    name: str
    place: str
    state: str
    unit: str
    held_out: float
    step: int
    steps: int
    live: int
    known: int
    tokens: int
    curve: Sequence[Sequence[float]]
    differs: Sequence[str] = ()


class RunList:
    """The runs that the page compares.

    Args:
        opened: Connects to a run of the Redis by name. The caller closes the connection.
        own: The name of the run of the page.
        folder: Where runs of `up` keep their reports; None for none.
        clock: Monotonic seconds.
    """

    def __init__(self, opened: Opened, own: str, folder: Path | None, clock: Callable[[], float]) -> None:
        self._opened, self._own, self._folder, self._clock = opened, own, folder, clock
        self._lock = threading.Lock()
        self._rows: list[dict[str, Any]] = []
        self._due = -math.inf

    def newest(self) -> dict[str, Any]:
        """Return the runs, that of the page first. Runs that cannot be read are left out."""
        with self._lock:
            if self._clock() >= self._due:
                self._rows = [asdict(row) for row in self._read()]
                self._due = self._clock() + FRESH_SECONDS
        return {"own": self._own, "folder": str(self._folder or ""), "runs": self._rows}

    def _read(self) -> list[RunRow]:
        config, rows = None, []
        for name in self._names():
            try:
                transport = self._opened(name)
                try:
                    row, found = of_redis(transport, config)
                finally:
                    transport.close()
            except ArchipelagoError:  # It was deleted, or these credentials may not read it.
                continue
            config = found if name == self._own else config
            rows.append(row)
        known = {row.name for row in rows}
        folders = of_folder(self._folder, config) if self._folder else iter(())
        return [*rows, *(row for row in folders if row.name not in known)]

    def _names(self) -> list[str]:
        """Return the names of the runs of the Redis, that of the page first."""
        try:
            transport = self._opened(self._own)
            try:
                found = transport.reader.runs()
            finally:
                transport.close()
        except ArchipelagoError:
            found = []
        return [self._own, *sorted(name for name in found if name != self._own)][:RUNS_MOST]


def of_redis(transport: Transport, own: RunConfig | None) -> tuple[RunRow, RunConfig]:
    """Return a run of Redis, and its config. Raise BrokerError and WireError."""
    manifest, run = opened(transport, for_display=True)
    evaluations = run.reader.evaluations()
    view = glance(run, manifest, run.reader.tape(RECENT_ROUNDS), evaluations)
    unit = loss_unit(manifest.corpus)
    points = thinned(evaluations, POINTS_MOST, joined_evaluations)
    row = RunRow(
        name=view.run, place="redis", state=run_list.entry_of(run, "redis").state, unit=unit.name,
        held_out=view.held_out_last, step=view.step, steps=view.steps, live=view.live, known=view.known,
        tokens=view.tokens_trained, curve=[(e.tokens, unit.from_evaluation(e.bits_per_byte)) for e in points],
        differs=_differing(manifest.config, own),
    )  # fmt: skip
    return row, manifest.config


def of_folder(folder: Path, own: RunConfig | None) -> Iterator[RunRow]:
    """Yield the newest runs with a report in the folder."""
    try:
        reports = sorted(folder.glob(f"*/{run_summary.TEXT}"), key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        return
    for path in reports[:RUNS_MOST]:
        found = run_summary.read(path.parent)
        if found is None:
            continue
        try:
            yield _row_of(found, path.parent, _config_of(path.parent), own)
        except (TypeError, ValueError, LookupError, OverflowError):
            continue  # This report is of another version.


def _row_of(found: Mapping[str, Any], folder: Path, config: RunConfig | None, own: RunConfig | None) -> RunRow:
    curve = [(float(tokens), float(loss)) for tokens, loss in found["curve"]]
    steps = int(found["steps"])
    return RunRow(
        name=str(found["run"]), place=str(folder), state="finished" if found["finished"] else "ended",
        unit=str(found["unit"]), held_out=float(found["held_out_last"]), step=steps,
        steps=config.inner.steps if config else steps, live=0, known=int(found["islands"]),
        tokens=int(found["tokens_trained"]), curve=curve[:: max(1, math.ceil(len(curve) / POINTS_MOST))],
        differs=_differing(config, own),
    )  # fmt: skip


def _config_of(folder: Path) -> RunConfig | None:
    try:
        return from_toml(folder / "config.toml")
    except ArchipelagoError:
        return None


def _differing(config: RunConfig | None, own: RunConfig | None) -> list[str]:
    if config is None or own is None:
        return []
    # A file of settings leaves out what `init` chose.
    found = {key: both for key, both in differing(config, own).items() if both[0] is not None}
    return [f"{key}: {its} → {ours}" for key, (its, ours) in found.items()][:DIFFERENCES_MOST]
