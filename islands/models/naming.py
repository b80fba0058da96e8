"""The name and layout of a run's tensor in another program. This module does not import JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from archipelago.broker.errors import ConfigError


class Place(NamedTuple):
    """A tensor's name under the other naming, and whether its axes are swapped there."""

    name: str
    transposed: bool = False


#: From a tensor's name in a script to its place in the run. A table need not have the names that are the same in both.
Names = Mapping[str, str | Place] | Callable[[str], str | Place]


def place_of(names: Any, name: str) -> Place:
    """Return the place in the run of a tensor by its name in the script.

    Args:
        names: What the script gives: `Names`, or None if both have the same names.
        name: The name in the script.

    Raises:
        ConfigError: `names` is neither a table nor a function, or gives no name (`loop.names`).
    """
    if names is None:
        return Place(name)
    if not callable(names) and not isinstance(names, Mapping):
        raise misnamed(f"is {names!r:.60}")
    found = names(name) if callable(names) else names.get(name, name)
    place = found if isinstance(found, Place) else Place(found)
    given: Any = place.name
    if not isinstance(given, str) or not given:
        raise misnamed(f"gives {found!r:.60} for {name!r}, which is no name")
    return place


def misnamed(what: str) -> ConfigError:
    """Return the error (`loop.names`) for names that do not fit a model."""
    return ConfigError(
        f"`names` {what}",
        "Give a table, or a function, from the names of the model's parameters to those of the run.",
        code="loop.names",
    )
