"""Tensors of a model that a run does not train. They are never sent. Digests show that an island has the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import xxhash
from annotated_types import Ge
from pydantic import StringConstraints

from archipelago.broker.errors import MismatchError

_REMEDY = "All islands must begin with the same frozen tensors: load the weights that the run was created with."


class FrozenTensor(NamedTuple):
    """A tensor that is not trained, as a manifest names it.

    Attributes:
        dtype: Its dtype, such as `bfloat16`, under the name that JAX and PyTorch share.
        digest: The XXH3-128 digest of its elements in row-major order, as thirty-two hexadecimal digits.
    """

    name: str
    shape: tuple[Annotated[int, Ge(1)], ...]
    dtype: Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]{1,32}$")]
    digest: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]


@dataclass(frozen=True)
class FrozenValues:
    """A tensor that is not trained, in the memory of an island.

    Attributes:
        pieces: Returns its elements in row-major order, piece by piece, so that few of them are in the memory of the
            host at a time.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    pieces: Callable[[], Iterable[memoryview]]

    def digest(self) -> str:
        """Read all elements, and return their digest. XXH3 takes less time than a memory copy."""
        state = xxhash.xxh3_128()
        for piece in self.pieces():
            state.update(piece)
        return state.hexdigest()

    def named(self) -> FrozenTensor:
        """Return the tensor for a manifest."""
        return FrozenTensor(self.name, self.shape, self.dtype, self.digest())


def require_same_frozen(run: str, expected: Sequence[FrozenTensor], own: Sequence[FrozenValues]) -> None:
    """Raise MismatchError (`loop.other-frozen`), which names the first difference, unless all frozen tensors are equal.

    Names, shapes and dtypes are compared before any element is read.
    """
    found = {values.name: values for values in own}
    for tensor in expected:
        values = found.get(tensor.name)
        if values is None:
            raise _mismatch(run, tensor.name, tensor.dtype, "nothing", "is missing here")
        if (values.shape, values.dtype) != (tensor.shape, tensor.dtype):
            ours, theirs = (f"{each.dtype}{list(each.shape)}" for each in (values, tensor))
            raise _mismatch(run, tensor.name, theirs, ours, f"is {ours} here, and {theirs} in the run")
    known = {tensor.name for tensor in expected}
    for values in own:
        if values.name not in known:
            raise _mismatch(run, values.name, "nothing", values.dtype, "is not in the run")
    for tensor in expected:
        digest = found[tensor.name].digest()
        if digest != tensor.digest:
            raise _mismatch(run, tensor.name, tensor.digest, digest, "has other values here than in the run")


def _mismatch(run: str, name: str, theirs: str, ours: str, difference: str) -> MismatchError:
    return MismatchError(
        f"frozen tensor {name!r}", theirs, ours, _REMEDY, code="loop.other-frozen",
        what=f"the run {run!r} does not train all tensors, and the frozen tensor {name!r} {difference}",
    )  # fmt: skip
