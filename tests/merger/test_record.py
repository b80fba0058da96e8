"""The record of a run on disk: writing, reading, and errors for damaged files."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from archipelago.broker.commits import Delivery
from archipelago.broker.errors import ConfigError
from archipelago.broker.files import staged_folder
from archipelago.broker.messages import Contribution, RoundMember, TapeEntry, to_fields
from archipelago.broker.wire import digest
from archipelago.merger.record import MAGIC, Recorder, Round, read
from tests import samples
from tests.failing import failing

MANIFEST = samples.manifest()
FIRST = samples.first_snapshots(MANIFEST, 0.5)


def a_round(number: int, members: int = 2, epoch: int = 1) -> Round:
    """Return a round of that many contributions and their deliveries."""
    deliveries, parts = [], list[RoundMember]()
    for sequence in range(members):
        values_N = np.full(3, number + sequence, np.float32)
        contribution, payload = samples.packed(values_N, sequence=sequence, round=number, data="3:0:96")
        deliveries.append(Delivery(f"{number}-{sequence}", contribution, payload))
        parts.append(RoundMember("a", "x", sequence, 0, 0, 0.5, 1.0, 100, 4, 2.5, f"{number}-{sequence}"))
    entry: TapeEntry = replace(samples.commit([], round_number=number).tape, epoch=epoch, members=tuple(parts))
    return entry, tuple(deliveries)


def begun(folder: Path) -> Recorder:
    recorder = Recorder(folder)
    recorder.begin(MANIFEST, FIRST)
    return recorder


def recorded(folder: Path, *segments: list[int]) -> Recorder:
    recorder = begun(folder)
    for numbers in segments:
        recorder.append([a_round(n) for n in numbers])
    return recorder


def test_a_record_is_read_back(tmp_path: Path) -> None:
    recorder = begun(tmp_path / "deep" / "record")
    rounds = [a_round(1), a_round(2, members=0), a_round(3, members=1)]
    recorder.append(rounds[:2])
    recorder.append(rounds[2:])
    found = read(tmp_path / "deep" / "record")
    assert (found.manifest, list(found.beginning)) == (MANIFEST, FIRST)
    assert [found.rounds[n] for n in (1, 2, 3)] == rounds


def test_what_is_written_survives_a_crash_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is lost with its name, which is in its folder."""
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(Path(f"/proc/self/fd/{handle}").readlink()))
    recorded(tmp_path / "record", [1])
    assert synced.count(tmp_path / "record") == 2, "after the beginning, and after the rounds"
    with staged_folder(tmp_path / "staged"):
        pass
    assert synced[-1] == tmp_path


@pytest.mark.parametrize("first", [1, 2])
def test_of_two_copies_of_a_round_the_later_epoch_counts(tmp_path: Path, first: int) -> None:
    """This does not depend on the order of writing or on file names."""
    recorder = begun(tmp_path)
    earlier_epoch, later_epoch = a_round(4, 2, epoch=1), a_round(4, 1, epoch=2)
    files = (
        [a_round(3), later_epoch],
        [earlier_epoch, a_round(5)],
    )  # the segment that is read last is of the earlier merger
    for rounds in files if first == 1 else reversed(files):
        recorder.append(rounds)
    assert read(tmp_path).rounds[4] == a_round(4, 1, epoch=2)


def test_going_back_deletes_lost_rounds(tmp_path: Path) -> None:
    for to, left in ((6, [1, 2, 3, 4, 5, 6]), (5, [1, 2, 3]), (3, [1, 2, 3]), (2, []), (0, [])):
        recorder = recorded(tmp_path / f"{to}", [1, 2, 3], [4, 5, 6])
        recorder.go_back(to)
        assert sorted(read(tmp_path / f"{to}").rounds) == left
    Recorder(tmp_path / "nowhere").go_back(2)  # without a record this does nothing


def test_a_folder_of_another_runs_record_is_refused(tmp_path: Path) -> None:
    recorder = recorded(tmp_path, [1])
    others = ((replace(MANIFEST, versions={"jax": "2"}), FIRST), (MANIFEST, samples.first_snapshots(MANIFEST, 0.25)))
    for manifest, first in others:
        with failing(ConfigError, "record.folder"):
            recorder.begin(manifest, first)
    assert sorted(read(tmp_path).rounds) == [1]
    signed = [(replace(snapshot, digest="a" * 64), data) for snapshot, data in FIRST]
    recorder.begin(MANIFEST, signed)  # the first invitation has signed them


# -- damage ----------------------------------------------------------------------------------------------------------


def test_a_missing_record_and_a_folder_that_cannot_be_written_are_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with failing(ConfigError, "record.folder"):
        begun(tmp_path / "file" / "record")
    with failing(ConfigError, "record.missing"):
        read(tmp_path)
    recorded(tmp_path / "r", [1])
    (tmp_path / "r" / "begin.bin").unlink()
    with failing(ConfigError, "record.missing"):
        read(tmp_path / "r")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    recorded(folder, [1, 2])
    return folder


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    """A copy of `sound`. Each example repairs the file that it has damaged."""
    shutil.copytree(sound, tmp_path / "copy")
    return tmp_path / "copy"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["begin.bin", "rounds-00000001-00000002.bin"]), st.data())
def test_a_damaged_file_is_an_error(sound: Path, copy: Path, name: str, data: st.DataObject) -> None:
    whole = (sound / name).read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    flipped = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    (copy / name).write_bytes(data.draw(st.sampled_from([flipped, whole[:at], whole + b"\0"])))
    with failing(ConfigError, "record.damaged"):
        read(copy)
    (copy / name).write_bytes(whole)


def put(folder: Path, name: str, body: bytes) -> None:
    (folder / name).write_bytes(MAGIC + digest(body).encode() + body)


def with_part(part: str, value: Any) -> bytes:
    """Return a segment of round 3 in which one part of its contribution is `value`."""
    entry, (delivery,) = a_round(3, members=1)
    assert isinstance(delivery.contribution, Contribution)
    parts = {"entry": delivery.entry, "fields": to_fields(delivery.contribution), "payload": delivery.payload}
    parts[part] = value
    packed: bytes = msgpack.packb({"rounds": [[to_fields(entry), [list(parts.values())]]]})
    return packed


def test_only_a_well_formed_contribution_is_read(copy: Path) -> None:
    """A number in place of bytes must not become that many zero bytes."""
    name = "rounds-00000003-00000003.bin"
    put(copy, name, with_part("entry", "3-0"))
    assert read(copy).rounds[3] == a_round(3, members=1)
    wrong: dict[str, list[Any]] = {"payload": [1 << 40, "text", None], "fields": [{}, None, [1]]}
    for part, values in wrong.items():
        for value in values:
            put(copy, name, with_part(part, value))
            with failing(ConfigError, "record.damaged"):
                read(copy)
