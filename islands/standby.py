"""A standby: everything of an island but its name, loaded and compiled. It joins once it is told who it is.

An island that is started anew takes seconds to load what it runs; a standby takes a moment. Whoever starts it (its
launcher) reads `ready` from its standard output, and then writes one line of JSON to its standard input, an
`Assignment`. Until then no other island hears of it; when its input ends instead, so does the standby. Nothing here
loads JAX before that is needed: launchers import this.
"""

from __future__ import annotations

import json
import os
import select
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from archipelago.broker.errors import ConfigError

READY = b"ready\n"
LINE_MAX = 1 << 20
POLL_SECONDS = 0.25
"""how soon a signal is noticed"""


@dataclass(frozen=True)
class Assignment:
    """Which island a standby becomes."""

    arguments: tuple[str, ...]
    """of `archipelago island`"""
    environment: Mapping[str, str] = field(default_factory=dict)
    """what changes in it"""
    log: str = ""
    """the file that standard output and error go to from then on; empty leaves them"""

    def line(self) -> bytes:
        """As its standby reads it."""
        said = {"arguments": self.arguments, "environment": dict(self.environment), "log": self.log}
        return json.dumps(said).encode() + b"\n"

    def take(self) -> None:
        """Gives this process the environment, and the log. Raises ConfigError for one that cannot be written."""
        os.environ.update(self.environment)
        if not self.log:
            return
        try:
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ConfigError(f"{self.log} cannot be written ({error.strerror})", "Name another log.") from None
        for standard in (1, 2):
            os.dup2(log, standard)
        os.close(log)


def assignment(line: bytes) -> Assignment:
    """What a launcher wrote. Raises ConfigError for anything else."""
    try:
        said: Any = json.loads(line)
        arguments, environment, log = said["arguments"], said.get("environment", {}), said.get("log", "")
        texts = [*arguments, *environment.keys(), *environment.values(), log]
        named = all(name and "=" not in name for name in environment)
        if isinstance(arguments, list) and named and not any(b"\0" in os.fsencode(text) for text in texts):
            return Assignment(tuple(arguments), environment, log)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise ConfigError(
        f"a standby cannot become {line[:80].decode(errors='replace').strip()!r}",
        'It reads one line such as {"arguments": ["--name", "oslo"], "environment": {}, "log": "oslo.log"}.',
    )


def await_assignment(standard_input: IO[bytes], stopped: Callable[[], bool]) -> Assignment | None:
    """The first line, as soon as it is whole; None once that cannot come any more. May raise ConfigError."""
    held, number = b"", standard_input.fileno()
    while not stopped():
        if not select.select([number], [], [], POLL_SECONDS)[0]:
            continue
        more = os.read(number, 1 << 16)
        held += more
        if b"\n" in held or len(held) > LINE_MAX:
            return assignment(held.partition(b"\n")[0])
        if not more:
            return None
    return None
