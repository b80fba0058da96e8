"""Messages between the processes of an island, what they prove to each other, and how they end when one is lost.

A message is a bounded msgpack header and the bytes of arrays.
"""

from __future__ import annotations

import hmac
import math
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgpack
import numpy as np
from annotated_types import Ge, Lt, MaxLen
from numpy.typing import NDArray
from pydantic import Strict, TypeAdapter

from archipelago.broker.errors import ConfigError, WireError
from archipelago.broker.observe import logs
from archipelago.broker.process import OUTAGE, USER_ERROR

#: A header is at most this long. It has a few numbers, and the dtype and shape of each array.
HEADER_MAX = 1 << 20
#: An array is sent in pieces of this size. The time limit of a socket holds for each call, however much it sends.
PIECE_BYTES = 4 << 20
#: A process that has just connected says who it is within this time.
HELLO_SECONDS = 10.0
#: A process that has been silent for this long is lost. One that ends closes its connection, which is noticed at once.
SILENCE_SECONDS = 15.0
BEAT_SECONDS = 1.0
#: How often a process looks for a signal, and for processes that are not there yet.
POLL_SECONDS = 0.2
#: The exit status of all processes of an island that has lost one.
LOST_STATUS = OUTAGE

#: A value of a message. Texts are short.
Value = int | float | str | bool | None
#: An array of any other dtype is refused, above all one of Python objects. JAX adds the narrow floats to numpy.
_Dtype = Literal[
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2",
]  # fmt: skip
_Shape = Annotated[list[Annotated[int, Strict(), Ge(0), Lt(1 << 48)]], MaxLen(16)]
_HEADER = TypeAdapter(
    tuple[
        Annotated[str, MaxLen(40)],
        list[int | float | Annotated[str, MaxLen(1 << 19)] | bool | None],
        list[tuple[_Dtype, _Shape]],
    ]
)


@dataclass(frozen=True)
class Frame:
    """One message.

    Attributes:
        kind: What it asks for.
        values: Numbers and texts.
        arrays: Arrays, in the order that both sides know.
    """

    kind: str
    values: tuple[Value, ...] = ()
    arrays: tuple[NDArray[Any], ...] = ()

    def number(self, index: int) -> int:
        """Return a value that must be a whole number. Raises WireError (`hosts.message`)."""
        value = self.values[index] if index < len(self.values) else None
        if not isinstance(value, int) or isinstance(value, bool):
            raise unfit(f"{self.kind} has no number at {index}")
        return value

    def text(self, index: int) -> str:
        """Return a value that must be a text. Raises WireError (`hosts.message`)."""
        value = self.values[index] if index < len(self.values) else None
        if not isinstance(value, str):
            raise unfit(f"{self.kind} has no text at {index}")
        return value


def unfit(fault: str) -> WireError:
    """Return the error of a message that cannot be used."""
    return WireError(f"a message between the hosts of this island cannot be used: {fault}", code="hosts.message")


class Connection:
    """A connection to another process of the island. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, frame: Frame) -> None:
        """Send a message. Raises OSError."""
        arrays = [np.ascontiguousarray(array) for array in frame.arrays]
        about = [[array.dtype.name, list(np.shape(array))] for array in frame.arrays]
        header = msgpack.packb([frame.kind, list(frame.values), about])
        with self._sending:
            self._socket.sendall(len(header).to_bytes(4) + header)
            for array in arrays:
                content = array.reshape(-1).view(np.uint8).data if array.size else b""
                for start in range(0, len(content), PIECE_BYTES):
                    self._socket.sendall(content[start : start + PIECE_BYTES])

    def receive(self, seconds: float, most: Callable[[], int] = int) -> Frame:
        """Return the next message.

        Args:
            seconds: The longest silence.
            most: Returns the largest number of bytes of all its arrays. By default there are none.

        Raises:
            OSError: The connection is lost, or silent for too long (TimeoutError).
            WireError: The message is damaged or too large (`hosts.message`).
        """
        self._socket.settimeout(seconds)
        size = int.from_bytes(self._exactly(4))
        if not 0 < size <= HEADER_MAX:
            raise unfit(f"its header has {size:,} bytes")
        kind, values, shapes = _header(bytes(self._exactly(size)))
        arrays, left = [], most()
        for dtype, shape in shapes:
            bytes_ = math.prod(shape) * dtype.itemsize
            if bytes_ > left:
                raise unfit(f"{kind!r} is larger than {most():,} bytes")
            left -= bytes_
            arrays.append(np.frombuffer(self._exactly(bytes_), dtype).reshape(shape))
        return Frame(kind, values, tuple(arrays))

    def _exactly(self, size: int) -> bytearray:
        buffer = bytearray(size)
        view = memoryview(buffer)
        while view:
            got = self._socket.recv_into(view)
            if not got:
                raise ConnectionResetError("the other side has closed the connection")
            view = view[got:]
        return buffer

    def close(self) -> None:
        """Close the connection. A thread that receives gets an error."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _header(data: bytes) -> tuple[str, tuple[Value, ...], list[tuple[np.dtype[Any], tuple[int, ...]]]]:
    try:
        unpacked = msgpack.unpackb(data, strict_map_key=True, max_map_len=0, max_bin_len=0, max_ext_len=0)
        kind, values, arrays = _HEADER.validate_python(unpacked)
        return kind, tuple(values), [(np.dtype(name), tuple(shape)) for name, shape in arrays]
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError) as error:
        # `np.dtype` raises TypeError for a narrow float before JAX was loaded.
        raise unfit(f"its header is no header ({type(error).__name__})") from None


# -- proofs ------------------------------------------------------------------------------------------------------------


def proof(key: bytes, *parts: str) -> str:
    """Return what only a process can compute that knows the key."""
    return hmac.new(key, "\0".join(parts).encode(), "sha256").hexdigest()


def require_proof(found: str, key: bytes, address: str, *parts: str) -> None:
    """Raise ConfigError (`hosts.stranger`) for another proof, after a time that tells nothing about the key."""
    if not hmac.compare_digest(found.encode(), proof(key, *parts).encode()):
        raise ConfigError(
            f"this process and what answers at {address} do not know the same Redis",
            "Check --coordinator, and give all hosts of an island the same Redis URL or join file.",
            code="hosts.stranger",
        )


# -- a lost process ----------------------------------------------------------------------------------------------------


def in_words(error: Exception) -> str:
    """Return the reason of a lost connection."""
    if isinstance(error, TimeoutError):
        return f"silent for {SILENCE_SECONDS:g} s"
    if isinstance(error, OSError):
        return (error.strerror or str(error) or type(error).__name__).lower()
    return str(error)


def say_lost(sentence: str, status: int) -> None:
    """Say which process was lost, or why it has ended."""
    restart = ". All its processes end with status 75. Start all of them again." if status == LOST_STATUS else ""
    logs.say_error(sentence + restart, "hosts.lost")


def exit_now(status: int) -> None:
    """End this process, although its main thread may wait for another host."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status if status else USER_ERROR)
