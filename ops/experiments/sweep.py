"""`archipelago sweep`: the trials of a study, each once, over as many sittings as it takes; and what came out."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Annotated, Any

import tyro

from archipelago.broker.errors import ArchipelagoError, ConfigError
from archipelago.broker.process import finite, keep_compiled, print_json
from archipelago.ops.experiments import study as sweep_study
from archipelago.ops.experiments.study import Record, Study, varying
from archipelago.ops.experiments.trial import Trial, measure
from archipelago.ops.launch.supervisor import ONE_THREAD
from archipelago.ops.settings import say


@dataclass(frozen=True)
class SweepOptions:
    """Run a study (`studies/NAME.toml`) in virtual time, on from where it was left; or show what came out.

    Every result is one line of `studies/NAME.jsonl`, and is never measured again. Ctrl-C loses only what is under way.
    """

    name: Annotated[str, tyro.conf.Positional] = ""
    """the study; without one, all are listed"""
    jobs: int = 1
    """processes, each with one thread"""
    most: int = 0
    """end after so many trials; 0 for all"""
    show: bool = False
    """run nothing; print the table and draw the picture of what there is"""
    folder: Path = Path(__file__).parent / "studies"
    """where the studies and their results are"""
    json: bool = False
    """print one JSON object"""


def main(options: SweepOptions) -> int:
    """Runs, then shows."""
    if not options.name:
        return _overview(options)
    if options.jobs < 1 or options.most < 0:
        raise ConfigError("--jobs or --most is too small", "Give at least one process, and no negative number.")
    study = sweep_study.load(options.folder, options.name)
    if not options.show:
        run(study, options.folder, options.jobs, options.most)
    from archipelago.ops.experiments.results import show

    found = show(study, sweep_study.recorded(options.folder), options.folder, quiet=options.json)
    if options.json:
        print_json(finite(found))
    return 0


def run(study: Study, folder: Path, jobs: int, most: int = 0) -> int:
    """Runs what is not recorded yet, and appends each result as it comes. How many there were."""
    known = sweep_study.recorded(folder)
    due = [trial for trial in study.trials if trial.key not in known]
    say(f"{study.name}: {len(study.trials)} trials, {len(due)} to run")
    due = due[:most] if most else due
    began, done = time.monotonic(), 0
    names = [name for name in varying([trial.said for trial in study.trials]) if name != "islands"]
    for trial, record in _results(due, jobs):
        command = f"archipelago sweep {study.name}"
        sweep_study.append(folder / f"{study.name}.jsonl", finite({**record, "command": command}))
        done += 1
        left = (time.monotonic() - began) / done * (len(due) - done)
        say(f"{done}/{len(due)}  {in_words(trial, record, names)}  {record['seconds']:.0f} s, {left / 60:.0f} min left")
    return done


def _results(trials: Sequence[Trial], jobs: int) -> Iterator[tuple[Trial, Record]]:
    """Each trial and its record, as they come."""
    before = dict(os.environ)
    keep_compiled()
    # A process of its own for each core: the arrays are so small that a second thread costs more than it brings.
    os.environ.update(ONE_THREAD | before)  # for the processes below, which are begun afresh and read it first
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_begin)
    try:
        futures: dict[Future[dict[str, Any]], Trial] = {pool.submit(measure, trial): trial for trial in trials}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool:
        raise ArchipelagoError(
            "a measuring process was killed", "What is done is kept: begin again, with fewer --jobs if memory ran out."
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        os.environ.clear()
        os.environ.update(before)


def _begin() -> None:
    """In each process: ends without a word on Ctrl-C, and with the one that began it, however that one ends."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if parent := parent_process():
        parent.join()
        os._exit(1)


def in_words(trial: Trial, record: Record, names: Sequence[str]) -> str:
    """One line on a result, with what it says of those names."""
    loss = "diverged" if record["diverged"] else f"{record['bits_per_byte']:.4f}"
    said = trial.said
    settings = "".join(f" {name}={said[name]}" for name in names if name in said)
    return f"{loss}  {trial.kind} M={trial.islands} seed={trial.seed}{settings}"


def _overview(options: SweepOptions) -> int:
    known = sweep_study.recorded(options.folder)
    rows = []
    for name in sweep_study.names(options.folder):
        study = sweep_study.load(options.folder, name)
        done = sum(trial.key in known for trial in study.trials)
        rows.append({"study": name, "trials": len(study.trials), "done": done, "about": study.about})
        say(f"{name:<12}{done:>4} of {len(study.trials):<5}{study.about}")
    if options.json:
        print_json({"studies": rows})
    return 0
