"""What a merger needs to merge a round again: its tape entry, and the part of the run's state that weighs it."""

from __future__ import annotations

import json
from typing import NamedTuple

from archipelago.broker.errors import ConfigError, WireError
from archipelago.broker.messages import TapeEntry, from_fields, to_fields
from archipelago.merger.state import RunState


class RoundLog(NamedTuple):
    """The log of one round.

    Attributes:
        tape: The round's tape entry.
        before: The run's state before the round, as far as the merge depends on it.
    """

    tape: TapeEntry
    before: RunState


def log_of(before: RunState, tape: TapeEntry) -> str:
    """Return the log of the round of that tape entry, as text. `before` is the run's state before the round."""
    p = tape.fragment
    part = RunState(
        closed=before.closed,
        step=before.step,
        staleness=before.staleness,
        norms={p: before.norms[p]} if p in before.norms else {},
        scores=before.scores,
        steered=before.steered,
    )
    return json.dumps({"tape": to_fields(tape), "before": part.to_json()})


def parse_log(text: str) -> RoundLog:
    """Return the log that `log_of` wrote. Raises WireError for anything else."""
    try:
        values = json.loads(text)
        return RoundLog(from_fields(TapeEntry, values["tape"]), RunState.from_json(values["before"]))
    except (ValueError, KeyError, TypeError, RecursionError, ConfigError) as error:
        raise WireError(f"the log of a round cannot be read ({type(error).__name__})") from None
