"""Predict whether a merger can change the spectra of a run's matrices in time. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from archipelago.broker.config import MergeConfig
from archipelago.broker.manifest import Tensor
from archipelago.merger.spectra import cycle_operations
from archipelago.ops.watch.formatting import seconds_text

#: Operations a second of one of several threads (docs/results/performance.md). `archipelago doctor` measures its own.
THREAD_RATE: Final = 30e9
#: A merger that spends more of an interval on spectra has too little time for contributions, commits and checkpoints.
SHARE_MAX: Final = 0.7


@dataclass(frozen=True)
class SpectraLoad:
    """The spectra of one cycle, in which each fragment is merged once.

    Attributes:
        operations: The floating-point operations; 0 if no rule of the run changes spectra.
        threads: The threads of the merger.
        seconds: The time that they take.
        interval_seconds: H times the time of an inner step; NaN if that is unknown.
        side_max: The largest `merge.isotropic_side_max` with which the merger keeps up; the run's own if it does.
        coarser: The settings of coarser merge rules with which the merger keeps up, as few as possible.
    """

    operations: float
    threads: int
    seconds: float
    interval_seconds: float
    side_max: int
    coarser: str

    @property
    def share(self) -> float:
        """The share of the interval."""
        return self.seconds / self.interval_seconds

    @property
    def fits(self) -> bool:
        """Whether the merger keeps up, as far as that is known."""
        return not self.share > SHARE_MAX

    @property
    def remedy(self) -> str:
        """What to do if the merger does not keep up."""
        count = math.ceil(self.threads * self.share / SHARE_MAX)
        side = f", or only large ones with --merge.isotropic-side-max {self.side_max}" if self.side_max > 1 else ""
        return (
            f"Run the merger on a machine with {count} such cores (--threads {count}). Or merge matrices by a "
            f"coarser rule in a new run: {self.coarser}{side}."
        )

    def describe(self) -> str:
        """Return the cost in words."""
        where = f"{self.threads} thread{'s' * (self.threads != 1)}"
        what = f"spectra take {self.operations / 1e12:.2g} TFLOP a cycle, {seconds_text(self.seconds)} on {where}"
        if math.isnan(self.interval_seconds):
            return what
        return f"{what}: {self.share:.0%} of the interval of {seconds_text(self.interval_seconds)}"


def spectra_load(
    tensors: Sequence[Tensor], config: MergeConfig, threads: int, rate: float, interval_seconds: float
) -> SpectraLoad:
    """Predict the spectra of a run.

    Args:
        tensors: The tensors of the model.
        config: The merge rules.
        threads: The threads of the merger.
        rate: The operations a second of all of them together.
        interval_seconds: H times the time of an inner step; NaN if that is unknown.
    """
    sides = {min(tensor.shape[-2:]) for tensor in tensors if len(tensor.shape) > 1 and tensor.size}
    limits = [config.isotropic_side_max, *sorted((s for s in sides if s < config.isotropic_side_max), reverse=True), 1]

    def seconds(side_max: int) -> float:
        return cycle_operations(tensors, replace(config, isotropic_side_max=side_max)) / rate

    fitting = next(side for side in limits if side == 1 or not seconds(side) > SHARE_MAX * interval_seconds)
    own = cycle_operations(tensors, config)
    embeddings_left = cycle_operations(tensors, replace(config, rest="rda")) / rate > SHARE_MAX * interval_seconds
    coarser = "--merge.rest rda" + " --merge.embedding rda" * embeddings_left
    return SpectraLoad(own, threads, own / rate, interval_seconds, fitting, coarser)


def decoder(parameters: float) -> tuple[Tensor, ...]:
    """Return the matrices of a usual decoder: 12 w² parameters a layer and w/64 layers of width w, as squares."""
    width = max(1, round((16.0 * parameters / 3.0) ** (1.0 / 3.0)))
    return (Tensor("layers", (max(1, round(parameters / width**2)), width, width)),)
