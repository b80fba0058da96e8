"""Copies on an S3 server: real requests of s3fs, with refusals, outages and bodies that were cut off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from archipelago.broker.buckets.bundles import Bundles
from archipelago.broker.buckets.copier import Copier
from archipelago.broker.buckets.folder import BucketError, BucketFolder, open_bucket
from tests.broker.buckets.s3_server import BUCKET, Faults, s3_server
from tests.broker.buckets.test_buckets import ABOUT, content, written
from tests.failing import failing
from tests.pytorch import required

required("moto")
s3fs = required("s3fs")
pytestmark = [
    pytest.mark.full,
    # moto and botocore use what newer versions of Python and of their packages call deprecated.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def running() -> Iterator[Faults]:
    """A server for all tests, because the client takes seconds to load."""
    with pytest.MonkeyPatch.context() as environment, s3_server(environment) as faults:
        yield faults


@pytest.fixture
def faults(running: Faults) -> Iterator[Faults]:
    """The faults of the server, none at first."""
    yield running
    running.end()


@pytest.fixture
def address(faults: Faults, tmp_path: Path) -> str:
    """An empty folder in the bucket."""
    return f"s3://{BUCKET}/{tmp_path.name}/demo/merger"


def test_a_checkpoint_comes_back_from_s3(faults: Faults, address: str, tmp_path: Path) -> None:
    bundles = Bundles(open_bucket(address, "checkpoints"))
    for number in (1, 2):
        bundles.put(number, written(tmp_path, number), ABOUT)
    assert bundles.numbers() == [1, 2]
    bundles.get(2, tmp_path / "new" / "2")
    assert content(tmp_path / "new" / "2") == content(tmp_path / "2")
    bundles.prune(keep=1)
    assert {path.partition("-")[0] for path in bundles.folder.tree()} == {"2", "2.json"}


@pytest.mark.parametrize("methods", [(), ("PUT",), ("GET", "HEAD")])
def test_missing_rights_show_at_the_start(faults: Faults, address: str, methods: tuple[str, ...]) -> None:
    faults.status, faults.methods = 403, methods
    with failing(BucketError, "bucket.denied"):
        open_bucket(address)


def test_a_bucket_without_deletions_can_be_used(faults: Faults, address: str, tmp_path: Path) -> None:
    faults.status, faults.methods = 403, ("DELETE", "POST")
    copier = Copier(Bundles(open_bucket(address)), tmp_path / "uploads", ABOUT, keep=1)
    for number in (1, 2):
        copier.offer(number, written(tmp_path, number))
        assert copier.turn() == 0
    assert copier.bundles.numbers() == [1, 2]


def test_a_bucket_that_is_not_there_shows_at_the_start(faults: Faults) -> None:
    with failing(BucketError, "bucket.missing"):
        open_bucket("s3://another/x")


def test_missing_credentials_show_at_the_start(faults: Faults, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs.S3FileSystem.clear_instance_cache()
    with failing(BucketError, "bucket.credentials"):
        open_bucket(address)
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize("after", [0, 1, 3])
def test_an_outage_amid_an_upload_loses_nothing(faults: Faults, address: str, tmp_path: Path, after: int) -> None:
    copier = Copier(Bundles(BucketFolder(address)), tmp_path / "uploads", ABOUT, keep=3)
    copier.offer(1, written(tmp_path, 1))
    assert copier.turn() == 0
    faults.status, faults.methods, faults.after = 500, ("PUT",), after
    copier.offer(2, written(tmp_path, 2))
    assert copier.turn() > 0
    assert copier.bundles.numbers() == [1]
    faults.status = 0
    assert copier.turn() == 0
    assert copier.bundles.numbers() == [1, 2]
    copier.bundles.get(2, tmp_path / "new")
    assert content(tmp_path / "new") == content(tmp_path / "2")


def test_a_body_that_was_cut_off_is_noticed(faults: Faults, address: str, tmp_path: Path) -> None:
    bundles = Bundles(BucketFolder(address))
    faults.cut = True
    with failing(BucketError, "bucket.incomplete"):
        bundles.put(1, written(tmp_path, 1), ABOUT)
    assert bundles.numbers() == []


def test_a_slow_server_delays_nothing(faults: Faults, address: str, tmp_path: Path) -> None:
    faults.seconds = 0.2
    copier = Copier(Bundles(BucketFolder(address)), tmp_path / "uploads", ABOUT, keep=3)
    copier.start()
    for number in range(1, 5):
        copier.offer(number, written(tmp_path, number))
    assert copier.close()
    assert copier.bundles.numbers()[-1] == 4
