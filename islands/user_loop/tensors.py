"""The tensors of a user's model: which are trained, and which are not those of the run. The rest is frozen."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import get_args

from archipelago.broker.errors import ConfigError, MismatchError
from archipelago.broker.frozen import FrozenTensor
from archipelago.broker.manifest import Manifest, Tensor, TensorKind

#: From the name of a tensor to its kind.
KindOf = Callable[[str], TensorKind]
#: Finds embeddings by their names, in the words of flax, equinox, `transformers` and nanoGPT.
EMBEDDINGS = "embed|wte|wpe"
#: How many differences an error names.
NAMED_MAX = 4


def kinds_by(kinds: str | KindOf) -> KindOf:
    """Return the function from a tensor's name to its kind, from what `create` was given.

    An expression ignores case. Raises ConfigError (`loop.argument`) for one that cannot be read.
    """
    if not isinstance(kinds, str):
        return lambda name: _checked(kinds(name), name)
    pattern = _pattern("kinds", kinds)
    return lambda name: "embedding" if pattern.search(name) else "rest"


def _pattern(argument: str, text: str) -> re.Pattern[str]:
    """Return the regular expression that a script gives as an argument. Raises ConfigError (`loop.argument`)."""
    try:
        return re.compile(text, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(
            f"{argument}={text!r} is no regular expression ({error})",
            "Give one that is found in the names of tensors, such as 'embed|wte|wpe' or 'lora', or a function.",
            code="loop.argument",
        ) from None


def _checked(kind: TensorKind, name: str) -> TensorKind:
    if kind not in get_args(TensorKind):
        raise ConfigError(
            f"kinds gives {kind!r} for the tensor {name!r}", 'Return "embedding" or "rest".', code="loop.argument"
        )
    return kind


def require_same_tensors(
    manifest: Manifest, tensors: Sequence[Tensor], frozen: Collection[str] = (), unmerged: Collection[str] = ()
) -> None:
    """Raise MismatchError (`loop.other-tensors`), which says how, unless the trained tensors are those of the run.

    `unmerged` are the names of tensors that are here, and whose type is not merged.
    """
    require_equal_tensors(f"the run {manifest.run!r}", manifest.tensors, tensors, manifest.frozen, frozen, unmerged)


def require_equal_tensors(
    whose: str,
    theirs: Sequence[Tensor],
    tensors: Sequence[Tensor],
    frozen_theirs: Sequence[FrozenTensor] = (),
    frozen: Collection[str] = (),
    unmerged: Collection[str] = (),
) -> None:
    """Do the same for the tensors of a run or file, which `whose` names."""
    frozen_there = {tensor.name for tensor in frozen_theirs}
    run, own = ({tensor.name: tensor.shape for tensor in each} for each in (theirs, tensors))
    if run == own:
        return
    changed = [
        f"{name} has the shape {_shape(own[name])}, in the run {_shape(run[name])}"
        for name in sorted(run.keys() & own.keys())
        if run[name] != own[name]
    ]
    why = dict.fromkeys(unmerged, "of a type here that is not merged, so it stays the island's own")
    why |= dict.fromkeys(frozen, "trained in the run, and frozen here")
    missing = [f"{name} {_shape(run[name])} is {why.get(name, 'missing')}" for name in sorted(run.keys() - own.keys())]
    more = [
        f"{name} {_shape(own[name])} is {'trained here, and frozen' if name in frozen_there else 'not'} in the run"
        for name in sorted(own.keys() - run.keys())
    ]
    found = changed + missing + more
    said = "; ".join(found[:NAMED_MAX]) + (f"; and {len(found) - NAMED_MAX} more" if len(found) > NAMED_MAX else "")
    raise MismatchError(
        "tensors", len(run), len(own),
        "Give the model of the run, with the `trained` that `create` got: all its islands train the same. For another "
        "model, create another run.",
        code="loop.other-tensors",
        what=f"these parameters are not those of {whose}: {said}",
    )  # fmt: skip


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


#: From the name of a tensor to whether it is trained.
IsTrained = Callable[[str], bool]
#: What a script gives: such a function, or a regular expression.
Trained = str | IsTrained

_REMEDY = (
    "Give a regular expression that is found in the names of trained tensors, such as 'lora', or a function from a "
    "name to a boolean."
)


def trained_by(trained: Trained) -> IsTrained:
    """Return the function from a tensor's name to whether it is trained, from what `create` or `join` was given.

    An expression ignores case. Raises ConfigError (`loop.argument`) for one that cannot be read, and for anything else.
    """
    if not isinstance(trained, str):
        if not callable(trained):
            raise ConfigError(f"`trained` is {trained!r:.60}", _REMEDY, code="loop.argument")
        return lambda name: bool(trained(name))
    pattern = _pattern("trained", trained)
    return lambda name: pattern.search(name) is not None


def nothing_trained(trained: object, names: Sequence[str], remedy: str) -> ConfigError:
    """Return the error (`loop.nothing`) for a model, or a choice of its tensors, without anything to train."""
    named = ", ".join(names[:NAMED_MAX]) + (", …" if len(names) > NAMED_MAX else "")
    tensors = f"{len(names)} tensors ({named})" if names else "0 tensors"
    if trained is None:
        return ConfigError(f"none of the {tensors} can be trained", remedy, code="loop.nothing")
    chosen = f"trained={trained!r}" if isinstance(trained, str) else "`trained`"
    what = f"{chosen} chooses none of the {tensors} that can be trained"
    return ConfigError(what, f"{remedy} {_REMEDY}", code="loop.nothing")


def frozen_changed(name: str) -> ConfigError:
    """Return the error (`loop.frozen-changed`) for a frozen tensor that the script has changed."""
    return ConfigError(
        f"the frozen tensor {name!r} has changed since `join`, so this island trains another model than its peers",
        "Choose what changes by `trained=` in `create` and `join`, also layers that are unfrozen later, or keep a copy "
        "such as a teacher outside of the model that joins. Leave frozen tensors out of the optimiser, because weight "
        "decay changes them too. Load weights before `join`.",
        code="loop.frozen-changed",
    )
