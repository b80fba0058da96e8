"""Messages between the processes of an island: a bounded msgpack header, and the bytes of arrays."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from archipelago.broker.errors import WireError

#: A header is at most this long. It has a few numbers, and the dtype and shape of each array.
HEADER_MAX = 1 << 20
DIMENSIONS_MAX = 16
#: An array is sent in pieces of this size. The time limit of a socket holds for each call, however much it sends.
PIECE_BYTES = 4 << 20
#: An array of any other dtype is refused, above all one of Python objects. JAX adds the narrow floats to numpy.
DTYPES = frozenset(
    [
        "bool",
        *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
        *("float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    ]
)
#: A value of a message. Texts are short.
Value = int | float | str | bool | None
TEXT_MAX = 1 << 19


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

    def receive(self, most: Callable[[], int], seconds: float | None = None) -> Frame:
        """Return the next message.

        Args:
            most: Returns the largest number of bytes of all its arrays.
            seconds: The longest silence; None for no limit.

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
                raise unfit(f"{kind[:40]!r} is larger than {most():,} bytes")
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
        kind, values, about = msgpack.unpackb(data, strict_map_key=True, max_map_len=0, max_bin_len=0, max_ext_len=0)
        shapes = [(name, tuple(shape)) for name, shape in about]
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise unfit(f"its header is no header ({type(error).__name__})") from None
    if not isinstance(kind, str) or not isinstance(values, list):
        raise unfit("its header has no kind")
    for value in values:
        if not isinstance(value, Value) or (isinstance(value, str) and len(value) > TEXT_MAX):
            raise unfit(f"a value of {kind[:40]!r} is of no known type")
    found = []
    for name, shape in shapes:
        if not isinstance(name, str) or name not in DTYPES or len(shape) > DIMENSIONS_MAX:
            raise unfit(f"an array of {kind[:40]!r} has the dtype {name!r:.40}")
        if not all(type(size) is int and 0 <= size < 1 << 48 for size in shape):
            raise unfit(f"an array of {kind[:40]!r} has no shape")
        try:
            found.append((np.dtype(name), shape))
        except TypeError:
            raise unfit(f"an array of {kind[:40]!r} has the dtype {name!r:.40}, before JAX was loaded") from None
    return kind, tuple(values), found
