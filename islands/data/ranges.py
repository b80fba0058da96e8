"""Ranges: cut the training text into windows, and deal them to ranges. Pure functions of the seed.

The windows of one pass over all ranges tile the text. Each range is a sample of the whole text. With ranges of
neighbouring windows, islands would forget the rest of the text while they read one.

Random numbers are raw PCG64 output. NumPy promises to keep that stream, unlike that of `Generator.permutation`, and all
islands must find the same permutation with any NumPy.

Shapes in names: T tokens of a sequence, N windows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from archipelago.broker.errors import DataError
from archipelago.islands.data.tokenizer import Tokens

_PLACES_STREAM, _WINDOWS_STREAM, _OFFSETS_STREAM, _ORDER_STREAM = 0, 1, 2, 3


def _random(count: int, *entropy: int) -> NDArray[np.uint64]:
    """Return `count` random 64-bit numbers that depend on `entropy` alone."""
    return np.asarray(np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(count), dtype=np.uint64)


def _permutation(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    return np.argsort(keys, kind="stable")


def range_order(ranges: int, seed: int) -> list[str]:
    """Return the names of all ranges in the order in which every island tries to lease them."""
    return [str(int(number)) for number in _permutation(_random(ranges, _ORDER_STREAM, seed))]


def windows(size: int, ranges: int, length: int, seed: int, number: int, pass_number: int) -> NDArray[np.int64]:
    """Return where the windows of a pass over a range begin, in random order.

    The windows of all ranges tile the text from a random offset below T, which differs between passes. Neighbouring
    windows share one token: the last target of the first is the first input of the second. Of S ranges, each has every
    S-th window.

    Args:
        size: The number of tokens of the text, at least T · (ranges + 1).
        ranges: The number of ranges.
        length: T. A window has T + 1 tokens.
        seed: The run's seed.
        number: The range's number.
        pass_number: The number of the pass.

    Returns:
        int64 [N], where N is at least one.
    """
    offset = int(_random(1, _OFFSETS_STREAM, seed, pass_number)[0]) % length
    # The ranges are permuted. Otherwise the same ranges would always have the windows that do not divide evenly.
    first = int(_permutation(_random(ranges, _PLACES_STREAM, seed, pass_number))[number])
    mine = np.arange(first, (size - offset - 1) // length, ranges, dtype=np.int64)
    # The last 0 once counted how often a pass was read again. Without it, the order would be another.
    return offset + mine[_permutation(_random(mine.size, _WINDOWS_STREAM, seed, number, pass_number, 0))] * length


def gather(text: Tokens, starts_N: NDArray[np.int64], length: int) -> Tokens:
    """Copy the windows of T + 1 tokens that begin at `starts_N`, as [N, T + 1]."""
    windows_NxT1: Tokens = np.asarray(text)[starts_N[:, None] + np.arange(length + 1)]
    return windows_NxT1


def held_out(text: Tokens, sequences: int, length: int) -> Tokens:
    """Copy evenly spaced windows of a held-out text that do not overlap.

    Returns:
        [N, T + 1] of the text's dtype, where N is `sequences` or as many as fit.

    Raises:
        DataError: Not a single one fits (`data.too-small`).
    """
    room = text.size - 1
    count = min(sequences, room // length)
    if count < 1:
        raise DataError(
            f"the held-out text of {text.size:,} {unit(text)} is shorter than one sequence of {length:,}",
            "Lower data.sequence_length, or train on a larger corpus.",
            code="data.too-small",
        )
    return gather(text, np.arange(count, dtype=np.int64) * room // count, length)


def unit(text: Tokens) -> str:
    """Return the word for the elements of a text."""
    return "bytes" if text.dtype == np.uint8 else "tokens"


def require_fit(text: Tokens, length: int, ranges: int) -> None:
    """Raise DataError (`data.too-small`) unless a text has a window for each range."""
    if text.size < length * (ranges + 1):
        raise DataError(
            f"{text.size:,} {unit(text)} of training text are too few for {ranges:,} ranges (data.shards) of "
            f"sequences of {length:,} tokens (data.sequence_length)",
            f"Lower data.shards to at most {max(1, text.size // length - 1):,}, lower data.sequence_length, "
            "or train on a larger corpus.",
            code="data.too-small",
        )
