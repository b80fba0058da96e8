"""Checkpoints in a bucket: an upload that is slow, fails or is cut off loses nothing, and is never taken for one."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest

from archipelago.broker.buckets.bundles import BundleManifest, Bundles, fetch_newer
from archipelago.broker.buckets.copier import RETRY_SECONDS, RETRY_SECONDS_MAX, Copier
from archipelago.broker.buckets.folder import BucketError, BucketFolder, open_bucket
from archipelago.broker.buckets.record import copy_record, fetch_record
from tests.broker.buckets.faulty_bucket import FaultyFileSystem
from tests.conftest import Until
from tests.failing import failing

ABOUT = {"run": "demo", "uid": "1"}


def written(folder: Path, number: int, files: int = 3) -> Path:
    """Write a checkpoint with a few files, one of them empty."""
    place = folder / str(number)
    (place / "d").mkdir(parents=True)
    for n in range(files):
        (place / "d" / f"{n}.bin").write_bytes(bytes([number, n]) * 1000 * n)
    return place


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def copier_of(bucket: BucketFolder, folder: Path, keep: int = 3) -> Copier:
    return Copier(Bundles(bucket.child("checkpoints")), folder / "uploads", ABOUT, keep)


def fail_with(error: Exception, *requests: str) -> None:
    """Let these requests fail; without any, all."""

    def fault(request: str, path: str) -> None:
        if not requests or request in requests:
            raise error

    FaultyFileSystem.fault = staticmethod(fault)


# -- bundles -----------------------------------------------------------------------------------------------------------


def test_a_bundle_comes_back_as_it_was(bucket: BucketFolder, tmp_path: Path) -> None:
    bundles, source = Bundles(bucket), written(tmp_path, 7)
    bundles.put(7, source, ABOUT)
    assert bundles.numbers() == [7]
    assert dict(bundles.manifest(7).about) == ABOUT
    bundles.get(7, tmp_path / "new" / "7")
    assert content(tmp_path / "new" / "7") == content(source)


@pytest.mark.parametrize("failing_put", range(4))
def test_an_upload_that_is_cut_off_does_not_exist(bucket: BucketFolder, tmp_path: Path, failing_put: int) -> None:
    """The process or the bucket dies after any number of files; the earlier bundle stays the newest."""
    bundles, puts = Bundles(bucket), 0
    bundles.put(1, written(tmp_path, 1), ABOUT)

    def fault(request: str, path: str) -> None:
        nonlocal puts
        puts += request == "put"
        if request == "put" and puts > failing_put:
            raise ConnectionError("reset")

    FaultyFileSystem.fault = staticmethod(fault)
    with failing(BucketError):
        bundles.put(2, written(tmp_path, 2), ABOUT)
    assert bundles.numbers() == [1]
    FaultyFileSystem.fault = staticmethod(lambda request, path: None)
    bundles.put(3, written(tmp_path, 3), ABOUT)
    bundles.prune(keep=2)
    assert bundles.numbers() == [1, 3]
    assert {path.partition("/")[0].partition("-")[0] for path in bucket.tree()} == {"1", "1.json", "3", "3.json"}


def test_older_bundles_that_are_still_needed_are_not_pruned(bucket: BucketFolder, tmp_path: Path) -> None:
    bundles = Bundles(bucket)
    for number in (1, 2, 3, 4):
        bundles.put(number, written(tmp_path, number), ABOUT)
    bundles.prune(keep=1, besides=[2, 7])
    assert bundles.numbers() == [2, 4]
    assert {path.partition("/")[0].partition("-")[0] for path in bucket.tree()} == {"2", "2.json", "4", "4.json"}


def test_another_try_uploads_only_what_has_not_arrived(bucket: BucketFolder, tmp_path: Path) -> None:
    bundles, source = Bundles(bucket), written(tmp_path, 1)

    def fault(request: str, path: str) -> None:
        if request == "put" and path.endswith("/2.bin"):
            raise ConnectionError("reset")

    FaultyFileSystem.fault = staticmethod(fault)
    with failing(BucketError):
        bundles.put(1, source, ABOUT)
    FaultyFileSystem.fault = staticmethod(lambda request, path: None)
    (source / "d" / "0.bin").write_bytes(b"changed")
    bundles.put(1, source, ABOUT)
    puts = [path.rpartition("/")[2] for request, path in FaultyFileSystem.requests if request == "put"]
    assert puts == ["0.bin", "1.bin", "2.bin", "0.bin", "2.bin", "1.json"]
    bundles.get(1, tmp_path / "new")
    assert content(tmp_path / "new") == content(source)
    assert len(bucket.folders()) == 1


def test_a_file_that_arrived_in_part_is_an_error(bucket: BucketFolder, tmp_path: Path) -> None:
    FaultyFileSystem.fault = staticmethod(lambda request, path: 5 if path.endswith("2.bin") else None)
    with failing(BucketError, "bucket.incomplete"):
        Bundles(bucket).put(1, written(tmp_path, 1), ABOUT)
    assert Bundles(bucket).numbers() == []


def test_damage_is_found_and_leaves_nothing_on_the_disk(bucket: BucketFolder, tmp_path: Path) -> None:
    bundles = Bundles(bucket)
    bundles.put(1, written(tmp_path, 1), ABOUT)
    place = bundles.manifest(1).folder
    bucket.write(f"{place}/d/1.bin", b"other" * 400)  # of the same size
    with failing(BucketError, "bucket.damaged"):
        bundles.get(1, tmp_path / "new" / "1")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_bundle_without_all_its_files_is_damaged(bucket: BucketFolder, tmp_path: Path) -> None:
    bundles = Bundles(bucket)
    for number in (1, 2):
        bundles.put(number, written(tmp_path, number), ABOUT)
    bucket.delete(f"{bundles.manifest(2).folder}/d/1.bin")
    fetch_newer(bundles, tmp_path / "new", -1)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["1"]


def test_two_processes_can_download_to_one_folder(bucket: BucketFolder, tmp_path: Path) -> None:
    bundles, new = Bundles(bucket), tmp_path / "new"
    bundles.put(1, written(tmp_path, 1), ABOUT)

    def fault(request: str, path: str) -> None:
        if request == "get" and path.endswith("0.bin"):  # meanwhile, the other process
            FaultyFileSystem.fault = staticmethod(lambda request, path: None)
            fetch_newer(bundles, new, -1)

    FaultyFileSystem.fault = staticmethod(fault)
    fetch_newer(bundles, new, -1)
    assert content(new / "1") == content(tmp_path / "1")
    assert len(list(new.iterdir())) == 1


def test_a_fault_of_this_disk_is_not_one_of_the_bucket(bucket: BucketFolder, tmp_path: Path) -> None:
    bucket.write("x", b"content")
    for place in (Path("/dev/full"), tmp_path):
        with pytest.raises(OSError, match=r"No space|directory"):
            bucket.download("x", place)
    with pytest.raises(FileNotFoundError):
        bucket.upload(tmp_path / "none", "y")


def test_an_upload_of_the_newest_number_is_not_pruned(bucket: BucketFolder, tmp_path: Path) -> None:
    """Another process may have the same number, and its upload ends later."""
    bundles = Bundles(bucket)
    bundles.put(1, written(tmp_path, 1), ABOUT)

    def fault(request: str, path: str) -> None:
        if request == "put" and path.endswith("2.json"):
            FaultyFileSystem.fault = staticmethod(lambda request, path: None)
            bundles.put(2, tmp_path / "2", ABOUT)
            bundles.prune(keep=1)

    FaultyFileSystem.fault = staticmethod(fault)
    bundles.put(2, written(tmp_path, 2), ABOUT)
    bundles.get(2, tmp_path / "new")
    assert content(tmp_path / "new") == content(tmp_path / "2")


@pytest.mark.parametrize("path", ["../../etc/passwd", "/etc/passwd", "..\\x"])
def test_a_manifest_names_no_files_outside(bucket: BucketFolder, tmp_path: Path, path: str) -> None:
    bucket.write("1.json", BundleManifest("1-ab", {path: (1, "")}, ABOUT).to_json())
    bucket.write("2.json", b"{}")
    bucket.write("3.json", json.dumps({"format": 1, "digest": ""}).encode())
    bucket.write("4.json", b"[" * 200_000)
    for number in (1, 2, 3, 4):
        with failing(BucketError, "bucket.damaged"):
            Bundles(bucket).get(number, tmp_path / "new")
    assert not (tmp_path / "new").exists()


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "code"),
    [
        ("s4://bucket/x", "bucket.scheme"),
        ("bucket/x", "bucket.scheme"),
        ("s3:/bucket/x", "bucket.scheme"),
        ("gs://bucket/x", "bucket.extra"),
        ("dropbox://x/y", "bucket.extra"),
    ],
)
def test_a_wrong_address_is_refused(address: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)
    with failing(BucketError, code):
        open_bucket(address)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PermissionError("Access Denied"), "bucket.denied"),
        (FileNotFoundError("The specified bucket does not exist"), "bucket.missing"),
        (type("NoCredentialsError", (Exception,), {})("Unable to locate credentials"), "bucket.credentials"),
    ],
)
def test_a_mistake_shows_at_the_start(bucket: BucketFolder, error: Exception, code: str) -> None:
    fail_with(error)
    with failing(BucketError, code):
        open_bucket(bucket.address)


def test_a_bucket_that_is_away_stops_no_start(bucket: BucketFolder, caplog: pytest.LogCaptureFixture) -> None:
    fail_with(ConnectionError("refused"))
    open_bucket(bucket.address)
    assert [vars(record)["code"] for record in caplog.records] == ["bucket.failed"]
    FaultyFileSystem.fault = staticmethod(lambda request, path: None)
    fail_with(PermissionError("no deletions"), "delete")  # a bucket may keep everything
    open_bucket(bucket.address)
    assert len(caplog.records) == 1


def test_a_password_in_an_address_is_not_shown() -> None:
    with failing(BucketError, "bucket.scheme") as caught:
        BucketFolder("s4://user:secret@host/x")
    assert "secret" not in str(caught.value)


# -- copies in the background ------------------------------------------------------------------------------------------


def test_a_failing_bucket_is_tried_again_with_the_newest(bucket: BucketFolder, tmp_path: Path) -> None:
    """Local files may be deleted at once, and are kept for the copy until it has arrived."""
    copier = copier_of(bucket, tmp_path)
    fail_with(ConnectionError("503"))
    copier.offer(1, first := written(tmp_path, 1))
    for path in [*first.rglob("*.bin")]:
        path.unlink()
    pauses = [copier.turn() for _ in range(9)]
    assert pauses[:3] == [RETRY_SECONDS, 2 * RETRY_SECONDS, 4 * RETRY_SECONDS]
    assert pauses[-1] == RETRY_SECONDS_MAX
    for number in range(2, 6):
        copier.offer(number, written(tmp_path, number))
    assert {path.name.partition(".")[0] for path in (tmp_path / "uploads").iterdir()} == {"5"}  # the disk does not fill
    assert len(copier.news()) == 1  # a bucket that fails is named once
    assert copier.trouble
    FaultyFileSystem.fault = staticmethod(lambda request, path: None)
    assert copier.turn() == 0
    assert copier.bundles.numbers() == [5]
    assert len(copier.news()) == 1
    assert not copier.trouble
    assert list((tmp_path / "uploads").iterdir()) == []


def test_a_later_process_copies_what_is_left(bucket: BucketFolder, tmp_path: Path) -> None:
    copier = copier_of(bucket, tmp_path)
    fail_with(ConnectionError("refused"))
    source = written(tmp_path, 4)
    copier.offer(4, source)
    copier.turn()
    FaultyFileSystem.fault = staticmethod(lambda request, path: None)
    other = Copier(copier.bundles, tmp_path / "uploads", {"run": "demo", "uid": "2"}, 3)
    other.start()
    assert other.close()
    assert copier.bundles.numbers() == []  # that was another run of the same name
    later = copier_of(bucket, tmp_path)
    later.start()
    assert later.close()
    assert copier.bundles.numbers() == [4]
    copier.bundles.get(4, tmp_path / "new")
    assert content(tmp_path / "new") == content(source)


def test_a_checkpoint_that_was_staged_in_part_is_not_copied(bucket: BucketFolder, tmp_path: Path) -> None:
    """The process is killed while it stages the same number again."""
    copier = copier_of(bucket, tmp_path)
    copier.offer(4, source := written(tmp_path, 4))

    def killed(source: Path, place: Path, **_: object) -> None:
        place.mkdir()
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "copytree", killed)
        with pytest.raises(KeyboardInterrupt):
            copier.offer(4, source)
    later = copier_of(bucket, tmp_path)
    later.start()
    assert later.close()
    assert later.bundles.numbers() == []


def test_a_staged_checkpoint_that_was_deleted_is_forgotten(bucket: BucketFolder, tmp_path: Path) -> None:
    copier = copier_of(bucket, tmp_path)
    copier.offer(1, written(tmp_path, 1))
    shutil.rmtree(tmp_path / "uploads" / "1")
    assert copier.turn() == 0
    assert copier.bundles.numbers() == []
    copier.offer(2, written(tmp_path, 2))
    assert copier.turn() == 0
    assert copier.bundles.numbers() == [2]


def test_the_end_of_a_process_does_not_wait_for_a_bucket_that_fails(bucket: BucketFolder, tmp_path: Path) -> None:
    fail_with(ConnectionError("refused"))
    copier = copier_of(bucket, tmp_path)
    copier.start()
    copier.offer(1, written(tmp_path, 1))
    assert not copier.close(1e9)  # one more try, and not the pauses between tries
    assert (tmp_path / "uploads" / "1").is_dir()


def test_only_the_newest_bundles_are_kept(bucket: BucketFolder, tmp_path: Path) -> None:
    copier = copier_of(bucket, tmp_path, keep=2)
    for number in (1, 2, 5):
        copier.offer(number, written(tmp_path, number))
        assert copier.turn() == 0
    assert copier.bundles.numbers() == [2, 5]
    assert copier.newest == 5
    fail_with(PermissionError("no deletions"), "delete")
    copier.offer(6, written(tmp_path, 6))
    assert copier.turn() == 0  # the copy is there
    assert copier.bundles.numbers() == [2, 5, 6]


def test_numbers_of_another_process_are_not_replaced(bucket: BucketFolder, tmp_path: Path) -> None:
    """Numbers begin anew on another machine. The copier says which are taken, and the next one is above them."""
    copier_of(bucket, tmp_path).bundles.put(9, written(tmp_path / "a", 9), ABOUT)
    copier = copier_of(bucket, tmp_path)
    copier.offer(3, written(tmp_path, 3))
    assert copier.turn() == 0
    assert copier.newest == 9
    assert copier.bundles.numbers() == [9]


def test_checkpoints_of_another_run_are_left_alone(bucket: BucketFolder, tmp_path: Path) -> None:
    bundles = copier_of(bucket, tmp_path).bundles
    bundles.put(1, written(tmp_path / "a", 1), {"run": "other", "uid": ""})
    copier = copier_of(bucket, tmp_path, keep=1)
    copier.offer(3, written(tmp_path, 3))
    assert copier.turn() > 0
    assert "other" in copier.trouble
    assert bundles.numbers() == [1]


def test_a_slow_bucket_delays_nothing(bucket: BucketFolder, tmp_path: Path, until: Until) -> None:
    """While a copy takes its time, further checkpoints only replace the one that waits."""
    released, puts = threading.Event(), list[str]()

    def fault(request: str, path: str) -> None:
        if request == "put":
            puts.append(path)
            assert released.wait(60)

    FaultyFileSystem.fault = staticmethod(fault)
    copier = copier_of(bucket, tmp_path)
    copier.start()
    copier.offer(1, written(tmp_path, 1))
    until(lambda: puts, "the first upload")
    for number in range(2, 6):
        copier.offer(number, written(tmp_path, number))
    assert not copier.close(0.01)
    released.set()
    assert copier.close()
    assert copier.bundles.numbers() == [1, 5]


# -- records -----------------------------------------------------------------------------------------------------------


def test_a_record_is_copied_and_comes_back(bucket: BucketFolder, tmp_path: Path) -> None:
    local, remote = tmp_path / "record", bucket.child("record")
    copy_record(local, remote)
    local.mkdir()
    for name in ("begin.bin", "rounds-00000001-00000003.bin"):
        (local / name).write_bytes(name.encode())
    (local / ".rounds-00000004-00000004.bin.77").write_bytes(b"half")
    FaultyFileSystem.fault = staticmethod(lambda request, path: 2 if "rounds" in path else None)
    with failing(BucketError, "bucket.incomplete"):
        copy_record(local, remote)
    FaultyFileSystem.fault = staticmethod(lambda request, path: None)
    copy_record(local, remote)  # also the one of which a part is there
    FaultyFileSystem.requests.clear()
    copy_record(local, remote)
    assert not [path for request, path in FaultyFileSystem.requests if request == "put"]
    fetch_record(remote, tmp_path / "new")
    assert content(tmp_path / "new").keys() == {"begin.bin", "rounds-00000001-00000003.bin"}
