"""Batches of an island: a pure function of the text, the run's seed, and the shard ordinals that the island claimed.

The training text is cut into windows, and these are dealt out to shards, so that each shard is a sample of the whole
text: a shard of neighbouring windows would be all of one kind, and the islands would unlearn it with the next. Islands
claim **ordinals** 0, 1, 2 … from a counter of the run, and ordinal n names a shard, so that in each epoch (as many
ordinals as there are shards) every shard is some island's once. Held-out text goes through `held_out` only.

Random numbers are raw PCG64 output, whose stream NumPy promises to keep (unlike that of `Generator.permutation`): all
islands must find the same permutation, whichever NumPy they have.

Shapes in names: B sequences a batch, T tokens (bytes) a sequence, N windows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from broker.config import RunConfig
from broker.errors import DataError

PRIVATE_ORDINALS = 1 << 62
"""ordinals from here on are claimed from nobody: where islands begin that never reached the counter"""
_SHARDS_STREAM, _WINDOWS_STREAM, _OFFSETS_STREAM = 0, 1, 2


def _random(count: int, *entropy: int) -> NDArray[np.uint64]:
    """`count` random 64-bit numbers that depend on `entropy` alone."""
    return np.asarray(np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(count), dtype=np.uint64)


def _permutation(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    return np.argsort(keys, kind="stable")


def shard_for(ordinal: int, shards: int, seed: int) -> int:
    """The shard that an ordinal names: one place in a permutation of all shards, drawn anew for each epoch."""
    epoch, place = divmod(ordinal, shards)
    return int(_permutation(_random(shards, _SHARDS_STREAM, seed, epoch))[place])


def windows(size: int, shards: int, length: int, seed: int, ordinal: int, repeat: int = 0) -> NDArray[np.int64]:
    """Where the windows of T + 1 bytes of an ordinal's shard begin, in random order; int64 [N], at least one.

    In each epoch the windows tile the text of `size` bytes from another random offset below T on, and every shards-th
    of them belongs to a shard. Neighbours share the one byte that is the last target of one and the first input of the
    other. Needs `size` of at least T · (shards + 1).
    """
    epoch = ordinal // shards
    offset = int(_random(1, _OFFSETS_STREAM, seed, epoch)[0]) % length
    mine = np.arange(shard_for(ordinal, shards, seed), (size - offset - 1) // length, shards, dtype=np.int64)
    order = _permutation(_random(mine.size, _WINDOWS_STREAM, seed, ordinal, repeat))
    return offset + mine[order] * length


def gather(text: NDArray[np.uint8], starts_N: NDArray[np.int64], length: int) -> NDArray[np.uint8]:
    """The windows of T + 1 bytes that begin at `starts_N`; a copy, uint8 [N, T + 1]."""
    windows_NxT1: NDArray[np.uint8] = np.asarray(text)[starts_N[:, None] + np.arange(length + 1)]
    return windows_NxT1


def held_out(text: NDArray[np.uint8], sequences: int, length: int) -> NDArray[np.uint8]:
    """Evenly spaced, non-overlapping windows of a held-out text; uint8 [N, T + 1] with N = min(sequences, what fits).

    Raises DataError when not one fits.
    """
    room = text.size - 1
    count = min(sequences, room // length)
    if count < 1:
        raise DataError(
            f"the held-out text of {text.size:,} bytes is shorter than one sequence of {length:,} tokens",
            "Lower data.sequence_length, or train on a larger corpus.",
        )
    return gather(text, np.arange(count, dtype=np.int64) * room // count, length)


@dataclass(frozen=True)
class _Pass:
    """One pass over one shard."""

    ordinal: int
    repeat: int
    starts: NDArray[np.int64]
    """where the windows begin, in the order of use; [N] bytes"""


class Batches:
    """An endless supply of batches. Never waits: with no shard to claim it goes over the one it has again.

    `train` is the training text, uint8 [bytes]. `claim` returns the next ordinal that is this island's, or None when
    there is none to be had right now. `fallback` (not negative) sets islands that begin without a claim apart.

    Raises DataError when the text has too few bytes for a window in each shard.
    """

    def __init__(
        self, train: NDArray[np.uint8], config: RunConfig, claim: Callable[[], int | None], fallback: int = 0
    ) -> None:
        self._train, self._config, self._claim = train, config, claim
        self._fallback = PRIVATE_ORDINALS + fallback % PRIVATE_ORDINALS
        self._pass: _Pass | None = None
        self._position = 0
        self.repeats = 0
        """passes over a shard again because nothing could be claimed"""
        shards, length = config.data.shards, config.data.sequence_length
        if train.size < length * (shards + 1):
            raise DataError(
                f"{train.size:,} bytes of training text are too few for {shards:,} shards (data.shards) of sequences "
                f"of {length:,} tokens (data.sequence_length)",
                f"Lower data.shards to at most {max(1, train.size // length - 1):,}, lower data.sequence_length, "
                "or train on a larger corpus.",
            )

    def next(self, steps: int) -> NDArray[np.uint8]:
        """The next `steps` batches: uint8 [steps, B, T + 1]."""
        batch, length = self._config.data.batch_size, self._config.data.sequence_length
        out = np.empty((steps * batch, length + 1), dtype=np.uint8)
        filled = 0
        while filled < len(out):
            current = self._current()
            starts = current.starts[self._position : self._position + len(out) - filled]
            out[filled : filled + len(starts)] = gather(self._train, starts, length)
            self._position += len(starts)
            filled += len(starts)
        return out.reshape(steps, batch, length + 1)

    def state(self) -> dict[str, int]:
        """Where the supply is, for a checkpoint. The ordinal is −1 before the first batch."""
        ordinal, repeat = (self._pass.ordinal, self._pass.repeat) if self._pass else (-1, 0)
        return {"ordinal": ordinal, "repeat": repeat, "position": self._position, "repeats": self.repeats}

    def restore(self, state: Mapping[str, int]) -> None:
        """Goes on from where `state()` was taken, with the same text and config. Raises DataError for any other."""
        ordinal, repeat, position = state["ordinal"], state["repeat"], state["position"]
        restored = self._begin(ordinal, repeat) if ordinal >= 0 and repeat >= 0 else None
        if not 0 <= position <= (len(restored.starts) if restored else 0) or repeat < 0:
            raise DataError(
                f"the saved place in the text (sequence {position} of pass {repeat} of ordinal {ordinal}) is not there",
                "The checkpoint belongs to another run or corpus: start this island without it.",
            )
        self._pass, self._position, self.repeats = restored, position, state["repeats"]

    def _current(self) -> _Pass:
        """The pass that has sequences left; begins another if this one has none."""
        if self._pass is None or self._position >= len(self._pass.starts):
            ordinal = self._claim()
            if ordinal is not None:
                self._pass = self._begin(ordinal, 0)
            elif self._pass is None:
                self._pass = self._begin(self._fallback, 0)
            else:
                self._pass = self._begin(self._pass.ordinal, self._pass.repeat + 1)
                self.repeats += 1
            self._position = 0
        return self._pass

    def _begin(self, ordinal: int, repeat: int) -> _Pass:
        data = self._config.data
        starts = windows(self._train.size, data.shards, data.sequence_length, self._config.seed, ordinal, repeat)
        return _Pass(ordinal, repeat, starts)
