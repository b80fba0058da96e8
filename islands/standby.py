"""A standby: a process that has loaded and compiled everything an island needs, and waits for the island's name.

A new island takes seconds to load; a standby joins within a moment. The supervisor that starts it
reads `ready` from its standard output and later writes one line of JSON, an `Assignment`, to its standard input. No
other island knows of a standby before that. A standby ends when its input ends. Supervisors import this module, so it
does not import JAX.
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
#: The longest time in seconds until a signal is noticed.
POLL_SECONDS = 0.25


@dataclass(frozen=True)
class Assignment:
    """The island that a standby becomes.

    Attributes:
        arguments: The arguments of `archipelago island`.
        environment: Changes of the environment.
        log: The file that replaces standard output and error; empty keeps them.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    log: str = ""

    def line(self) -> bytes:
        """Return the line that the standby reads."""
        fields = {"arguments": self.arguments, "environment": dict(self.environment), "log": self.log}
        return json.dumps(fields).encode() + b"\n"

    def take(self) -> None:
        """Give this process the environment and the log. Raises ConfigError if the log cannot be written."""
        os.environ.update(self.environment)
        if not self.log:
            return
        try:
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ConfigError(
                f"Cannot write the log {self.log} ({error.strerror})", "Name another log.", code="standby.log"
            ) from None
        for standard in (1, 2):
            os.dup2(log, standard)
        os.close(log)


def assignment(line: bytes) -> Assignment:
    """Return the assignment in a line. Raises ConfigError for any other line."""
    try:
        fields: Any = json.loads(line)
        arguments, environment, log = fields["arguments"], fields.get("environment", {}), fields.get("log", "")
        texts = [*arguments, *environment.keys(), *environment.values(), log]
        are_names = all(name and "=" not in name for name in environment)
        if isinstance(arguments, list) and are_names and not any(b"\0" in os.fsencode(text) for text in texts):
            return Assignment(tuple(arguments), environment, log)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise ConfigError(
        f"A standby cannot read the line {line[:80].decode(errors='replace').strip()!r}",
        'Write one line such as {"arguments": ["--name", "oslo"], "environment": {}, "log": "oslo.log"}.',
        code="standby.assignment",
    )


def await_assignment(standard_input: IO[bytes], stopped: Callable[[], bool]) -> Assignment | None:
    """Wait for the first line.

    Args:
        standard_input: Where the line arrives.
        stopped: Whether a signal has arrived.

    Returns:
        The assignment, or None if a signal arrived or the input ended first.

    Raises:
        ConfigError: The line is no assignment.
    """
    received, number = b"", standard_input.fileno()
    while not stopped():
        if not select.select([number], [], [], POLL_SECONDS)[0]:
            continue
        more = os.read(number, 1 << 16)
        received += more
        if b"\n" in received or len(received) > LINE_MAX:
            return assignment(received.partition(b"\n")[0])
        if not more:
            return None
    return None
