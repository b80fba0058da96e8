"""Every error that a user can meet, in one tree. Each says what happened, why, and what to do next.

ArchipelagoError
├── ConfigError         a setting out of range, an unknown key, a file that is not there
│   └── MismatchError   a worker and its run disagree; holds both values
├── DataError           a corpus that is missing, too small or damaged
├── BrokerError         the Redis between the islands
│   ├── BadUrlError     an address that cannot be read
│   ├── UnreachableError  nobody answers there; `retryable` work goes on without it
│   ├── ServerTooOldError
│   ├── UnknownRunError
│   ├── RunExistsError
│   └── FencedError     a newer merger holds the lease; the older one must leave
├── DivergedError       an island whose loss is no number any more; the run goes on without it
└── WireError           bytes from outside that do not decode; refused, never fatal
"""

from __future__ import annotations


class ArchipelagoError(Exception):
    """Base of all. `what` is the sentence that says what happened; `remedy` is the next step for the user."""

    def __init__(self, what: str, remedy: str = "") -> None:
        self.what = what
        self.remedy = remedy
        super().__init__(f"{what.rstrip('.')}. {remedy}" if remedy else what)


class ConfigError(ArchipelagoError):
    """A setting is out of range, a key is unknown, or a config file cannot be read."""


class MismatchError(ConfigError):
    """A worker and its run disagree about `subject`; `theirs` is the run's value and `ours` the worker's."""

    def __init__(self, subject: str, theirs: object, ours: object, remedy: str) -> None:
        self.subject, self.theirs, self.ours = subject, theirs, ours
        super().__init__(f"the run's {subject} is {theirs}, this worker's is {ours}", remedy)


class DataError(ArchipelagoError):
    """A corpus is missing, too small or damaged."""


class BrokerError(ArchipelagoError):
    """Something about the Redis between the islands."""


class BadUrlError(BrokerError):
    """The address cannot be read as a Redis URL."""


class UnreachableError(BrokerError):
    """Nobody answers at the address, or the connection broke. Workers keep trying; commands give up."""


class ServerTooOldError(BrokerError):
    """The server lacks commands that the streams need (Redis 6.2 or Valkey 7.2 have them)."""


class UnknownRunError(BrokerError):
    """No run of that name lives in that Redis."""


class RunExistsError(BrokerError):
    """A run of that name lives there already."""


class FencedError(BrokerError):
    """Redis refused a write of this merger, because another one holds the lease with a newer epoch."""


class DivergedError(ArchipelagoError):
    """An island's loss is no number any more. Its contributions are refused, so the run is none the worse."""


class WireError(ArchipelagoError):
    """Bytes from outside do not decode to what the manifest says. `reason` goes into the refusal."""

    @property
    def reason(self) -> str:
        """The words that the island and the operator read."""
        return self.what
