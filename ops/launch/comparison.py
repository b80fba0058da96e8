"""Train one process on as many tokens as a run, for the comparison in the report of `archipelago up`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from archipelago.ops.launch.supervisor import Child, thread_environment
from archipelago.ops.settings import say
from archipelago.ops.watch.run_summary import Curve

MODULE = "archipelago.ops.experiments.single_process"
POLL_SECONDS = 0.2


def compare(folder: Path, tokens: int, weights: Path | None, task: str | None, stopped: Callable[[], bool]) -> Curve:
    """Return the held-out results of one process that trained on `tokens` tokens with the run's config.

    A result that a previous call left in the run's folder is used again.

    Args:
        folder: The run's folder, with its `config.toml`.
        tokens: Tokens to train on.
        weights: Weights to begin with, or None.
        task: The task that the run trains, FILE.py:NAME; None for one of our models.
        stopped: Returns whether to stop early.

    Returns:
        Pairs of tokens and bits per byte; empty if training did not finish.
    """
    result = folder / "one_process.json"
    if (found := _read(result, tokens)) is not None:
        return found
    say(f"one process trains on the same {tokens:,} tokens, for comparison (Ctrl-C skips it)")
    argv = ["-m", MODULE, "--tokens", str(tokens), "--output", str(result), "--config", str(folder / "config.toml")]
    argv += ["--from", str(weights)] if weights else []
    argv += ["--task", task] if task else []
    log = folder / "logs" / "one-process.log"
    log.unlink(missing_ok=True)
    child = Child("one-process", argv, thread_environment(1), log)
    child.start()
    shown = 0
    try:
        while child.process is not None and child.process.poll() is None and not stopped():
            lines = child.log.read_text(encoding="utf-8").splitlines()
            for text in lines[shown:]:
                say(f"  {text}")
            shown = len(lines)
            time.sleep(POLL_SECONDS)
    finally:
        child.stop(5.0)
    found = _read(result, tokens)
    if found is None:
        why = "" if stopped() or not (said := child.last_words()) else f" (its log ends with: {said})"
        say(f"  it did not finish, so the report has no comparison{why}")
    return found or []


def _read(path: Path, tokens: int) -> Curve | None:
    """Return the curve in that file if it is about that many tokens."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        curve = [(int(tokens), float(bits)) for tokens, bits in found["curve"]]
        return curve if found["tokens"] == tokens else None
    except (OSError, ValueError, LookupError, TypeError):
        return None  # It is not there, or damaged: train again.
