"""Checkpoints of whole runs: what is loaded is an image that was saved, to the bit, whatever happened to the disk."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import archipelago.merger.checkpoint
from archipelago.broker.errors import ConfigError
from archipelago.broker.messages import Books, Evaluation
from archipelago.broker.transport import Image
from archipelago.broker.wire import digest, pack
from archipelago.merger.checkpoint import CheckpointStore, describe
from tests import samples

EVALUATION = Evaluation(4, 312, 40_000, 1.75e9, 2.25)
BOOKS = Books(published=5, published_tokens=500, merged=2, merged_tokens=200, refused=1, refused_tokens=100, kept=2)


def fragment(of: Image, p: int, version: int) -> Image:
    """The image once a round of that fragment has closed with this version; the same each time."""
    snapshot, _ = of.snapshots[p]
    rng = np.random.default_rng([p, version])
    payload = pack(rng.normal(size=of.manifest.sizes[p]).astype(np.float32), "float32", 1)
    changed = replace(snapshot, round=2 * version - 1 + p, version=version, step=4 * version, merged="a/x/0 b/y/1")
    changed = replace(changed, bytes=len(payload), digest=digest(payload))
    snapshots, outers = list(of.snapshots), list(of.outers)
    snapshots[p], outers[p] = (changed, payload), rng.bytes(300)
    return replace(of, snapshots=tuple(snapshots), outers=tuple(outers))


def image(number: int = 1, *versions: int) -> Image:
    """A run of two fragments at these versions, with something of everything."""
    manifest = samples.manifest()
    out = Image(
        manifest=manifest,
        number=number,
        snapshots=tuple(samples.first_snapshots(manifest)),
        outers=(b"", b""),
        state=json.dumps({"closed": number, "of": "ünïcode \ud800"}),
        books=BOOKS,
        cursors={"3": (0, 7), "11": (2, 0)},
        tape=tuple(samples.commit([], round_number=t).tape for t in (1, 3)),
        evaluations=(EVALUATION, replace(EVALUATION, bits_per_byte=0.1 + 0.2)),
        pending=(samples.packed(np.arange(5, dtype=np.float32), round=2, data="s"), (samples.contribution(b""), b"")),
    )
    for p, version in enumerate(versions):
        out = fragment(out, p, version) if version else out
    return out


def bare(number: int = 1) -> Image:
    """A run that has just begun."""
    return replace(
        image(number), state="", books=Books(), cursors={}, tape=(), evaluations=(), pending=(), outers=(b"", b"")
    )


def saved(folder: Path, *images: Image, keep: int = 3) -> CheckpointStore:
    store = CheckpointStore(folder, keep)
    for each in images:
        store.save(each)
    return store


def directories(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def blob_bytes(folder: Path, number: int) -> int:
    return sum(path.stat().st_size for path in (folder / str(number) / "blobs").rglob("*") if path.is_file())


# what comes back


@pytest.mark.parametrize("what", [image(1), image(4, 3, 2), bare(2)], ids=["a", "later", "bare"])
def test_an_image_comes_back_to_the_bit(tmp_path: Path, what: Image) -> None:
    store = saved(tmp_path / "a" / "b", what)
    assert store.load() == what
    assert CheckpointStore(tmp_path / "a" / "b").load(what.number) == what
    assert store.numbers() == [what.number]


@settings(max_examples=15)
@given(
    payloads=st.lists(st.binary(max_size=50), max_size=4),
    outers=st.tuples(st.binary(max_size=50), st.binary(max_size=50)),
    state=st.text(),
    cursors=st.dictionaries(st.text(max_size=5), st.tuples(st.integers(0, 1 << 62), st.integers(0, 1 << 62))),
    bits=st.floats(allow_nan=False, allow_infinity=False),
)
def test_any_image_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    payloads: list[bytes],
    outers: tuple[bytes, bytes],
    state: str,
    cursors: dict[str, tuple[int, int]],
    bits: float,
) -> None:
    pending = tuple((samples.contribution(payload, sequence=i), payload) for i, payload in enumerate(payloads))
    evaluations = (replace(EVALUATION, bits_per_byte=bits),)
    what = replace(image(1, 1, 1), pending=pending, outers=outers, state=state, cursors=cursors)
    what = replace(what, evaluations=evaluations)
    store = CheckpointStore(tmp_path_factory.mktemp("any"))
    for number in (1, 2):  # on its own, and by reference
        store.save(replace(what, number=number))
        assert store.load() == replace(what, number=number)


def test_a_number_that_was_not_measured_comes_back(tmp_path: Path) -> None:
    found = saved(tmp_path, replace(image(), evaluations=(replace(EVALUATION, bits_per_byte=float("nan")),))).load()
    assert found is not None
    assert np.isnan(found.evaluations[0].bits_per_byte)


def test_where_nothing_is_nothing_is_found_or_made(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "missing")
    assert store.numbers() == []
    assert store.next_number() == 1
    assert store.load() is None
    assert directories(tmp_path) == []


def test_the_newest_is_loaded_and_older_ones_by_number(tmp_path: Path) -> None:
    store = saved(tmp_path, image(3), image(7, 1), image(8, 1, 1))
    assert store.numbers() == [3, 7, 8]
    assert store.next_number() == 9
    assert store.load() == image(8, 1, 1)
    assert store.load(7) == image(7, 1)
    with pytest.raises(ConfigError, match=r"no checkpoint 5.*3, 7, 8"):
        store.load(5)
    with pytest.raises(ConfigError, match=r"no checkpoint 1\. It holds no checkpoints"):
        CheckpointStore(tmp_path / "missing").load(1)


def test_a_number_must_grow(tmp_path: Path) -> None:
    store = saved(tmp_path, image(5))
    for number in (4, 5):
        with pytest.raises(ConfigError, match=r"too late.*another merger"):
            store.save(image(number, 1))
    assert store.load() == image(5)
    with pytest.raises(ConfigError, match="at least one"):
        CheckpointStore(tmp_path, keep=0)


def test_a_line_for_people() -> None:
    assert describe(image(7, 3, 2)) == "checkpoint 7 of run 'sample': round 5, step 12, 2 pending"


# incremental writes and what is kept


@pytest.mark.parametrize("fresh", [False, True], ids=["same store", "fresh store"])
def test_only_what_changed_is_written(tmp_path: Path, fresh: bool) -> None:
    store = saved(tmp_path, replace(image(1, 1, 1), pending=()))
    store = CheckpointStore(tmp_path) if fresh else store
    store.save(replace(image(2, 1, 2), pending=()))
    store.save(replace(image(3, 1, 2), pending=()))
    assert blob_bytes(tmp_path, 1) > blob_bytes(tmp_path, 2) > blob_bytes(tmp_path, 3) == 0
    assert CheckpointStore(tmp_path).load() == replace(image(3, 1, 2), pending=())


def test_a_fragment_that_differs_in_anything_is_written(tmp_path: Path) -> None:
    first = image(1, 1, 1)
    (snapshot, payload), other = first.snapshots
    store = saved(tmp_path, first)
    changes: list[dict[str, Any]] = [
        {"snapshots": ((replace(snapshot, version=2), payload), other)},
        {"outers": (b"other", first.outers[1])},
        {"snapshots": ((replace(snapshot, bytes=3, digest=digest(b"new")), b"new"), other)},
    ]
    for number, change in enumerate(changes, start=2):
        changed = replace(first, number=number, pending=(), **change)
        store.save(changed)
        assert blob_bytes(tmp_path, number)
        assert store.load() == changed


def test_the_newest_are_kept_with_what_they_refer_to(tmp_path: Path) -> None:
    images = [image(number, 1, number) for number in range(1, 6)]
    store = saved(tmp_path, *images, keep=2)
    assert store.numbers() == [4, 5]
    assert directories(tmp_path) == ["1", "4", "5"]  # the first holds fragment 0 of the others
    assert [store.load(number) for number in (4, 5)] == images[3:]
    with pytest.raises(ConfigError, match="4, 5"):
        store.load(1)
    store.save(image(6, 2, 6))
    store.save(image(7, 2, 7))
    assert directories(tmp_path) == ["6", "7"]
    assert store.load() == image(7, 2, 7)


def test_leftovers_go_with_the_next_save_but_not_those_in_the_making(tmp_path: Path) -> None:
    store = saved(tmp_path, image(1))
    (tmp_path / "README").write_text("not ours")
    for name in ("2.aaaa.orbax-checkpoint-tmp", "9.bbbb"):
        shutil.copytree(tmp_path / "1", tmp_path / name)
    assert store.numbers() == [1]
    assert store.next_number() == 10
    store.save(image(3))
    assert directories(tmp_path) == ["1", "3", "9.bbbb", "README"]
    assert store.load() == image(3)


# deaths, at any instruction

DEATHS = """
import os, signal, shutil, sys
from pathlib import Path
import orbax.checkpoint
import archipelago.merger.checkpoint
from tests.merger.test_checkpoint_store import CheckpointStore, image

CHANGES = {"os.rename", "os.mkdir", "os.rmdir", "shutil.rmtree"}

def dies():
    os.kill(os.getpid(), signal.SIGKILL)

def at_failpoint(wanted):
    archipelago.merger.checkpoint.failpoint = lambda name: dies() if name == wanted else None

def at_change(count):
    left = count
    def hook(event, args):
        nonlocal left
        if event in CHANGES or event == "open" and args[2] & os.O_CREAT:
            if left == 0:
                dies()
            left -= 1
    sys.addaudithook(hook)

def survives(base, name, prepare):
    shutil.copytree(base / "before", base / name)
    child = os.fork()
    if child == 0:
        prepare()
        CheckpointStore(base / name, keep=2).save(image(4, 2, 3))
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0

base = Path(sys.argv[1])
for name in ("checkpoint.before", "checkpoint.written", "checkpoint.done"):
    assert not survives(base, name, lambda: at_failpoint(name))
count = 0
while not survives(base, f"change {count}", lambda: at_change(count)):
    count += 1
"""


@pytest.fixture(scope="module")
def deaths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders, each as a saver left it that was killed at another place, and one more as it was `before`."""
    base = tmp_path_factory.mktemp("deaths")
    saved(base / "before", image(1, 1, 1), image(2, 2, 1), image(3, 2, 2), keep=2)
    assert directories(base / "before") == ["1", "2", "3"]  # the first goes with the next save
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", DEATHS, str(base)], check=True, env=os.environ | {"PYTHONPATH": str(root)})
    return base


def test_a_death_leaves_the_checkpoint_before_or_after(deaths: Path) -> None:
    folders = sorted(deaths.iterdir())
    assert len(folders) > 20
    after = {folder.name: CheckpointStore(folder, keep=2).load() == image(4, 2, 3) for folder in folders}
    for folder in folders:
        if not after[folder.name]:
            assert CheckpointStore(folder, keep=2).load() == image(3, 2, 2)
            assert CheckpointStore(folder, keep=2).numbers() == [2, 3]
    failpoints = [after[f"checkpoint.{name}"] for name in ("before", "written", "done")]
    assert failpoints == [False, False, True]
    assert [name for name in after if name.startswith("change")] and True in after.values()


def test_a_save_after_a_death_works_and_tidies(deaths: Path, tmp_path: Path) -> None:
    for folder in deaths.iterdir():
        copied = shutil.copytree(folder, tmp_path / folder.name)
        store = CheckpointStore(copied, keep=2)
        store.save(image(store.next_number(), 9, 9))
        last = image(store.next_number(), 9, 9)
        store.save(last)
        assert store.load() == last
        assert directories(copied) == sorted(str(number) for number in store.numbers()), folder.name


# damage


def _mutations(content: bytes) -> Iterator[bytes | None]:
    """The file deleted, emptied, cut, with something behind it, and with one bit flipped here and there."""
    yield from (None, b"", content[: len(content) // 2], content[:-1], content + b"x")
    for i in range(0, len(content), max(1, len(content) // 16)):
        yield content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_damage_to_any_file_is_noticed(tmp_path: Path) -> None:
    """Whatever happens to a file of the newest: the older one is loaded, or the newest if it does not need the file."""
    saved(tmp_path, image(1, 1, 1), image(2, 2, 1))
    newest = tmp_path / "2"
    kept = dict.fromkeys(_files(newest), 0)
    for path in kept:
        content = path.read_bytes()
        for mutation in _mutations(content):
            path.unlink() if mutation is None else path.write_bytes(mutation)
            found = CheckpointStore(tmp_path).load()
            assert found in (image(1, 1, 1), image(2, 2, 1)), path
            kept[path] += found == image(1, 1, 1)
            path.write_bytes(content)
    noticed = {path.name for path, count in kept.items() if count}
    assert {"index.json", "manifest.ocdbt"} <= noticed
    assert CheckpointStore(tmp_path).load() == image(2, 2, 1)


def test_damage_is_logged_with_what_is_wrong(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, image(1), image(2, 1))
    index = tmp_path / "2" / "index" / "index.json"
    index.write_text(index.read_text().replace('"closed', '"clothed'))
    with caplog.at_level(logging.WARNING, archipelago.merger.checkpoint.__name__):
        assert CheckpointStore(tmp_path).load() == image(1)
    assert "checkpoint 2" in caplog.text
    assert "index is damaged" in caplog.text
    with pytest.raises(ConfigError, match=r"checkpoint 2 .* index is damaged.*1, 2"):
        CheckpointStore(tmp_path).load(2)


def _damage_blobs(folder: Path, number: int) -> None:
    for path in _files(folder / str(number) / "blobs"):
        path.write_bytes(path.read_bytes()[:-9])


def test_damage_to_what_others_refer_to_spares_those_that_do_not(tmp_path: Path) -> None:
    whole = saved(tmp_path, image(1, 1, 1), image(2, 2, 2), image(3, 2, 3))
    _damage_blobs(tmp_path, 2)
    assert whole.load() == image(1, 1, 1)


def test_blobs_of_another_run_are_not_taken_for_these(tmp_path: Path) -> None:
    """Orbax finds nothing wrong with them, and their sizes fit."""
    for name, outer in (("ours", b"0" * 99), ("theirs", b"1" * 99)):
        saved(tmp_path / name, replace(image(1, 1, 1), outers=(outer, outer)))
    shutil.rmtree(tmp_path / "ours" / "1" / "blobs")
    shutil.copytree(tmp_path / "theirs" / "1" / "blobs", tmp_path / "ours" / "1" / "blobs")
    with pytest.raises(ConfigError, match="outer_0 is damaged: its digest is"):
        CheckpointStore(tmp_path / "ours").load()


def test_nothing_refers_to_damage(tmp_path: Path) -> None:
    saved(tmp_path, image(1, 1, 1), image(2, 2, 2))
    _damage_blobs(tmp_path, 2)
    store = CheckpointStore(tmp_path)
    store.save(image(3, 2, 2))
    assert store.load() == image(3, 2, 2)
    shutil.rmtree(tmp_path / "1")
    store = saved(tmp_path, image(4, 2, 2))
    assert store.load() == image(4, 2, 2)


def test_nothing_refers_to_what_is_gone(tmp_path: Path) -> None:
    store = saved(tmp_path, image(1, 1, 1), image(2, 1, 2))
    shutil.rmtree(tmp_path / "1")
    store.save(image(3, 1, 2))
    assert store.load() == image(3, 1, 2)


def test_where_none_can_be_read_the_error_says_so_of_each(tmp_path: Path) -> None:
    saved(tmp_path, image(1), image(2))
    (tmp_path / "1" / "index" / "index.json").unlink()
    (tmp_path / "2" / "index" / "index.json").write_text("{")
    with pytest.raises(ConfigError, match=r"no checkpoint in .* can be read \(2: .*; 1: .*init"):
        CheckpointStore(tmp_path).load()


def test_another_format_is_said(tmp_path: Path) -> None:
    saved(tmp_path, image(1))
    index = tmp_path / "1" / "index" / "index.json"
    index.write_text(index.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ConfigError, match=r"format 2.*reads format 1"):
        CheckpointStore(tmp_path).load()


def test_a_checkpoint_under_another_name_is_not_taken_for_it(tmp_path: Path) -> None:
    saved(tmp_path, image(1))
    (tmp_path / "1").rename(tmp_path / "4")
    with pytest.raises(ConfigError, match="index is damaged"):
        CheckpointStore(tmp_path).load()


def test_what_an_unreadable_index_may_refer_to_is_not_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, image(1, 1, 1), image(2, 1, 2), image(3, 1, 3), keep=2)
    assert directories(tmp_path) == ["1", "2", "3"]
    (tmp_path / "3" / "index" / "index.json").write_text("{")
    with caplog.at_level(logging.WARNING, archipelago.merger.checkpoint.__name__):
        saved(tmp_path, image(4, 2, 4), keep=2)
    assert "old checkpoints stay" in caplog.text
    assert directories(tmp_path) == ["1", "2", "3", "4"]
    saved(tmp_path, image(5, 2, 5), keep=2)
    assert directories(tmp_path) == ["4", "5"]


# disks that fail


def _full(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("where", ["_save", "_sync", "_sync_folder"])
def test_a_full_disk_is_an_error_and_harms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    store = saved(tmp_path, image(1))
    with monkeypatch.context() as patched:
        patched.setattr(archipelago.merger.checkpoint, where, _full)
        with pytest.raises(ConfigError, match=r"No space left.*Free some space.*as they were"):
            store.save(image(2, 1))
    assert store.load() is not None
    assert [name for name in directories(tmp_path) if "." in name] == []
    number = store.next_number()
    store.save(image(number, 1, 1))
    assert store.load() == image(number, 1, 1)


def test_what_a_death_left_makes_room_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = saved(tmp_path, image(1))
    (tmp_path / "2.aaaa").mkdir()
    monkeypatch.setattr(archipelago.merger.checkpoint, "_save", _full)
    with pytest.raises(ConfigError, match="No space left"):
        store.save(image(3))
    assert directories(tmp_path) == ["1"]


LIMITED = """
import os, resource, sys
from pathlib import Path
from tests.merger.test_checkpoint_store import ConfigError, CheckpointStore, image, replace
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    CheckpointStore(Path(sys.argv[1])).save(replace(image(2, 1), outers=(os.urandom(200_000), b"")))
except ConfigError as error:
    print(error)
"""


def test_a_write_that_fails_within_orbax_is_the_same_error(tmp_path: Path) -> None:
    saved(tmp_path, image(1))
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)],
        check=True, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True,
    )  # fmt: skip
    assert "checkpoint 2 cannot be written" in ran.stdout
    assert "File too large" in ran.stdout
    store = CheckpointStore(tmp_path)
    assert store.load() == image(1)
    store.save(image(store.next_number()))
    assert all(name.isdigit() for name in directories(tmp_path))


def test_a_folder_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    store = CheckpointStore(tmp_path / "file")
    assert store.numbers() == []
    assert store.load() is None
    with pytest.raises(ConfigError, match="checkpoint 1 cannot be written"):
        store.save(image(1))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    saved(tmp_path, image(1))
    tmp_path.chmod(0o555)
    try:
        if os.access(tmp_path, os.W_OK):
            pytest.skip("this user may write anywhere")
        with pytest.raises(ConfigError, match="checkpoint 2 cannot be written"):
            CheckpointStore(tmp_path).save(image(2))
        assert CheckpointStore(tmp_path).load() == image(1)
    finally:
        tmp_path.chmod(0o755)


def test_old_checkpoints_that_cannot_be_deleted_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = saved(tmp_path, image(1, 1, 1), keep=1)
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, archipelago.merger.checkpoint.__name__):
        patched.setattr(shutil, "rmtree", _full)
        store.save(image(2, 2, 2))
    assert "leftovers stay" in caplog.text
    assert store.numbers() == [2]
    store.save(image(3, 3, 3))
    assert directories(tmp_path) == ["3"]


# several at once


def test_a_reader_beside_a_saver_sees_whole_ones(tmp_path: Path) -> None:
    """Readers load while checkpoints come and go under them."""
    saved(tmp_path, image(1, 1, 1), keep=1)
    done, found = threading.Event(), list[Image | None]()

    def read() -> None:
        while not done.is_set():
            found.append(CheckpointStore(tmp_path, keep=1).load())

    reader = threading.Thread(target=read)
    reader.start()
    store = CheckpointStore(tmp_path, keep=1)
    for number in range(2, 30):
        store.save(image(number, number // 3 + 1, number // 2 + 1))
    done.set()
    reader.join()
    numbers = []
    for each in found:
        assert each is not None
        assert each == image(each.number, each.number // 3 + 1, each.number // 2 + 1)
        numbers.append(each.number)
    assert numbers == sorted(numbers)


def test_of_two_that_save_the_same_number_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was fenced meets its successor at the last moment: what is there is one of the two, unmixed."""
    late, early = CheckpointStore(tmp_path), CheckpointStore(tmp_path)

    def meanwhile(name: str) -> None:
        if name == "checkpoint.written":
            monkeypatch.undo()
            early.save(image(1, 1, 1))

    monkeypatch.setattr(archipelago.merger.checkpoint, "failpoint", meanwhile)
    with pytest.raises(ConfigError, match="checkpoint 1 cannot be written"):
        late.save(image(1, 2, 2))
    assert late.load() == image(1, 1, 1)
    assert directories(tmp_path) == ["1"]


def test_nothing_warns(tmp_path: Path, recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert saved(tmp_path, image(1, 1, 1), image(2, 1, 2)).load() is not None
    assert caplog.records == []
    assert len(recwarn) == 0


def test_orbax_is_imported_with_the_first_use_only() -> None:
    code = "import sys, archipelago.merger.checkpoint; assert 'orbax' not in sys.modules"
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(root)})
