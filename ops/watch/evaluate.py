"""`archipelago evaluate`: measure the run's parameters on held-out text, once or repeatedly."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from archipelago.broker.errors import BrokerError, ConfigError, UnreachableError
from archipelago.broker.files import make_untracked
from archipelago.broker.loss_unit import loss_unit
from archipelago.broker.messages import Evaluation
from archipelago.broker.observe.curves import CurveWriter
from archipelago.broker.observe.options import CurveOptions
from archipelago.broker.process import RunAddress, keep_compiled, print_json, stop_on_signals
from archipelago.broker.transport import ReaderTransport

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluateOptions(CurveOptions, RunAddress):
    """Measure the loss of the merged parameters on held-out text, and record it with the run.

    The loss is in bits per byte, or in nats per label for a corpus of examples.
    """

    every: float = 0.0
    """seconds between two evaluations, until SIGTERM and then once more; 0 evaluates once"""
    folder: Path | None = None
    """folder for curves; default runs/RUN/evaluate"""
    json: bool = False
    """print one JSON object at the end"""


def main(options: EvaluateOptions) -> int:
    """Evaluate once, or repeatedly until a signal."""
    if not options.every >= 0.0:
        raise ConfigError(
            f"--every cannot be {options.every}",
            "Give a number of seconds, or 0 to evaluate once.",
            code="config.every",
        )
    stopped = stop_on_signals()
    origin = options.log_as("evaluate", options.run)
    transport = options.connect()
    origin.run = transport.run
    folder = options.folder or Path("runs") / transport.run / "evaluate"
    # A single evaluation writes no curves: its user wants the answer, not a folder.
    curves = CurveWriter(
        options.sinks(transport.run, "evaluate", "evaluate", folder, "tokens") if options.every else []
    )
    evaluate = evaluator(transport, curves)
    if options.every:
        with suppress(OSError):  # It measures without curves where it cannot write.
            make_untracked(folder)
    curves.start()
    newest = evaluate()
    due = time.monotonic() + options.every
    while options.every and not stopped():
        if time.monotonic() < due:
            time.sleep(0.1)
            continue
        due = time.monotonic() + options.every
        try:
            newest = evaluate()
        except UnreachableError:
            continue  # The next attempt may succeed.
    if options.every:
        newest = evaluate()
    curves.close()
    unit = loss_unit(transport.reader.manifest().corpus)
    loss = unit.from_evaluation(newest.bits_per_byte)
    if options.json:
        print_json({"run": transport.run, "round": newest.round, "held_out": loss, "unit": unit.name})
    elif not options.every:
        print(f"{loss:.4f} {unit.name} on held-out text at round {newest.round}")  # noqa: T201
    return 0


def evaluator(transport: ReaderTransport, curves: CurveWriter | None = None) -> Callable[[], Evaluation]:
    """Return a function that evaluates the newest parameters and records the result, once for each round."""
    manifest = transport.reader.manifest()
    keep_compiled()

    from archipelago.islands.data.corpus import open_corpus
    from archipelago.islands.data.sharding import held_out
    from archipelago.islands.evaluation import compile_measures, published
    from archipelago.islands.models.registry import build

    config = manifest.config
    corpus = open_corpus(manifest.corpus.name)
    if corpus.identity != manifest.corpus:
        raise BrokerError(
            f"the corpus {corpus.name!r} on this machine is not the run's",
            "Copy the run's corpus to this machine.",
            code="broker.other-corpus",
        )
    text = held_out(corpus.valid, config.data.held_out_sequences, config.data.sequence_length)
    unit = loss_unit(manifest.corpus)
    measure = compile_measures(build(config.model), text, corpus.bytes_per_token)

    def evaluate() -> Evaluation:
        params, number, step = published(transport, manifest)
        known = transport.reader.evaluations()
        if known and known[-1].round == number:
            return known[-1]
        tokens = sum(presence.heartbeat.tokens for presence in transport.reader.presences())
        measured = measure(params)
        right = 100 * measured.accuracy
        found = Evaluation(number, step, tokens, time.time(), measured.bits)
        loss = unit.from_evaluation(found.bits_per_byte)
        log.info("round %s: %.4f %s, %.1f %% right", number, loss, unit.name, right, extra={"round": number})
        transport.reader.record_evaluation(found)
        if curves is not None:
            curves.put(tokens, {"held_out_loss": loss, "accuracy": measured.accuracy, "round": number})
        return found

    return evaluate
