"""A cheap check of a contribution before it is sent: the scales of its codec are NaN where a parameter was."""

from __future__ import annotations

import numpy as np

from archipelago.islands.sync.connection.outbox import Draft

#: The exponent of a bfloat16 number. All its bits are set in NaN and in infinity.
_EXPONENT = np.uint16(0x7F80)


def is_sound(draft: Draft) -> bool:
    """Return whether no value of a contribution is NaN or infinite.

    The first array of every codec holds either the numbers themselves, as float32 or the bits of bfloat16, or the
    scales of its blocks as the bits of bfloat16. A block with a NaN or an infinity has the scale NaN.
    """
    first = np.asarray(draft.parts[0])
    if first.dtype == np.uint16:
        return not bool(np.any((first & _EXPONENT) == _EXPONENT))
    return bool(np.all(np.isfinite(first)))
