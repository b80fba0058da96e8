"""`archipelago bench study`: run each trial of a study once, over any number of sessions, and show the results."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Annotated, Any

import tyro

from archipelago.broker.errors import ArchipelagoError, ConfigError
from archipelago.broker.process import finite, keep_compiled, print_json
from archipelago.ops.experiments.study import Record, Study, append, load, names, recorded, varying
from archipelago.ops.experiments.trial import Trial, measure
from archipelago.ops.launch.supervisor import ONE_THREAD
from archipelago.ops.settings import say

#: The studies that come with the package.
SHIPPED = Path(__file__).with_name("studies")
#: The folder for their results, in the working directory.
RESULTS = Path("studies")


@dataclass(frozen=True)
class StudyOptions:
    """Run a study, a grid of trials in virtual time, from where it was left; or show its results.

    Each result is one line of `NAME.jsonl` and is never measured again. Ctrl-C loses only the trials that are running.
    """

    name: Annotated[str, tyro.conf.Positional] = ""
    """The study. Without a name, all studies are listed."""
    jobs: int = 1
    """The number of processes, each with one thread."""
    most: int = 0
    """End after this many trials. 0 runs all."""
    show: bool = False
    """Run nothing. Print the table and draw the picture of the results so far."""
    folder: Path | None = None
    """The folder with studies of your own (NAME.toml), which also gets the results. The default is the studies that
    come with the package, with results in ./studies.
    """
    json: bool = False
    """Print one JSON object."""

    @property
    def studies(self) -> Path:
        """The folder with the TOML files."""
        return self.folder or SHIPPED

    @property
    def results(self) -> Path:
        """The folder for new results and for pictures."""
        return self.folder or RESULTS

    def known(self) -> Mapping[str, Record]:
        """Return all results: those beside the shipped studies, and the user's own."""
        return recorded(self.studies) | recorded(self.results)


def main(options: StudyOptions) -> int:
    """Run the trials that have no result yet, then show all results."""
    if not options.name:
        return _overview(options)
    if options.jobs < 1 or options.most < 0:
        raise ConfigError(
            "--jobs or --most is too small", "Give at least one process, and no negative number.", code="config.jobs"
        )
    study = load(options.studies, options.name)
    if not options.show:
        run(study, options.results, options.jobs, options.known(), options.most)
    from archipelago.ops.experiments.results import show

    found = show(study, options.known(), options.results, quiet=options.json)
    if options.json:
        print_json(finite(found))
    return 0


def run(study: Study, folder: Path, jobs: int, known: Mapping[str, Record], most: int = 0) -> int:
    """Run the trials that are not in `known`, and append each result to `FOLDER/NAME.jsonl` when it arrives.

    Returns:
        The number of trials that ran.
    """
    due = [trial for trial in study.trials if trial.key not in known]
    say(f"{study.name}: {len(study.trials)} trials, {len(due)} to run")
    due = due[:most] if most else due
    began, done = time.monotonic(), 0
    varied = [name for name in varying([trial.named_values for trial in study.trials]) if name != "islands"]
    for trial, record in _results(due, jobs):
        command = f"archipelago bench study {study.name}"
        folder.mkdir(parents=True, exist_ok=True)
        append(folder / f"{study.name}.jsonl", finite({**record, "command": command}))
        done += 1
        left = (time.monotonic() - began) / done * (len(due) - done)
        say(
            f"{done}/{len(due)}  {in_words(trial, record, varied)}  {record['seconds']:.0f} s, {left / 60:.0f} min left"
        )
    return done


def _results(trials: Sequence[Trial], jobs: int) -> Iterator[tuple[Trial, Record]]:
    """Yield each trial with its record, in the order in which they finish."""
    before = dict(os.environ)
    keep_compiled()
    # One process per core: the arrays are so small that a second thread costs more than it saves.
    os.environ.update(ONE_THREAD | before)  # The spawned processes read the environment when they start.
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_begin)
    try:
        futures: dict[Future[dict[str, Any]], Trial] = {pool.submit(measure, trial): trial for trial in trials}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool:
        raise ArchipelagoError(
            "a measuring process was killed",
            "Finished trials are kept: run the command again, with fewer --jobs if memory ran out.",
            code="study.process-killed",
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        os.environ.clear()
        os.environ.update(before)


def _begin() -> None:
    """Prepare a measuring process. It ends silently on Ctrl-C, and it ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if parent := parent_process():
        parent.join()
        os._exit(1)


def in_words(trial: Trial, record: Record, varied: Sequence[str]) -> str:
    """Return one line about a result, with its values of the settings in `varied`."""
    loss = "diverged" if record["diverged"] else f"{record['bits_per_byte']:.4f}"
    settings = trial.named_values
    shown = "".join(f" {name}={settings[name]}" for name in varied if name in settings)
    return f"{loss}  {trial.kind} M={trial.islands} seed={trial.seed}{shown}"


def _overview(options: StudyOptions) -> int:
    """List the studies, with the number of trials that have a result."""
    known = options.known()
    rows = []
    for name in names(options.studies):
        study = load(options.studies, name)
        done = sum(trial.key in known for trial in study.trials)
        rows.append({"study": name, "trials": len(study.trials), "done": done, "about": study.about})
        say(f"{name:<12}{done:>4} of {len(study.trials):<5}{study.about}")
    if options.json:
        print_json({"studies": rows})
    return 0
