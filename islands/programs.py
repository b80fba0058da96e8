"""Compiled programs that outlive their process: an island that is started again neither traces, lowers nor compiles.

JAX's own cache finds an executable by the lowered program, so who asks it has built the model, traced and lowered. Here
a program is found by what decides it: our sources, the libraries' versions, the machine, the flags, the settings, the
shapes. Where anything is not as expected, it is made as ever. On a CPU only: there executables were seen to come back
to the same bits; elsewhere JAX's cache does what it can.

A file is one zstd frame with a checksum, of what the compiler serialised, in the folder of JAX's cache and to be
trusted as that is.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import numpy as np
import zstandard
from jaxlib import xla_client

FILES_MAX = 512
FILE_BYTES_MAX = 1 << 28
ARGUMENT_BYTES_MAX = 1 << 30
"""A program on more than this is not kept: it is tried on copies first, and tracing is little beside its steps."""
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
CPU_INFO = Path("/proc/cpuinfo")
_OF_A_CPU = ("model name", "flags", "Features", "CPU implementer", "CPU part")
_NOT_KEPT = b""
"""stands for a program that did not come back as it was: it is not tried again"""

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
Arrays = list[jax.Array]


class Programs:
    """What `folder` keeps for one user of one machine; None keeps nothing."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder if folder is not None and jax.default_backend() == "cpu" and _cpu() else None
        self._functions: dict[str, Any] = {}

    def keep(
        self,
        make: Callable[[], Callable[P, T]],
        made_of: object,
        outcome: Callable[P, object],
        donate: tuple[int, ...] = (),
    ) -> Callable[P, T]:
        """The jitted function of positional arguments that `make` gives; made only where it was not kept.

        `made_of` says in its repr what decides it, beside our sources and the shapes. `outcome` takes its arguments to
        a tree like its result's. `donate`: the arguments that it donates. Arguments and results are trees of arrays.
        Who asks twice gets the same function, with what it has loaded.
        """
        if self.folder is None:
            return make()
        name = repr((made_of, donate))
        if name not in self._functions:
            self._functions[name] = _Kept(self, make, repr(made_of), outcome, donate)
        function: Callable[P, T] = self._functions[name]
        return function

    def noted(self, made_of: object, make: Callable[[], Any]) -> Any:
        """What `make` gives, which must be JSON and depend on our sources and `made_of` alone; made once."""
        name = f"{self.digest('note', repr(made_of))}.json"
        if (found := self.read(name)) is not None:
            return json.loads(found)
        made = make()
        self.write(name, json.dumps(made).encode())
        return made

    def digest(self, *made_of: str) -> str:
        """Names what these decide, here and now."""
        return hashlib.sha256("\n".join([self._environment, *made_of]).encode()).hexdigest()[:32]

    def read(self, name: str) -> bytes | None:
        """A file that is there and whole."""
        if self.folder is None:
            return None
        path = self.folder / name
        try:
            frame = path.read_bytes()
            data = zstandard.ZstdDecompressor().decompress(frame, max_output_size=FILE_BYTES_MAX)
            os.utime(path)  # the oldest go first
        except (OSError, zstandard.ZstdError):
            return None
        return data

    def write(self, name: str, data: bytes) -> bool:
        """Keeps a file, whole or not at all; drops the oldest of too many. Whether the disk took it."""
        if self.folder is None or len(data) > FILE_BYTES_MAX:
            return False
        frame = zstandard.ZstdCompressor(level=3, write_checksum=True).compress(data)
        stage = self.folder / f".{name}.{secrets.token_hex(4)}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                stage.write_bytes(frame)
                stage.replace(self.folder / name)
            finally:
                stage.unlink(missing_ok=True)
            files = sorted(self.folder.iterdir(), key=lambda path: path.stat().st_mtime)
            for path in files[:-FILES_MAX]:
                path.unlink(missing_ok=True)
        except OSError as error:
            log.debug("%s is not kept: %s", name, error)
            return False
        return True

    @cached_property
    def takes(self) -> bool:
        """Whether anything can be kept: to compile in vain at each start would be worse than to trace."""
        return self.write("takes", b"")

    @cached_property
    def _environment(self) -> str:
        """All that decides what a function compiles to, beside itself."""
        device = jax.devices()[0]
        values: dict[str, object] = jax.config.values
        return json.dumps(
            [
                [version(package) for package in PACKAGES],
                [device.platform, device.client.platform_version, device.device_kind, _cpu()],
                [os.cpu_count(), os.environ.get("NPROC"), os.environ.get("XLA_FLAGS")],
                {name: repr(value) for name, value in sorted(values.items()) if "cache" not in name},
                _sources(),
            ]
        )


class _Kept(Generic[P, T]):
    """One function; its executables by the arguments' trees, shapes and types."""

    def __init__(
        self,
        programs: Programs,
        make: Callable[[], Callable[P, T]],
        made_of: str,
        outcome: Callable[P, object],
        donate: tuple[int, ...],
    ) -> None:
        self._programs, self._make, self._made_of = programs, make, made_of
        self._outcome, self._donate = outcome, donate
        self._executables: dict[Any, _Executable | None] = {}

    @cached_property
    def _made(self) -> Callable[P, T]:
        return self._make()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        leaves, tree = jax.tree.flatten(args)
        key = (tree, tuple([(leaf.shape, leaf.dtype) for leaf in leaves]))
        if key not in self._executables:
            self._executables[key] = self._found(leaves, key, *args, **kwargs)
        executable = self._executables[key]
        if executable is None:
            return self._made(*args, **kwargs)
        result: T = executable(leaves)
        return result

    def _found(self, leaves: Arrays, key: Any, *args: P.args, **kwargs: P.kwargs) -> _Executable | None:
        programs = self._programs
        outcome = jax.tree.structure(self._outcome(*args, **kwargs))
        name = f"{programs.digest(self._made_of, str(key), str(outcome), str(self._donate))}.program"
        found = programs.read(name)
        too_much = sum(leaf.nbytes for leaf in leaves) > ARGUMENT_BYTES_MAX
        if found == _NOT_KEPT or too_much or (found is None and not programs.takes):
            return None
        try:
            if found is None:
                return self._new(name, outcome, leaves, args)
            loaded = _Executable(found, outcome)
            jax.block_until_ready(loaded(copied(leaves)))  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001 - whatever a compiler says, there is the function itself
            log.debug("a program is not kept: %r", error)
            programs.write(name, _NOT_KEPT)
            return None
        return loaded

    def _new(self, name: str, outcome: Any, leaves: Arrays, args: Any) -> _Executable:
        """Compiles it, and keeps it once what will be loaded has given the same bits for these arguments."""
        plain = inspect.unwrap(self._made)

        def function(*args: Any) -> Any:
            return plain(*args)

        # By a name that JAX's cache does not know: what was loaded from there cannot be serialised once more.
        function.__name__ = f"kept_{secrets.token_hex(8)}"
        # Unused arguments stay: the executable is called with all of them.
        compiled = jax.jit(function, donate_argnums=self._donate, keep_unused=True).lower(*args).compile()
        executable = compiled.runtime_executable()
        if executable is None or compiled.out_tree != outcome:
            raise TypeError(f"{compiled.out_tree} is not {outcome}")
        serialised = executable.client.serialize_executable(executable)
        loaded = _Executable(serialised, outcome)
        both = compiled(*copied(args)), loaded(copied(leaves))
        if not all(map(_are_same, *map(jax.tree.leaves, both))):
            raise ArithmeticError("it gives other numbers")
        self._programs.write(name, serialised)
        return loaded


class _Executable:
    """What was serialised, loaded on the first device."""

    def __init__(self, serialised: bytes, outcome: Any) -> None:
        device = jax.devices()[0]
        devices = xla_client.DeviceList((device,))
        self._loaded = device.client.deserialize_executable(serialised, executable_devices=devices)
        self._outcome = outcome

    def __call__(self, leaves: Sequence[Any]) -> Any:
        arrays = [jax.device_put(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf for leaf in leaves]
        results = self._loaded.execute_sharded(arrays).disassemble_into_single_device_arrays()
        return jax.tree.unflatten(self._outcome, [result[0] for result in results])


def _are_same(one: jax.Array, other: jax.Array) -> bool:
    a, b = np.asarray(one), np.asarray(other)
    return (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())


def copied(tree: Any) -> Any:
    """A copy on the device, of arrays there or on the host, which inner steps may donate. Compiles nothing."""
    # `may_alias=False` alone is not enough: what is made of the host's memory may go on reading there, on a CPU.
    own = jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, tree)
    return jax.device_put(own, may_alias=False)


def _cpu() -> list[str]:
    """What a compiler knows of this machine's processor; nothing where the system does not say."""
    try:
        first = CPU_INFO.read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return []
    return [line for line in first.splitlines() if line.startswith(_OF_A_CPU)]


def _sources() -> str:
    """A digest of all that is written in this package and the one below it."""
    packages = Path(__file__).parent, Path(__file__).parent.parent / "broker"
    files = sorted(path for package in packages for path in package.rglob("*.py"))
    return hashlib.sha256(b"".join(path.name.encode() + b"\0" + path.read_bytes() for path in files)).hexdigest()
