"""The name and layout of a run's tensor in another program. This module does not import JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple


class Place(NamedTuple):
    """A tensor's name under the other naming, and whether its axes are swapped there."""

    name: str
    transposed: bool = False


#: From a tensor's name in a script to its place in the run. A table need not have the names that are the same in both.
Names = Mapping[str, str | Place] | Callable[[str], str | Place]


def place_of(names: Names | None, name: str) -> Place:
    """Return the place in the run of a tensor by its name in the script."""
    if names is None:
        return Place(name)
    found = names(name) if callable(names) else names.get(name, name)
    return found if isinstance(found, Place) else Place(found)
