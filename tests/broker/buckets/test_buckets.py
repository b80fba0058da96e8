"""Checkpoints in a bucket: an upload that is slow, fails or is cut off loses nothing, and is never taken for one."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from pathlib import Path

import pytest

from archipelago.broker.buckets.bundles import Bundles
from archipelago.broker.buckets.copier import RETRY_SECONDS, RETRY_SECONDS_MAX, Copier
from archipelago.broker.buckets.folder import BucketError, BucketFolder, open_bucket
from archipelago.broker.messages import UNCOPIED
from archipelago.broker.wire import digest
from tests.broker.buckets import faulty_bucket
from tests.broker.buckets.faulty_bucket import FaultyFileSystem, no_fault
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
    return Copier(Bundles(bucket.child("checkpoints")), folder, ABOUT, keep)


def offer(copier: Copier, number: int) -> Path:
    """Write a checkpoint and offer it."""
    source = written(copier.folder, number)
    copier.offer(number)
    return source


def fail_with(error: Exception, *requests: str, ending: str = "") -> None:
    """Let these requests fail for paths with that ending; without any, all."""

    def fault(request: str, path: str) -> None:
        if (not requests or request in requests) and path.endswith(ending):
            raise error

    FaultyFileSystem.fault = staticmethod(fault)


def heal() -> None:
    """End the faults."""
    FaultyFileSystem.fault = staticmethod(no_fault)


def heads_of(bucket: BucketFolder) -> set[str]:
    """Return how the names of the bundles and manifests in the bucket begin."""
    return {path.partition("/")[0].partition("-")[0] for path in bucket.tree()}


# -- bundles -----------------------------------------------------------------------------------------------------------


def test_an_upload_that_is_cut_off_does_not_exist(bucket: BucketFolder, tmp_path: Path) -> None:
    """The process or the bucket dies after any number of files; the earlier bundle stays the newest."""
    bundles = Bundles(bucket)
    for failing_put in range(4):
        faulty_bucket.reset()
        source, puts = tmp_path / str(failing_put), 0
        bundles.put(1, written(source, 1), ABOUT)

        def fault(request: str, path: str, most: int = failing_put) -> None:
            nonlocal puts
            puts += request == "put"
            if request == "put" and puts > most:
                raise ConnectionError("reset")

        FaultyFileSystem.fault = staticmethod(fault)
        with failing(BucketError):
            bundles.put(2, written(source, 2), ABOUT)
        assert bundles.numbers() == [1], failing_put
        heal()
        bundles.put(3, written(source, 3), ABOUT)
        bundles.prune(keep=2)
        assert bundles.numbers() == [1, 3]
        assert heads_of(bucket) == {"1", "1.json", "3", "3.json"}
    bundles.put(4, written(tmp_path, 4), ABOUT)
    bundles.prune(keep=1, besides=[1, 7])
    assert bundles.numbers() == [1, 4], "an older bundle is still needed"
    assert heads_of(bucket) == {"1", "1.json", "4", "4.json"}


def test_another_try_uploads_only_what_has_not_arrived(bucket: BucketFolder, tmp_path: Path) -> None:
    bundles, source = Bundles(bucket), written(tmp_path, 1)
    fail_with(ConnectionError("reset"), "put", ending="/2.bin")
    with failing(BucketError):
        bundles.put(1, source, ABOUT)
    heal()
    Bundles(bucket).put(1, source, ABOUT)  # as another process would
    puts = [path.rpartition("/")[2] for request, path in FaultyFileSystem.requests if request == "put"]
    assert puts == ["0.bin", "1.bin", "2.bin", "2.bin", "1.json"]
    bundles.get(1, tmp_path / "new")
    assert content(tmp_path / "new") == content(source)
    assert heads_of(bucket) == {"1", "1.json"}


def test_damage_is_found_and_leaves_nothing_on_the_disk(bucket: BucketFolder, tmp_path: Path) -> None:
    bundles = Bundles(bucket)
    FaultyFileSystem.fault = staticmethod(lambda request, path: 5 if path.endswith("2.bin") else None)
    bundles.put(5, written(tmp_path, 5), ABOUT)  # a file arrives in part
    heal()
    with failing(BucketError, "bucket.damaged"):
        bundles.get(5, tmp_path / "other" / "5")
    for number in (2, 3, 4):
        bundles.put(number, written(tmp_path, number), ABOUT)
    bucket.write(f"{bundles.manifest(4).folder}/d/1.bin", b"other" * 400)  # of the same size
    with failing(BucketError, "bucket.damaged"):
        bundles.get(4, tmp_path / "other" / "4")
    assert list((tmp_path / "other").iterdir()) == []
    bucket.delete(f"{bundles.manifest(3).folder}/d/1.bin")
    bundles.fetch_newer(tmp_path / "new", -1)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["2"]


def test_two_processes_can_upload_and_download_the_same_number(bucket: BucketFolder, tmp_path: Path) -> None:
    """The upload of one process ends later than that of the other."""
    bundles, new = Bundles(bucket), tmp_path / "new"
    bundles.put(1, written(tmp_path, 1), ABOUT)

    def upload(request: str, path: str) -> None:
        if request == "put" and path.endswith("2.json"):
            heal()
            bundles.put(2, tmp_path / "2", ABOUT)
            bundles.prune(keep=1)

    def download(request: str, path: str) -> None:
        if request == "get" and path.endswith("0.bin"):
            heal()
            bundles.fetch_newer(new, -1)

    FaultyFileSystem.fault = staticmethod(upload)
    bundles.put(2, written(tmp_path, 2), ABOUT)
    FaultyFileSystem.fault = staticmethod(download)
    bundles.fetch_newer(new, -1)
    assert content(new / "2") == content(tmp_path / "2")
    assert len(list(new.iterdir())) == 1


def test_a_fault_of_this_disk_is_not_one_of_the_bucket(bucket: BucketFolder, tmp_path: Path) -> None:
    bucket.write("x", b"content")
    with pytest.raises(OSError, match="No space"):
        bucket.download({"x": Path("/dev/full")})
    with pytest.raises(IsADirectoryError):
        bucket.download({"x": tmp_path})
    with pytest.raises(IsADirectoryError):
        bucket.upload({"y": tmp_path})
    with pytest.raises(FileNotFoundError):
        Bundles(bucket).put(1, tmp_path / "none", ABOUT)


def test_a_manifest_that_is_changed_or_of_another_format_or_names_files_outside_is_damaged(
    bucket: BucketFolder, tmp_path: Path
) -> None:
    def manifest(folder: str = "1-ab", path: str = "x", format: int = 1) -> dict[str, object]:
        body = {"format": format, "folder": folder, "files": {path: [1, ""]}, "about": ABOUT}
        return {**body, "digest": digest(json.dumps(body, sort_keys=True).encode())}

    bundles, sound = Bundles(bucket), manifest()
    bucket.write("1.json", json.dumps(sound).encode())
    assert bundles.manifest(1).folder == "1-ab"
    for changed, said in (
        (manifest(path="../x"), "predicate"),
        (manifest(path="/x"), "predicate"),
        (manifest(folder="../1-ab"), "predicate"),
        (manifest(format=2), "format"),
        (sound | {"about": {}}, "digest"),
        (sound, "missing"),
        ({}, "digest"),
    ):
        bucket.write("1.json", json.dumps(changed).encode())
        with failing(BucketError, "bucket.damaged") as caught:
            bundles.get(1, tmp_path / "new")
        assert said in str(caught.value)
    bucket.write("1.json", b"[" * 200_000)
    with failing(BucketError, "bucket.damaged"):
        bundles.get(1, tmp_path / "new")
    assert not (tmp_path / "new").exists()


# -- errors ------------------------------------------------------------------------------------------------------------


def test_a_wrong_address_is_refused_and_its_password_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    for address, code in (
        ("s4://user:secret@bucket/x", "bucket.scheme"),
        ("bucket/x", "bucket.scheme"),
        ("s3:/bucket/x", "bucket.scheme"),
        ("gs://bucket/x", "bucket.scheme"),
        ("dropbox://x/y", "bucket.scheme"),
    ):
        with failing(BucketError, code) as caught:
            open_bucket(address)
        assert "secret" not in str(caught.value)


def test_a_mistake_shows_at_the_start(bucket: BucketFolder) -> None:
    no_credentials = type("NoCredentialsError", (Exception,), {})
    for error, code in (
        (PermissionError("Access Denied"), "bucket.denied"),
        (FileNotFoundError("The specified bucket does not exist"), "bucket.missing"),
        (no_credentials("Unable to locate credentials"), "bucket.denied"),
    ):
        fail_with(error)
        with failing(BucketError, code):
            open_bucket(bucket.address)


def test_a_bucket_that_is_away_stops_no_start(bucket: BucketFolder, caplog: pytest.LogCaptureFixture) -> None:
    fail_with(ConnectionError("refused"))
    open_bucket(bucket.address)
    assert [vars(record)["code"] for record in caplog.records] == ["bucket.failed"]
    heal()
    fail_with(PermissionError("no deletions"), "delete")  # a bucket may keep everything
    open_bucket(bucket.address)
    assert len(caplog.records) == 1


# -- copies in the background ------------------------------------------------------------------------------------------


def test_a_failing_bucket_is_tried_again_with_the_newest(bucket: BucketFolder, tmp_path: Path) -> None:
    copier = copier_of(bucket, tmp_path)
    fail_with(ConnectionError("503"))
    offer(copier, 1)
    pauses = [copier.turn() for _ in range(9)]
    assert pauses[:3] == [RETRY_SECONDS, 2 * RETRY_SECONDS, 4 * RETRY_SECONDS]
    assert pauses[-1] == RETRY_SECONDS_MAX
    for number in range(2, 6):
        offer(copier, number)
    assert len(copier.news()) == 1  # a bucket that fails is named once
    assert copier.trouble
    heal()
    assert copier.turn() == 0
    assert copier.bundles.numbers() == [5]
    assert len(copier.news()) == 1
    assert (copier.trouble, copier.held()) == ("", set())


def test_a_later_process_copies_the_newest_on_the_disk(bucket: BucketFolder, tmp_path: Path) -> None:
    copier = copier_of(bucket, tmp_path)
    fail_with(ConnectionError("refused"))
    source = offer(copier, 4)
    copier.turn()
    assert copier.held() == {4}
    heal()
    for _ in range(2):
        later = copier_of(bucket, tmp_path)
        later.start(4)
        assert later.close()
        assert copier.bundles.numbers() == [4]
    copier.bundles.get(4, tmp_path / "new")
    assert content(tmp_path / "new") == content(source)


def test_a_checkpoint_that_another_process_deletes_is_not_copied(bucket: BucketFolder, tmp_path: Path) -> None:
    copier = copier_of(bucket, tmp_path)
    shutil.rmtree(offer(copier, 1))
    assert (copier.turn(), copier.bundles.numbers(), copier.held()) == (0, [], set())


def test_the_end_of_a_process_does_not_wait_for_a_bucket_that_fails(bucket: BucketFolder, tmp_path: Path) -> None:
    fail_with(ConnectionError("refused"))
    copier = copier_of(bucket, tmp_path)
    copier.start(None)
    offer(copier, 1)
    assert not copier.close(1e9)  # one more try, and not the pauses between tries
    assert copier.held() == {1}


def test_only_the_newest_bundles_are_kept(bucket: BucketFolder, tmp_path: Path) -> None:
    copier = copier_of(bucket, tmp_path, keep=2)
    for number in (1, 2, 5):
        offer(copier, number)
        assert copier.turn() == 0
    assert copier.bundles.numbers() == [2, 5]
    assert copier.newest == 5
    fail_with(PermissionError("no deletions"), "delete")
    offer(copier, 6)
    assert copier.turn() == 0  # the copy is there
    assert copier.bundles.numbers() == [2, 5, 6]


def test_numbers_of_another_process_are_not_replaced_and_another_run_is_left_alone(
    bucket: BucketFolder, tmp_path: Path
) -> None:
    """Numbers begin anew on another machine. The copier says which are taken, and the next one is above them."""
    copier = copier_of(bucket, tmp_path, keep=1)
    copier.bundles.put(9, written(tmp_path / "a", 9), ABOUT)
    offer(copier, 3)
    assert copier.turn() == 0
    assert (copier.newest, copier.bundles.numbers()) == (9, [9])
    copier.bundles.put(10, written(tmp_path / "a", 10), {"run": "other", "uid": ""})
    offer(copier, 11)
    assert copier.turn() > 0
    assert "other" in copier.trouble
    assert copier.bundles.numbers() == [9, 10]


def test_a_damaged_manifest_of_the_newest_bundle_stops_no_copy(bucket: BucketFolder, tmp_path: Path) -> None:
    copier = copier_of(bucket, tmp_path)
    copier.bundles.folder.write("9.json", b"{}")
    offer(copier, 10)
    assert (copier.turn(), copier.bundles.numbers()[-1]) == (0, 10)


def test_a_slow_bucket_delays_nothing(bucket: BucketFolder, tmp_path: Path, until: Until) -> None:
    """While a copy takes its time, further checkpoints only replace the one that waits."""
    released, puts = threading.Event(), list[str]()

    def fault(request: str, path: str) -> None:
        if request == "put":
            puts.append(path)
            assert released.wait(60)

    FaultyFileSystem.fault = staticmethod(fault)
    copier = copier_of(bucket, tmp_path)
    copier.start(None)
    offer(copier, 1)
    until(lambda: puts, "the first upload")
    for number in range(2, 6):
        offer(copier, number)
    assert copier.held() == {1, 5}
    assert not copier.close(0.01)
    assert [kind for kind, _ in copier.news()] == [UNCOPIED]
    released.set()
    assert copier.close()
    assert copier.bundles.numbers() == [1, 5]
