"""A user's training script as the islands of a storm."""

from __future__ import annotations

import os
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from archipelago.broker.errors import ConfigError
from archipelago.ops.chaos.report.record import Turn, step_seconds

#: Stands for the name of the island in the words of a script.
ISLAND_WORD = "{island}"
#: A measured step duration that exceeds the minimum by less than this share is the minimum.
TIMER_SHARE = 0.05


@dataclass(frozen=True)
class Script:
    """A script and its arguments.

    Attributes:
        path: The script.
        arguments: Its arguments. `{island}` in one of them stands for the name of the island.
    """

    path: Path
    arguments: tuple[str, ...]

    def argv(self, island: str) -> list[str]:
        """Return the arguments for the Python interpreter."""
        return [str(self.path.absolute()), *(word.replace(ISLAND_WORD, island) for word in self.arguments)]

    def environment(self) -> dict[str, str]:
        """Return what the script needs to import the modules beside it, as when it is started by hand."""
        paths = [str(self.path.absolute().parent), os.environ.get("PYTHONPATH", "")]
        return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def parsed(text: str) -> Script | None:
    """Return the script that `--script` names; None for an empty text.

    Args:
        text: The script and its arguments, as in a shell. Without `{island}`, the name of the island is added at the
            end.

    Raises:
        ConfigError: There is no such script (`chaos.script`).
    """
    if not text:
        return None
    try:
        path, *arguments = shlex.split(text) or [""]
    except ValueError as error:
        raise ConfigError(f"--script {text!r}: {error}", "Close the quotation.", code="chaos.script") from None
    if not Path(path).is_file():
        raise ConfigError(
            f"there is no script {path!r}",
            'Give a Python file and its arguments, such as --script "train.py --name {island}".',
            code="chaos.script",
        )
    if not any(ISLAND_WORD in word for word in arguments):
        arguments.append(ISLAND_WORD)
    return Script(Path(path), tuple(arguments))


def own_step_seconds(asked: Mapping[str, float], turns: Mapping[str, Sequence[Turn]]) -> dict[str, float]:
    """Return the step duration of each island of a script: the minimum that was asked for, or what the script takes.

    Args:
        asked: The minimum duration by island; 0 for none.
        turns: The turn logs by island.
    """
    measured = [seconds for each in turns.values() for seconds in step_seconds(each)]
    usual, least = statistics.median(measured or [0.0]), min(asked.values())
    if usual <= least * (1 + TIMER_SHARE):
        return dict(asked)
    return {island: max(seconds, usual) for island, seconds in asked.items()}
