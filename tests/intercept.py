"""A connection whose calls a test can fail, repeat, delay, count or record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

from archipelago.broker.commits import Image, MergerClient
from archipelago.broker.errors import BrokerError, UnreachableError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Snapshot
from archipelago.broker.transport import IslandClient, ReaderClient, Transport


class _Client:
    """One client of a connection, whose methods go through `intercept`."""

    def __init__(self, inner: Any, intercept: Callable[..., Any]) -> None:
        self._inner, self._intercept = inner, intercept

    def __getattr__(self, name: str) -> Any:
        call = partial(self._intercept, name, getattr(self._inner, name))
        setattr(self, name, call)  # The next access finds this attribute directly.
        return call


class Intercepted:
    """A connection that passes each call to `intercept`. Subclasses override this method."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.run = inner.run
        self.reader = cast(ReaderClient, _Client(inner.reader, self.intercept))
        self.island = cast(IslandClient, _Client(inner.island, self.intercept))
        self.merger = cast(MergerClient, _Client(inner.merger, self.intercept))

    def intercept(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result of one call. `name` is the name of the method."""
        return method(*args, **kwargs)

    def create(self, manifest: Manifest, snapshots: Sequence[tuple[Snapshot, bytes]]) -> None:
        self.intercept("create", self.inner.create, manifest, snapshots)

    def restore(self, image: Image) -> None:
        self.intercept("restore", self.inner.restore, image)

    def close(self) -> None:
        self.intercept("close", self.inner.close)


#: Stands for the number of a call: every call of the method fails.
EVERY = -1


class Faulty(Intercepted):
    """A connection some of whose calls fail. It never waits for contributions, because no other thread sends any.

    Args:
        inner: The connection.
        faults: The calls that fail: the method, the number of the call from 0, and `before` or `after` its work.
        error: The error that these calls raise.
        before: Called with the method and the arguments before each call.

    Attributes:
        broken: How many calls have failed.
    """

    def __init__(
        self,
        inner: Transport,
        faults: Iterable[tuple[str, int, str]] = (),
        error: BrokerError | None = None,
        before: Callable[..., object] = lambda name, *args: None,
    ) -> None:
        super().__init__(inner)
        self.broken = 0
        self._faults = {(name, ordinal): when for name, ordinal, when in faults}
        self._error = error or UnreachableError("the connection broke")
        self._before, self._calls = before, Counter[str]()

    def intercept(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._before(name, *args)
        if name in ("updates", "look"):
            args = (0.0, *args[1:])
        when = self._faults.get((name, self._calls[name])) or self._faults.get((name, EVERY))
        self._calls[name] += 1
        done = None if when == "before" else method(*args, **kwargs)
        if when is not None:
            self.broken += 1
            raise self._error
        return done
