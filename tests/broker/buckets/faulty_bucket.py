"""A bucket in memory whose requests can fail: the address faulty://NAME."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

#: Called with the request (`put`, `get`, `list`, `delete`) and the path; may raise, or return how many bytes arrive.
Fault = Callable[[str, str], int | None]


def no_fault(request: str, path: str) -> None:
    """Let the request succeed."""


class FaultyFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """A filesystem in memory that asks `fault` before each request."""

    protocol = "faulty"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    fault: ClassVar[Fault] = staticmethod(no_fault)
    #: All requests, as (request, path).
    requests: ClassVar[list[tuple[str, str]]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("faulty://").strip("/")

    def _ask(self, request: str, path: str) -> int | None:
        self.requests.append((request, path))
        return type(self).fault(request, path)

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        """Write the file, or as many bytes as the fault says."""
        most = self._ask("put", rpath)
        with open(lpath, "rb") as file:  # noqa: PTH123 - as in fsspec
            self.pipe_file(rpath, file.read(-1 if most is None else most))

    def get_file(self, rpath: str, lpath: str, **_: Any) -> None:
        """Read the file."""
        self._ask("get", rpath)
        super().get_file(rpath, lpath)

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> bytes:
        """Read the file."""
        self._ask("get", path)
        return bytes(super().cat_file(path, *args, **kwargs))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """List the folder."""
        self._ask("list", path)
        return list(super().ls(path, detail, **kwargs))

    def rm(self, path: str, *args: Any, **kwargs: Any) -> None:
        """Delete the file or the folder."""
        self._ask("delete", path)
        super().rm(path, *args, **kwargs)


fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)


def reset() -> None:
    """Empty the bucket and end its faults."""
    FaultyFileSystem.store.clear()
    FaultyFileSystem.pseudo_dirs[:] = [""]
    FaultyFileSystem.requests.clear()
    FaultyFileSystem.fault = staticmethod(no_fault)
