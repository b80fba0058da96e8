"""A coverage-guided fuzz test of the decoders: `make fuzz`, or `make fuzz ARGS=-max_total_time=600`.

For every input a decoder must return a valid value or raise an error that its callers expect. The address space is
limited, so a decompression bomb fails. Atheris (libFuzzer) reports every other outcome, and writes the input to a file.
Pass the name of that file as an argument to run the input again.
"""

from __future__ import annotations

import contextlib
import importlib
import resource
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import zstandard

#: The limit on new address space. It includes the fuzzer's own tables.
ADDRESS_BYTES = 1 << 30
ELEMENTS = 300
SEPARATOR = b"\x00"

try:
    atheris: Any = importlib.import_module("atheris")
except ImportError:
    sys.exit("error: atheris is not installed. Run `pip install atheris` (Python 3.11 to 3.13, Linux).")

with atheris.instrument_imports(include=["archipelago.broker"]):
    from archipelago.broker.codecs import CODECS
    from archipelago.broker.errors import ConfigError, WireError
    from archipelago.broker.manifest import Manifest
    from archipelago.broker.messages import (
        EVENTS,
        Contribution,
        Evaluation,
        Handover,
        TapeEntry,
        from_fields,
        to_fields,
    )
    from archipelago.broker.presence import Heartbeat
    from archipelago.broker.ranges import parse_cursor
    from archipelago.broker.redis.replies import event_of
    from archipelago.broker.wire import MAGIC, digest, pack, unpack
    from tests import samples

NAMES = sorted(CODECS)
KINDS: list[type[Any]] = [*EVENTS.values(), Contribution, Evaluation, Handover, Heartbeat, TapeEntry]


def check_body(data: bytes) -> None:
    """Decode the input as the body of a payload with a valid header.

    The first byte selects the codec, and says whether the body is compressed.
    """
    first, body = data[0] if data else 0, data[1:]
    name, compressed = NAMES[first % len(NAMES)], bool(first & 0x80)
    header = msgpack.packb({"codec": name, "elements": ELEMENTS, "zstd": compressed})
    check_payload(MAGIC + struct.pack(">H", len(header)) + header + body)


def check_compressed_body(data: bytes) -> None:
    """Decode the input as the contents of a valid compressed body."""
    check_body(bytes([0x80 | (data[0] if data else 0)]) + zstandard.ZstdCompressor(level=1).compress(data[1:]))


def check_payload(payload: bytes) -> None:
    """Fail unless a whole payload decodes to finite values or is refused with a short reason."""
    try:
        found_N = unpack(payload, ELEMENTS)
    except WireError as error:
        assert 0 < len(error.reason) < 300
        assert "not enough memory" not in error.reason
        return
    assert found_N.shape == (ELEMENTS,)
    assert found_N.dtype == np.float32
    assert np.isfinite(found_N).all()


def check_message(data: bytes) -> None:
    """Decode the input as a message.

    The first byte selects the kind. The names and values of the fields follow, separated by zero bytes.
    """
    kind = KINDS[data[0] % len(KINDS)] if data else KINDS[0]
    words = data[1:].split(SEPARATOR)
    raw = dict(zip(words[::2], words[1::2], strict=False))
    fields = {name.decode("utf-8", "replace"): value.decode("utf-8", "replace") for name, value in raw.items()}
    with contextlib.suppress(WireError):
        event_of(raw)
    try:
        message = from_fields(kind, fields)
    except WireError as error:
        assert 0 < len(error.reason) < 500
        return
    assert from_fields(kind, to_fields(message)) is not None, "a decoded message cannot be encoded again"


def check_manifest(data: bytes) -> None:
    """Decode the input as a manifest: names and values of fields, separated by zero bytes."""
    words = [word.decode("utf-8", "replace") for word in data.split(SEPARATOR)]
    with contextlib.suppress(ConfigError):
        Manifest.from_fields(dict(zip(words[::2], words[1::2], strict=False)))


def check_cursor(data: bytes) -> None:
    """Decode the input as the cursor of a range."""
    with contextlib.suppress(WireError):
        assert min(parse_cursor(data.decode("utf-8", "replace"))) >= 0


TARGETS: list[Callable[[bytes], None]] = [
    check_payload, check_body, check_compressed_body, check_message, check_manifest, check_cursor,
]  # fmt: skip


def one_input(data: bytes) -> None:
    """Pass the input to a target. The first byte selects the target."""
    if data:
        TARGETS[data[0] % len(TARGETS)](data[1:])


def seeds() -> list[bytes]:
    """Return valid inputs for each target, with which the fuzzer begins."""
    values_N = np.linspace(-2.0, 2.0, ELEMENTS, dtype=np.float32)
    found = [b"\x00" + pack(values_N, name, level) for name in NAMES for level in (0, 1)]
    for index, name in enumerate(NAMES):
        body = CODECS[name].encode(values_N)
        found += [bytes([target, index]) + body for target in (1, 2)]
    message = samples.commit([]).tape
    for sent in (samples.contribution(), samples.heartbeat(), samples.handover(), message):
        found.append(b"\x03" + bytes([KINDS.index(type(sent))]) + joined(to_fields(sent)))
    return [*found, b"\x04" + joined(samples.manifest().to_fields()), b"\x0512:3456"]


def joined(fields: dict[str, str]) -> bytes:
    """Return the names and values of the fields, separated by zero bytes."""
    return SEPARATOR.join(word.encode() for pair in fields.items() for word in pair)


def main() -> None:
    """Run the fuzzer with libFuzzer's arguments. The valid inputs of `seeds` are its first corpus."""
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds():
            (Path(folder) / digest(seed)).write_bytes(seed)
            one_input(seed)
        has_files = any(not argument.startswith("-") for argument in sys.argv[1:])  # Files are inputs to run again.
        atheris.Setup([*sys.argv, *([] if has_files else ["-max_len=4096", folder])], one_input)
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = mapped + ADDRESS_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
