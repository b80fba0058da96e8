"""`bench sync` with few parameters: real processes, a real Redis, and a torchft that is missing or replaced."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import socket
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from archipelago.broker.errors import BrokerError
from archipelago.ops.bench import sync as bench_sync
from archipelago.ops.bench.pieces import OF_MERGER
from archipelago.ops.bench.sync import TORCHFT_PYTHON, in_pieces, sync
from archipelago.ops.bench.torchft import ADDRESSES, FAMILY, ThinLink
from archipelago.ops.bench.torchft_replicas import torchft
from archipelago.ops.bench.two_islands import AT_ONCE, FRAGMENTS, Size, Synced, two_islands
from tests.failing import failing

TINY = Size(parameters=12_000, rounds=2, thin_syncs=2, step_seconds=0.002, mbit=50.0)
STAND_IN = """#!/bin/sh
echo '{"torchft": "9.9", "torch": "9.9"}'
while read -r line; do
    echo '{"seconds": 2.0, "committed": false, "bytes_up": 1000000, "bytes_down": 500000, "errors": []}'
done
"""


@pytest.fixture(autouse=True)
def _nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TORCHFT_PYTHON, raising=False)


def _script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "python"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o700)
    return str(path)


def test_tensors_have_one_shape() -> None:
    assert sum(tensor.size for tensor in Size().tensors) == pytest.approx(10e6, rel=1e-3)
    assert sum(tensor.size for tensor in TINY.tensors) == 12_000


@pytest.mark.full
@pytest.mark.processes
def test_a_sync_merges_each_fragment_once_with_both_islands_in_it() -> None:
    with two_islands(AT_ONCE, TINY) as ours:
        first = ours.sync()
        while not ours.sync().committed:  # The merger may close the first rounds before it knows both islands.
            pass
        before = ours.transport.reader.books()
        last = ours.sync()
        after = ours.transport.reader.books()
        entries = ours.transport.reader.tape(FRAGMENTS)
    assert last.committed and last.seconds > 0
    assert after.merged - before.merged == after.published - before.published == 2 * FRAGMENTS
    assert sorted(entry.fragment for entry in entries) == list(range(FRAGMENTS))
    assert {entry.version for entry in entries} == {entries[0].version}
    assert all(sorted(m.island for m in entry.members) == ["near", "thin"] for entry in entries)
    four_bits = 12_000 * 4.125 / 8 / 1e6
    assert first.megabytes > 0
    assert four_bits < last.megabytes < 3 * four_bits  # Contributions and differences, but no whole snapshot.


@pytest.mark.full
@pytest.mark.processes
def test_rows_without_torchft_name_the_reason() -> None:
    said: list[str] = []
    found = sync(said.append, "", TINY)
    ours, theirs, thin, thin_theirs = found["rows"]
    assert found["parameters"] == 12_000
    assert (ours["what"], ours["link"], ours["committed"]) == ("archipelago", "loopback", "2 of 2")
    assert 0 < ours["from"] <= ours["seconds"] <= ours["to"]
    assert (thin["link"], thin["committed"][-5:]) == ("50 Mbit/s", " of 2")
    assert thin["seconds"] > 0 and thin["steps_to_unthrottled"] > 0
    for row in (theirs, thin_theirs):
        assert row["committed"] == "not run" and TORCHFT_PYTHON in row["note"] and math.isnan(row["seconds"])
    assert all(row.keys() == ours.keys() for row in found["rows"])


@pytest.mark.full
@pytest.mark.processes
def test_the_pieces_of_a_sync_with_a_merger_that_is_far_from_its_redis() -> None:
    found = in_pieces(lambda _: None, replace(TINY, pieces=True, merger_rtt_ms=4.0))
    rows = {(row["process"], row["piece"]): row for row in found["rows"]}
    assert rows.keys() >= {("merger", piece) for piece in OF_MERGER.values()}
    assert rows["merger", "transaction"]["ms"] >= 4 * 4.0, "a commit takes more than four round trips"
    assert rows["island", "upload"]["calls"] == FRAGMENTS


def test_both_sides_take_turns_and_warm_ups_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeIslands:
        """The two islands without processes. The first syncs are slow, and one of them lacks the second island."""

        def __init__(self) -> None:
            self.left = [(9.0, False), (9.0, True), *[(9.0, True)] * bench_sync.WARM_UPS, (4.0, True), (1.0, True)]

        def sync(self) -> Synced:
            return Synced(*self.left.pop(0), megabytes=10.0)

    monkeypatch.setattr(bench_sync, "two_islands", lambda *_: contextlib.nullcontext(FakeIslands()))
    ours, theirs = bench_sync.on_loopback(TINY, _script(tmp_path, STAND_IN), lambda _: None)
    assert (theirs["what"], theirs["seconds"], theirs["committed"]) == ("torchft 9.9", 2.0, "0 of 2")
    assert (ours["seconds"], ours["from"], ours["to"], ours["committed"]) == (2.5, 1.0, 4.0, "2 of 2")
    assert (ours["MB"], theirs["MB"]) == (10.0, 1.5)
    assert ours["speed_to_torchft"] == (2.0 / 4.0 + 2.0 / 1.0) / 2


@pytest.mark.skipif(importlib.util.find_spec("torchft") is not None, reason="torchft is installed here")
def test_a_python_without_torchft_is_named() -> None:
    with torchft(TINY, sys.executable) as found:
        assert not found.usable
        assert sys.executable in found.reason and "No module named 'torch" in found.reason


def test_a_missing_python_is_named() -> None:
    with torchft(TINY, "/no/such/python") as found:
        assert not found.usable
        assert "/no/such/python" in found.reason


def test_a_torchft_that_ends_is_an_error(tmp_path: Path) -> None:
    ends = _script(tmp_path, '#!/bin/sh\necho \'{"torchft": "9.9"}\'\nread -r line\nexit 3\n')
    with torchft(TINY, ends) as found, failing(BrokerError, "bench.torchft-ended"):
        found.sync()


def test_the_link_to_the_first_replica_goes_through_a_proxy() -> None:
    def address(host: str, port: int) -> bytes:
        return FAMILY + struct.pack(">H", port) + socket.inet_aton(host) + bytes(8)

    link = ThinLink(1000.0)
    with socket.create_server((ADDRESSES[0], 0)) as listening:
        port = listening.getsockname()[1]
        value = b"one" + address(ADDRESSES[0], port) + address(ADDRESSES[1], port) + b"end"
        found = link.rerouted(value)
        assert found == link.rerouted(value)  # There is one proxy for each port.
        (proxied,) = struct.unpack_from(">H", found, 5)
        assert proxied != port
        assert found == b"one" + address(ADDRESSES[0], proxied) + address(ADDRESSES[1], port) + b"end"
        with socket.create_connection((ADDRESSES[0], proxied)) as dialled:
            dialled.sendall(b"hello")
            accepted = listening.accept()[0]
            with accepted:
                assert accepted.recv(5, socket.MSG_WAITALL) == b"hello"
    link.close()
    assert link.carried() == (5, 0)


def test_options_reach_the_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def stand_in(*arguments: Any) -> dict[str, Any]:
        given.extend(arguments[1:])
        return {"rows": [{"what": "archipelago", "seconds": math.nan}]}

    monkeypatch.setattr(bench_sync, "sync", stand_in)
    assert bench_sync.main(bench_sync.SyncOptions(quick=True, torchft_python="there", output=tmp_path)) == 0
    assert given == ["there", bench_sync.QUICK]
    assert json.loads((tmp_path / "sync.json").read_text(encoding="utf-8"))["rows"][0]["seconds"] is None
