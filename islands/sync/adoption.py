"""Adopt rules: combine an arriving snapshot with the island's own parameters. Each rule is one pure function.

`AnyReplica` is what applies them to `Parameters`, in the framework of the loop.

A rule works on each element by itself. It sees three float32 arrays, of a fragment's N elements or of one tensor: the
snapshot's parameters, the island's own parameters, and the reference from which the next contribution is measured (the
last snapshot, or the point of the last sending). They are arrays of JAX or tensors of PyTorch.

To add a rule, write the function, register it in `RULES` (and in `KEEPS_PROGRESS`, if unsent
progress stays) and name it in `AdoptConfig`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from archipelago.broker.codecs import Parts, Vector
from archipelago.broker.errors import DivergedError

#: A vector of any framework.
Array = Any
#: `adopt(new_N, own_N, reference_N)` returns the island's next parameters and its next reference.
Adopt = Callable[[Array, Array, Array], tuple[Array, Array]]


def overwrite(new_N: Array, own_N: Array, reference_N: Array) -> tuple[Array, Array]:
    """Take the snapshot and drop the progress since the last sending (the paper's α = 0)."""
    return new_N, new_N


def carry(new_N: Array, own_N: Array, reference_N: Array) -> tuple[Array, Array]:
    """Take the snapshot plus the unsent progress: θ_new + (θ_now − θ_sent).

    The sum is written as a shift of θ_now. A snapshot that equals what this island sent then changes no bit of it.
    """
    return own_N + (new_N - reference_N), new_N


#: Adopt rules by the names of `AdoptConfig.rule`.
RULES: dict[str, Adopt] = {"overwrite": overwrite, "carry": carry}
#: The rules by which unsent progress stays in the parameters and goes into the next contribution. The steps behind it
#: then stay counted.
KEEPS_PROGRESS = frozenset({"carry"})


class AnyReplica(Protocol):
    """A replica: it measures contributions and adopts snapshots. `params` are those that the loop keeps."""

    def measure(self, fragment: int, params: Any, codec: str = "") -> Parts:
        """Return a fragment's outer gradient as the codec's parts."""

    def prepare(self, fragment: int, new_N: Vector, /) -> Any:
        """Bring a fragment's snapshot to the device. The link's thread calls this."""

    def adopt(self, fragment: int, params: Any, new_N: Any) -> Any:
        """Return the parameters after a fragment's snapshot was adopted. It may be prepared."""


class Parameters(Protocol):
    """The parameters of a loop, by the names of the run's tensors. A loop overrides what its framework needs."""

    def named(self) -> Mapping[str, Any]:
        """Return the present parameters by name. Raises ConfigError if they are not those of the run."""

    def replace(self, named: Mapping[str, Any]) -> None:
        """Replace the parameters between two steps. This does nothing where the replica changes them in place."""
        return

    def are_there(self) -> bool:
        """Return whether the parameters can be read. Those that were given to a later step cannot."""
        return True

    def require_frozen(self) -> None:
        """Raise ConfigError (`loop.frozen-changed`) if a tensor that is not trained has changed. This may wait."""
        return

    def not_finite(self) -> list[str]:
        """Return the names of those with NaN or infinity. This waits for the device."""


def not_finite(found: Sequence[str], candidates: Sequence[str]) -> DivergedError:
    """Return the error (`loop.not-finite`) for parameters with NaN or infinity.

    Args:
        found: The names of those with NaN or infinity; empty if they cannot be read any more.
        candidates: The names of those that may have it.
    """
    where = f"the tensor {found[0]!r}" if found else f"one of the parameters {', '.join(candidates[:4])}"
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return DivergedError(
        f"{where}{more} holds NaN or infinity, which is never sent",
        "Start the island again: it takes the run's parameters. If that repeats, lower the learning rate.",
        code="loop.not-finite",
    )
