"""Which tensors of a model a run trains. The others are frozen: they are compared by digest, and never sent."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from archipelago.broker.errors import ConfigError

#: From the name of a tensor to whether it is trained.
IsTrained = Callable[[str], bool]
#: What a script gives: such a function, or a regular expression.
Trained = str | IsTrained

_REMEDY = (
    "Give a regular expression that is found in the names of trained tensors, such as 'lora', a function from a name "
    "to a boolean, or in JAX a tree of booleans."
)


def trained_by(trained: Trained) -> IsTrained:
    """Return the function from a tensor's name to whether it is trained.

    Args:
        trained: Such a function, or a regular expression that is found in the names, in any case.

    Raises:
        ConfigError: It is something else, or the expression cannot be read (`loop.trained`).
    """
    if not isinstance(trained, str):
        if not callable(trained):
            raise trained_error(f"`trained` is {trained!r:.60}")
        return lambda name: bool(trained(name))
    try:
        pattern = re.compile(trained, re.IGNORECASE)
    except re.error as error:
        raise trained_error(f"trained={trained!r} is no regular expression ({error})") from None
    return lambda name: pattern.search(name) is not None


def trained_error(what: str) -> ConfigError:
    """Return the error (`loop.trained`) for a choice of tensors that cannot be used."""
    return ConfigError(what, _REMEDY, code="loop.trained")


def nothing_trained(trained: object, names: Sequence[str]) -> ConfigError:
    """Return the error (`loop.nothing`) for a choice without any tensor."""
    said = f"trained={trained!r}" if isinstance(trained, str) else "`trained`"
    return ConfigError(
        f"{said} chooses none of the {len(names)} tensors ({', '.join(names[:3])}, …)", _REMEDY, code="loop.nothing"
    )


def frozen_changed(name: str) -> ConfigError:
    """Return the error (`loop.frozen-changed`) for a frozen tensor that the script has changed."""
    return ConfigError(
        f"the frozen tensor {name!r} has changed since `join`, so this island trains another model than its peers",
        "Leave it out of the optimiser, because weight decay changes tensors without gradients too, and load weights "
        "before `join`. Start the script again.",
        code="loop.frozen-changed",
    )
