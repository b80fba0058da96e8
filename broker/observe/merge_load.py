"""Whether a run's rounds wait for its merger, by the tape, and whether there were enough of them. Pure.

`status`, the dashboard and its metrics, and the warnings at a run's end share this, so they say the same.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from archipelago.broker.messages import TapeEntry

#: The recent rounds that are looked at.
ROUNDS_MAX: Final = 48
#: Fewer rounds, or a shorter time, say nothing.
ROUNDS_MIN: Final = 12
SECONDS_MIN: Final = 5.0
#: A merger that waits for less than a tenth of the time is behind, if islands contribute later than the run's interval.
BUSY_SHARE: Final = 0.9
STRETCH: Final = 1.2
#: From this share of the busy time on, spectra are the reason.
SPECTRA_SHARE: Final = 0.5
SPECTRA_REMEDY: Final = (
    "Start a merger with more cores and --threads, or --spectra gpu: it stands by until you stop the slow one. In a "
    "new run, cut matrices into smaller blocks (--merge.isotropic-side-max 512), merge by RDA (--merge.rest rda "
    "--merge.embedding rda), or take a longer --sync.interval."
)
#: With fewer syncs of each fragment, the outer optimiser has hardly begun, and a run's model can be far worse than
#: those of its islands.
SYNCS_FEW: Final = 10
FEW_SYNCS_REMEDY: Final = (
    "Extend the run (`archipelago steer inner.steps=N`), or create one with more steps or a shorter `sync.interval`."
)


@dataclass(frozen=True)
class MergeLoad:
    """The work of a merger in recent rounds.

    Attributes:
        busy: The share of the time in which it did not wait for contributions.
        spectra: The share of the time in which it changed spectra of matrices.
        stretch: The steps of the largest contribution of a round as a share of the run's interval; the lower quartile,
            because the rounds after an outage merge long contributions once.
    """

    busy: float
    spectra: float
    stretch: float

    @property
    def is_slow(self) -> bool:
        """Whether rounds wait for the merger, and islands stretch their interval because of that."""
        return self.busy >= BUSY_SHARE and self.stretch >= STRETCH

    def describe(self) -> str:
        """Return what is wrong, as one sentence."""
        return (
            f"Rounds wait for the merger: it works {self.busy:.0%} of the time ({self.spectra:.0%} on spectra), and "
            f"islands contribute every {self.stretch:.1f} intervals."
        )

    @property
    def remedy(self) -> str:
        """What to do about it, as whole sentences."""
        if self.spectra >= SPECTRA_SHARE * self.busy:
            return SPECTRA_REMEDY
        return (
            "Move the merger to a faster machine, or closer to Redis: start one there, and stop the slow one. In a new "
            "run, take a longer --sync.interval, or let several mergers share the work (--shards 2). Nothing is lost "
            "meanwhile; islands learn less from each other."
        )


def merge_load(tape: Sequence[TapeEntry], interval: int) -> MergeLoad | None:
    """Return the work of the merger that closed the newest rounds; None if that is not known yet.

    The tape has the recent rounds, oldest first. The interval is H, the inner steps between two contributions to the
    same fragment.
    """
    recent = [entry for entry in tape[-ROUNDS_MAX:] if entry.epoch == tape[-1].epoch and entry.unix_seconds > 0.0]
    if len(recent) < ROUNDS_MIN:
        return None
    seconds = recent[-1].unix_seconds - recent[0].unix_seconds
    largest = [max(member.steps for member in entry.members) for entry in recent if entry.members]
    if seconds < SECONDS_MIN or len(largest) < ROUNDS_MIN:
        return None
    busy, spectra = (
        min(1.0, sum(getattr(entry, name) for entry in recent[1:]) / seconds)
        for name in ("busy_seconds", "spectra_seconds")
    )
    return MergeLoad(busy, spectra, statistics.quantiles(largest, n=4)[0] / interval)


def warn_of_few_syncs(log: logging.Logger, syncs: float, verb: str = "had") -> None:
    """Log what is wrong with so few syncs of each fragment, and what to do; nothing if there are enough."""
    if fault := few_syncs(syncs, verb):
        log.warning("%s %s", fault, FEW_SYNCS_REMEDY, extra={"code": "run.few-syncs"})


def few_syncs(syncs: float, verb: str = "had") -> str:
    """Return what is wrong with so few syncs of each fragment, as one sentence; empty if there are enough."""
    if syncs >= SYNCS_FEW:
        return ""
    return (
        f"Each fragment {verb} only {syncs:.1f} syncs, so the run's model may be far worse than those of its islands."
    )
