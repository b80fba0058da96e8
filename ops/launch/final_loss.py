"""Measure the held-out loss of a run's newest parameters once its islands have left, for `up` and for storms.

`python -m archipelago.ops.launch.final_loss` does it in a process of its own, which frees the device when it ends.
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import tyro

from archipelago.broker.manifest import Manifest, loss_unit
from archipelago.broker.messages import Evaluation
from archipelago.broker.observe.logs import log_to_stderr
from archipelago.broker.process import RunAddress, guarded, keep_compiled
from archipelago.broker.shards.transport import opened
from archipelago.broker.transport import ReaderTransport

if TYPE_CHECKING:
    from archipelago.islands.tasks.task import TaskFile
    from archipelago.islands.tasks.workload import Workload

log = logging.getLogger("archipelago.ops.launch.final_loss")  # `__name__` is `__main__` in a process of its own.


@dataclass(frozen=True)
class FinalLossOptions(RunAddress):
    """Measure the held-out loss of a run, for `archipelago up`."""

    task: str | None = None
    """The task of the run, FILE.py:NAME, if it trains a task of its users."""


def measure(transport: ReaderTransport, task: str | None = None) -> Evaluation:
    """Measure the newest parameters of a run, and record the result.

    Raises:
        ConfigError: The run does not know its model (`model.own`), or its task has no evaluation (`task.evaluate`).
    """
    manifest, transport = opened(transport)
    keep_compiled()

    from archipelago.islands.evaluation import measured, published
    from archipelago.islands.evaluator import tokens_trained
    from archipelago.islands.tasks.task import task_of

    work = _workload(manifest, task_of(task, manifest, "measuring the held-out loss"))
    compiled = work.require_evaluation()
    params, number, step = published(transport, manifest)
    tokens = tokens_trained(transport, number)
    measures = measured(compiled(params), params)
    log.info("round %s: %s", number, measures.describe(loss_unit(manifest.corpus)), extra={"round": number})
    found = Evaluation(number, step, tokens, time.time(), measures.bits)
    transport.reader.record_evaluation(found)
    return found


def _workload(manifest: Manifest, file: TaskFile | None) -> Workload:
    """Return what the run trains, with the run's own held-out data."""
    from archipelago.islands.data.corpus import open_corpus
    from archipelago.islands.tasks.ours import our_work
    from archipelago.islands.tasks.workload import Workload

    if file is not None:
        return Workload.of(file, manifest.config)
    return our_work(manifest.config, open_corpus(manifest.corpus.name))


def main(options: FinalLossOptions) -> int:
    """Measure the run that the environment names."""
    log_to_stderr("evaluate", run=options.run or "")
    measure(options.connect(), options.task)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(tyro.cli(FinalLossOptions, args=sys.argv[1:]))))
