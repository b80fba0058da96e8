"""A connection whose calls a test can fail, repeat, delay, count or record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Snapshot
from archipelago.broker.transport import Image, IslandClient, MergerClient, ReaderClient, Transport


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

    def mend_manifest(self, manifest: Manifest) -> bool:
        return bool(self.intercept("mend_manifest", self.inner.mend_manifest, manifest))

    def close(self) -> None:
        self.intercept("close", self.inner.close)
