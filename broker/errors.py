"""Every error that a user can meet, in one tree. Each says what happened, why, and what to do next."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import ValidationError


class ArchipelagoError(Exception):
    """The base of all errors that a user can meet.

    Args:
        what: One sentence that says what happened.
        remedy: What the user can do next.
        code: A stable, short name of this error, such as `config.unknown-key`. Programs and tests compare codes,
            never sentences. The default is the code of the class.
    """

    code = "error"

    def __init__(self, what: str, remedy: str = "", *, code: str = "") -> None:
        self.what = what
        self.remedy = remedy
        self.code = code or type(self).code
        super().__init__(f"{what.rstrip('.')}. {remedy}" if remedy else what)


class ConfigError(ArchipelagoError):
    """A setting is out of range, a key is unknown, or a config file cannot be read."""

    code = "config"


class MismatchError(ConfigError):
    """A worker and its run disagree about `subject`. The error holds both values."""

    code = "config.mismatch"

    def __init__(
        self, subject: str, run_value: object, worker_value: object, remedy: str, *, code: str = "", what: str = ""
    ) -> None:
        self.subject, self.run_value, self.worker_value = subject, run_value, worker_value
        super().__init__(
            what or f"the run's {subject} is {run_value}, this worker's is {worker_value}", remedy, code=code
        )


class DataError(ArchipelagoError):
    """A corpus is missing, too small or damaged."""

    code = "data"


class BrokerError(ArchipelagoError):
    """An error of the Redis server of a run."""

    code = "broker"


class WithdrawnError(BrokerError):
    """A contribution left its stream before the commit that merges it. Its island may have trimmed the stream."""

    code = "broker.withdrawn"

    def __init__(self, island: str) -> None:
        self.island = island
        super().__init__(
            f"a contribution of {island} was deleted before its round was committed",
            f"The merger loads the run again. If this goes on, it refuses what {island} sends.",
        )


class BadUrlError(BrokerError):
    """The address cannot be read as a Redis URL."""

    code = "broker.bad-url"


class UnreachableError(BrokerError):
    """The server does not answer, or the connection broke. Workers retry; commands give up."""

    code = "broker.unreachable"


class UnknownRunError(BrokerError):
    """That Redis has no run of that name."""

    code = "broker.unknown-run"


class RunExistsError(BrokerError):
    """That Redis already has a run of that name."""

    code = "broker.run-exists"


class FencedError(BrokerError):
    """Redis refused a write of this merger, because another one holds the lease with a newer epoch."""

    code = "broker.fenced"


#: Codes of refusals that end by themselves or by an operator's act, without a change of the run.
OUTAGES = frozenset(f"broker.refused-{what}" for what in ("append", "disk", "memory", "replica", "replicas"))


def is_outage(error: ArchipelagoError) -> bool:
    """Return whether the server is away or refuses all writes, so that a merger can only wait."""
    return isinstance(error, UnreachableError) or error.code in OUTAGES


class HostError(ArchipelagoError):
    """Another process of an island over several hosts is away or lost. All of them end, and can be started again."""

    code = "hosts"


class DivergedError(ArchipelagoError):
    """An island's loss is NaN or infinite. Its contributions are refused, so they cannot harm the run."""

    code = "diverged"


class WireError(ArchipelagoError):
    """Bytes from outside do not decode to the shapes of the manifest. `reason` goes into the refusal."""

    code = "wire"

    @property
    def reason(self) -> str:
        """The reason of the refusal, which the island and the operator read."""
        return self.what


def require_number(flag: str, value: float, remedy: str, least: float = 0.0, most: float = math.inf) -> None:
    """Raise ConfigError unless the number that a user gave for a flag is finite and from `least` to `most`."""
    if not least <= value <= most or math.isinf(value):
        raise ConfigError(f"{flag} cannot be {value}", remedy, code="config.value")


def few_of(names: Sequence[str], most: int = 8) -> str:
    """Return the first of these names for a message, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more or "none"


def fault_in(error: Exception) -> str:
    """Return what is wrong with data from outside, and where. Of what pydantic refused, it quotes nothing."""
    if not isinstance(error, ValidationError):
        return f"{error!r:.300}"
    fault = error.errors()[0]
    where = ".".join(map(str, fault["loc"]))
    return (f"{where}: " if where else "") + fault["msg"][:1].lower() + fault["msg"][1:]
