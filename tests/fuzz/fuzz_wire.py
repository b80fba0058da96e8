"""Hostile bytes by the million, led by coverage: `make fuzz`, or `make fuzz ARGS=-max_total_time=600`.

Whatever comes, the decoders end in one of the errors that callers expect or in something that harms nobody, within an
address space that no bomb fits into. Atheris (libFuzzer) reports anything else, and writes the input to a file whose
name, given as an argument, plays it again.
"""

from __future__ import annotations

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

ADDRESS_BYTES = 1 << 30
"""of new addresses, for the fuzzer's own tables as well"""
ELEMENTS = 300
SEPARATOR = b"\x00"

try:
    atheris: Any = importlib.import_module("atheris")
except ImportError:
    sys.exit("error: there is no atheris here. `pip install atheris` (Python 3.11 to 3.13, Linux).")

with atheris.instrument_imports(include=["archipelago.broker"]):
    from archipelago.broker.codecs import CODECS
    from archipelago.broker.corpus_shards import parse_cursor
    from archipelago.broker.errors import ConfigError, WireError
    from archipelago.broker.manifest import Manifest
    from archipelago.broker.messages import (
        EVENTS,
        Actions,
        Contribution,
        Evaluation,
        Handover,
        Heartbeat,
        TapeEntry,
        from_fields,
        to_fields,
    )
    from archipelago.broker.redis.replies import event_of
    from archipelago.broker.wire import MAGIC, digest, pack, unpack
    from tests import samples

NAMES = sorted(CODECS)
KINDS: list[type[Any]] = [*EVENTS.values(), Contribution, Evaluation, Handover, Heartbeat, TapeEntry, Actions]


def as_it_is(data: bytes) -> None:
    check(data)


def with_a_good_header(data: bytes) -> None:
    """So the body's way is open: its first byte says which codec it is of, and whether it is compressed."""
    first, body = data[0] if data else 0, data[1:]
    name, compressed = NAMES[first % len(NAMES)], bool(first & 0x80)
    header = msgpack.packb({"codec": name, "elements": ELEMENTS, "zstd": compressed})
    check(MAGIC + struct.pack(">H", len(header)) + header + body)


def with_an_honest_frame(data: bytes) -> None:
    """The body is compressed as it should be; what it holds is not."""
    with_a_good_header(bytes([0x80 | (data[0] if data else 0)]) + zstandard.ZstdCompressor(level=1).compress(data[1:]))


def check(payload: bytes) -> None:
    try:
        found_N = unpack(payload, ELEMENTS)
    except WireError as error:
        assert 0 < len(error.reason) < 300
        assert "not enough memory" not in error.reason
        return
    assert found_N.shape == (ELEMENTS,)
    assert found_N.dtype == np.float32
    assert np.isfinite(found_N).all()


def as_fields(data: bytes) -> None:
    """As a message of each kind: names and values, apart by zeros; the first byte says which kind."""
    kind = KINDS[data[0] % len(KINDS)] if data else KINDS[0]
    words = data[1:].split(SEPARATOR)
    raw = dict(zip(words[::2], words[1::2], strict=False))
    fields = {name.decode("utf-8", "replace"): value.decode("utf-8", "replace") for name, value in raw.items()}
    event_of("1-1", raw)
    try:
        message = from_fields(kind, fields)
    except WireError as error:
        assert 0 < len(error.reason) < 500
        return
    assert from_fields(kind, to_fields(message)) is not None, "what was taken cannot be said again"


def as_a_manifest(data: bytes) -> None:
    words = [word.decode("utf-8", "replace") for word in data.split(SEPARATOR)]
    try:
        Manifest.from_fields(dict(zip(words[::2], words[1::2], strict=False)))
    except ConfigError:
        return


def as_a_cursor(data: bytes) -> None:
    try:
        place, position = parse_cursor(data.decode("utf-8", "replace"))
    except WireError:
        return
    assert place >= 0
    assert position >= 0


TARGETS: list[Callable[[bytes], None]] = [
    as_it_is,
    with_a_good_header,
    with_an_honest_frame,
    as_fields,
    as_a_manifest,
    as_a_cursor,
]


def one_input(data: bytes) -> None:
    """The first byte says which target has the rest."""
    if data:
        TARGETS[data[0] % len(TARGETS)](data[1:])


def seeds() -> list[bytes]:
    """Honest ones, from which it begins."""
    values_N = np.linspace(-2.0, 2.0, ELEMENTS, dtype=np.float32)
    found = [b"\x00" + pack(values_N, name, level) for name in NAMES for level in (0, 1)]
    for index, name in enumerate(NAMES):
        body = CODECS[name].encode(values_N)
        found += [bytes([target, index]) + body for target in (1, 2)]
    message = samples.commit([]).tape
    for sent in (samples.contribution(), samples.heartbeat(), samples.actions(), samples.handover(), message):
        found.append(b"\x03" + bytes([KINDS.index(type(sent))]) + said(to_fields(sent)))
    return [*found, b"\x04" + said(samples.manifest().to_fields()), b"\x0512:3456"]


def said(fields: dict[str, str]) -> bytes:
    return SEPARATOR.join(word.encode() for pair in fields.items() for word in pair)


def main() -> None:
    """Arguments are libFuzzer's; a corpus of honest inputs comes by itself."""
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds():
            (Path(folder) / digest(seed)).write_bytes(seed)
            one_input(seed)
        only = any(not argument.startswith("-") for argument in sys.argv[1:])  # inputs to play again
        atheris.Setup([*sys.argv, *([] if only else ["-max_len=4096", folder])], one_input)
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = mapped + ADDRESS_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
