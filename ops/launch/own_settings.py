"""The settings of a run that exists: how those that a user gives differ, and how to go on with the run's own."""

from __future__ import annotations

import shlex
from dataclasses import replace

from archipelago.broker.config import RunConfig, differing, flags
from archipelago.broker.control import STEPS
from archipelago.broker.errors import MismatchError
from archipelago.broker.manifest import Manifest
from archipelago.ops.settings import setting_text


def require_own_settings(found: Manifest, config: RunConfig, go_on: str = "") -> None:
    """Raise MismatchError unless the config is the run's. It names each setting that differs, with both values.

    Args:
        found: The run.
        config: The settings that the user has given, with what `init` chooses itself.
        go_on: The command that continues the run, without the flags of its settings; empty if only workers continue it.
    """
    from archipelago.islands.models.registry import learning_rate

    changed = differing(found.config, config)
    sizes = [found.config.model.size, config.model.size]
    if sizes[0] != sizes[1] and changed.get("inner.learning_rate") == tuple(map(learning_rate, sizes)):
        del changed["inner.learning_rate"]  # The user has not given it: `init` chooses it by the model's size.
    if not changed:
        return
    remedy = "Islands and mergers take the run's own settings: start them as usual."
    if go_on:
        remedy = f"To go on with the run's own settings: `{f'{go_on} {own_flags(found)}'.strip()}`."
    if STEPS in changed:
        remedy += f" To change the length of the run: `archipelago steer {STEPS}=N --run {found.run}`."
    shown = {key: (setting_text(theirs), setting_text(ours)) for key, (theirs, ours) in changed.items()}
    said = "; ".join(f"{key} is {theirs} (given: {ours})" for key, (theirs, ours) in shown.items())
    raise MismatchError(
        ", ".join(shown),
        ", ".join(theirs for theirs, _ in shown.values()),
        ", ".join(ours for _, ours in shown.values()),
        f"{remedy} For other settings, name another run with --run.",
        code="config.other-settings",
        what=f"the run {found.run!r} has other settings: {said}",
    )


def own_flags(found: Manifest) -> str:
    """Return the flags that give the run's own settings, without the learning rate if `init` has chosen it.

    The vocabulary stays, because the user may have chosen a larger one than that of the tokenizer.
    """
    from archipelago.islands.models.registry import learning_rate

    config = found.config
    if config.inner.learning_rate == learning_rate(config.model.size):
        config = replace(config, inner=replace(config.inner, learning_rate=None))
    return shlex.join(flags(config))
