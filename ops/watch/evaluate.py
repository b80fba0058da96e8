"""`archipelago evaluate`: measure the run's parameters on held-out text now."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from archipelago.broker.errors import BrokerError
from archipelago.broker.loss_unit import loss_unit
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Evaluation
from archipelago.broker.observe.logs import log_to_stderr
from archipelago.broker.observe.progress import progress
from archipelago.broker.process import RunAddress, keep_compiled, print_json
from archipelago.broker.shards.transport import opened
from archipelago.broker.transport import ReaderTransport

if TYPE_CHECKING:
    from archipelago.islands.tasks.file import TaskFile
    from archipelago.islands.tasks.workload import Workload

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluateOptions(RunAddress):
    """Measure the loss of the merged parameters on held-out text now, and record it with the run.

    The loss is in bits per byte. An island of the run does the same
    regularly.
    """

    task: str | None = None
    """The task of the run, FILE.py:NAME, if it trains a task of its users."""
    json: bool = False
    """Print one JSON object at the end."""


def main(options: EvaluateOptions) -> int:
    """Evaluate once."""
    log_to_stderr("evaluate", run=options.run or "")
    transport = options.connect()
    with progress("evaluating the newest parameters"):
        newest = evaluate(transport, options.task)
    unit = loss_unit(transport.reader.manifest().corpus)
    loss = unit.from_evaluation(newest.bits_per_byte)
    if options.json:
        print_json({"run": transport.run, "round": newest.round, "held_out": loss, "unit": unit.name})
    else:
        print(f"{loss:.4f} {unit.name} on held-out text at round {newest.round}")  # noqa: T201
    return 0


def evaluate(transport: ReaderTransport, task: str | None = None) -> Evaluation:
    """Measure the newest parameters and record the result, unless `archipelago evaluate` has measured them already.

    Raises:
        ConfigError: The run does not know its model (`model.own`), or its task has no evaluation (`task.evaluate`).
        BrokerError: The run's corpus is not on this machine (`broker.other-corpus`).
    """
    manifest, transport = opened(transport)
    keep_compiled()

    from archipelago.islands.evaluation import measured, published
    from archipelago.islands.evaluator import tokens_trained
    from archipelago.islands.tasks.file import task_of

    file = task_of(task, manifest, "`archipelago evaluate`")
    work = _workload(manifest, file)
    compiled = work.require_evaluation()
    params, number, step = published(transport, manifest)
    known = transport.reader.evaluations()
    if known and known[-1].round == number and not known[-1].by:
        return known[-1]
    tokens = tokens_trained(transport, number)
    found_here = measured(compiled(params), params)
    found = Evaluation(number, step, tokens, time.time(), found_here.bits)
    unit = loss_unit(manifest.corpus)
    log.info("round %s: %s", number, found_here.describe(unit), extra={"round": number})
    transport.reader.record_evaluation(found)
    return found


def _workload(manifest: Manifest, file: TaskFile | None) -> Workload:
    """Return what the run trains, with the run's own held-out data."""
    from archipelago.islands.data.corpus import open_corpus
    from archipelago.islands.tasks.ours import our_work
    from archipelago.islands.tasks.workload import Workload

    if file is not None:
        return Workload.of(file, manifest.config)
    corpus = open_corpus(manifest.corpus.name)
    if corpus.identity != manifest.corpus:
        raise BrokerError(
            f"the corpus {corpus.name!r} on this machine is not the run's",
            "Copy the run's corpus to this machine.",
            code="broker.other-corpus",
        )
    return our_work(manifest.config, corpus)
